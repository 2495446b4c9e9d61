# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""What a step of a few new tokens needs most on a CPU, in C: `c/decode.c`, products, attention, all layers.

Matrix libraries are made for many rows: for a handful they bring weights, keys and values from memory at
half the speed at which it delivers. Where nothing can be compiled, or what was computes something else,
callers do without. There are kernels for float32, and for bfloat16 on processors that multiply it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from trialogue.engine.cores import count_free
from trialogue.engine.cpu.compiled import compile_source, find_function, refuse_unreadable, require, share

FEW_ROWS = 32
"""Rows up to which a single large product in float32 is done here."""
THREADS = 8
"""That share a step at most; what more than two save was not measured."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How keys and values of `length` tokens lie: keys [length / lanes, width / numbers, lanes, numbers], so
    that scores of neighbours come out side by side, values [length / numbers, width, numbers]. Lengths are
    padded to a whole number of lanes."""

    lanes: int = 1
    numbers: int = 1  # that are multiplied at once
    dtype: torch.dtype = torch.float32

    def pad(self, length: int) -> int:
        return -(-length // self.lanes) * self.lanes

    def shape_keys(self, length: int, width: int) -> tuple[int, int, int, int]:
        return length // self.lanes, width // self.numbers, self.lanes, self.numbers

    def shape_values(self, length: int, width: int) -> tuple[int, int, int]:
        return length // self.numbers, width, self.numbers

    def lay_keys(self, keys: Tensor) -> Tensor:
        """[…, T, D], T a multiple of lanes → […, T / lanes, D / numbers, lanes, numbers]"""
        apart = keys.unflatten(-2, (-1, self.lanes)).unflatten(-1, (-1, self.numbers))
        return apart.transpose(-3, -2).to(self.dtype).contiguous()

    def lay_values(self, values: Tensor) -> Tensor:
        """[…, T, D] → […, T / numbers, D, numbers]"""
        return values.unflatten(-2, (-1, self.numbers)).transpose(-2, -1).to(self.dtype).contiguous()

    def read_keys(self, kept: Tensor) -> Tensor:
        """The way back, in place where nothing lies otherwise."""
        return kept.transpose(-3, -2).flatten(-2).flatten(-3, -2)

    def read_values(self, kept: Tensor) -> Tensor:
        return kept.transpose(-2, -1).flatten(-3, -2)


class Spots(ctypes.Structure):
    """`spots` of decode.c."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("rows", "capacity", "groups")),
        *((name, ctypes.c_void_p) for name in ("slots", "places", "order", "edges", "known")),
    )


class Memory(ctypes.Structure):
    """`memory` of decode.c."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("heads", "kept", "width")),
        ("scaling", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "prefixes")),
    )


class Rows:
    """Where new tokens lie. Row i is at places[i] of slots[i], one of `held` slots of a capacity, and looks
    at it up to there, and at the prefix of its group, which has `known` tokens. Rows of a slot follow each
    other."""

    def __init__(
        self,
        slots: Sequence[int],
        places: Sequence[int],
        groups: Sequence[int],
        known: Sequence[int],
        held: int,
        capacity: int,
    ) -> None:
        require(len(slots) == len(places) == len(groups), "rows without a place")
        require(0 <= min(slots) <= max(slots) < held, "slots that are not there")
        require(0 <= min(places) <= max(places) < capacity, "places that no slot has")
        require(0 <= min(groups) <= max(groups) < len(known), "a group that is not there")
        order = sorted(range(len(slots)), key=groups.__getitem__)
        edges = [sum(group < number for group in groups) for number in range(len(known) + 1)]
        self.lists = [torch.tensor(values) for values in (slots, places, order, edges, known)]
        addresses = [values.data_ptr() for values in self.lists]
        self.known, self.held = known, held
        self.spots = Spots(len(slots), capacity, len(known), *addresses)

    def __len__(self) -> int:
        return len(self.lists[0])


@dataclass(frozen=True, slots=True)
class Kernels:
    """`c/decode.c` as compiled for this machine: functions that take addresses and sizes."""

    lay_out: Callable[..., int]
    product: Callable[..., int]
    attend: Callable[..., int]
    advance: Callable[..., int]
    room_to_attend: Callable[..., int]
    room_of_a_part: Callable[..., int]
    layout: Layout
    most: int
    """Rows of a step that they take at once."""
    told: tuple[int, int]
    """Bytes of what they are told of a layer, and of a step."""

    @property
    def lanes(self) -> int:
        """Numbers in a vector: what widths must be multiples of."""
        return self.layout.lanes


def to_panels(kernels: Kernels, weight: Tensor) -> Tensor:
    """[out, in] → [out / lanes, in / numbers, lanes, numbers], with zeros where outputs are left over"""
    (outputs, width), layout = weight.shape, kernels.layout
    refuse_unreadable(weight)
    require(width % layout.numbers == 0, "a width that is no whole number of units")
    shape = layout.shape_keys(layout.pad(outputs), width)
    panels = torch.empty(shape, dtype=layout.dtype)
    places = (weight.data_ptr(), panels.data_ptr(), outputs, shape[1])
    share(lambda _, first, last: kernels.lay_out(*places, first, last), len(panels))
    return panels


def multiply(kernels: Kernels, inputs: Tensor, panels: Tensor) -> Tensor:
    """inputs [N, in] times a matrix in panels → [N, outputs, and those that are nothing]"""
    (rows, width), layout = inputs.shape, kernels.layout
    refuse_unreadable(inputs)
    refuse_unreadable(panels, numbers=layout.dtype)
    require(width % layout.numbers == 0, "a width that is no whole number of units")
    units = width // layout.numbers
    require(panels.shape[1:] == (units, layout.lanes, layout.numbers), "panels of another width")
    output = inputs.new_empty(rows, len(panels) * layout.lanes)
    places = (inputs.data_ptr(), panels.data_ptr(), output.data_ptr())
    sizes = (rows, units, output.shape[1])
    parts = min(count_free(), THREADS) if rows <= FEW_ROWS else None
    share(
        lambda _, first, last: kernels.product(*places, *sizes, first, last),
        len(panels),
        layout.lanes,
        parts,
    )
    return output


class Holder(Protocol):
    """What is kept of tokens, by layer: of all slots, or of one prefix."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    inputs: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class Few:
    """A step of few new tokens for kernels to take: where tokens lie in slots, what each group looks at."""

    kernels: Kernels
    rows: Rows
    slots: Holder
    prefixes: Sequence[Holder | None]

    def tell(self, layer: int, memory: Memory) -> list[int]:
        """Tell a kernel where keys and values of a layer are, if they lie as it reads them; returns where
        those of the prefixes are."""
        layout, rows = self.kernels.layout, self.rows
        capacity, width = rows.spots.capacity, memory.width
        require(width % layout.lanes == 0, "a width that is no whole number of vectors")
        require(capacity % layout.lanes == 0, "slots that end within a vector")
        require(memory.heads % memory.kept == 0, "heads that cannot share keys evenly")
        require(len(self.prefixes) == len(rows.known), "a prefix for each group but one")
        addresses: list[int] = []
        leading = (rows.held, memory.kept)
        for length, holder in zip((capacity, *rows.known), (self.slots, *self.prefixes), strict=True):
            if holder is None:
                require(length == 0, "half a prefix")
                addresses += [0, 0]
                continue
            padded = layout.pad(length)
            shapes = layout.shape_keys(padded, width), layout.shape_values(padded, width)
            for tensor, shape in zip((holder.keys[layer], holder.values[layer]), shapes, strict=True):
                refuse_unreadable(tensor, numbers=layout.dtype)
                require(tensor.shape == (*leading, *shape), "keys or values that lie otherwise")
                addresses.append(tensor.data_ptr())
            leading = (memory.kept,)
        memory.keys, memory.values = addresses[:2]
        return addresses[2:]


def attend_rows(few: Few, layer: int, queries: Tensor, scaling: float) -> Tensor:
    """Queries [N, H, D] of new tokens → [N, H, D]; their own keys and values are in place already."""
    kernels, rows, (count, heads, width) = few.kernels, few.rows, queries.shape
    refuse_unreadable(queries)
    require(count == len(rows), "queries of other rows")
    memory = Memory(heads, few.slots.keys[layer].shape[1], width, scaling)
    found = few.tell(layer, memory)
    addresses = (ctypes.c_void_p * len(found))(*found)
    memory.prefixes = ctypes.addressof(addresses)
    told = ctypes.addressof(rows.spots), ctypes.addressof(memory)
    parts = min(count, count_free(), THREADS)
    each = kernels.room_to_attend(*told)
    scratch, output = queries.new_empty(parts * each), torch.empty_like(queries)
    places = (*told, queries.data_ptr(), output.data_ptr(), scratch.data_ptr())
    share(lambda part, _, __: kernels.attend(*places, each, parts, part), parts, parts=parts)
    return output


@cache
def load_kernels(*, is_half: bool) -> Kernels | None:
    library = compile_source("decode.c", *(["-DPAIRS"] if is_half else []))
    if library is None:
        return None
    size = ctypes.c_size_t
    lanes = size.in_dll(library, "lanes_of_a_vector").value
    kernels = Kernels(
        find_function(library, "lay_out", 2, *[size] * 4),
        find_function(library, "product", 3, *[size] * 5),
        find_function(library, "attend", 5, *[size] * 3),
        find_function(library, "advance", 1, size, ctypes.c_void_p, size),
        find_function(library, "room_to_attend", 2, gives=size),
        find_function(library, "room_of_a_part", 1, size, ctypes.c_void_p, gives=size),
        Layout(lanes, 2, torch.bfloat16) if is_half else Layout(lanes),
        size.in_dll(library, "most_rows").value,
        (size.in_dll(library, "bytes_of_a_layer").value, size.in_dll(library, "bytes_of_a_step").value),
    )
    return kernels if are_right(kernels) else None


@dataclass(slots=True)
class Held:
    """A layer that holds something, to try kernels on."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    inputs: dict[int, Tensor]

    @classmethod
    def lay(cls, layout: Layout, keys: Tensor, values: Tensor) -> Held:
        padding = (0, 0, 0, layout.pad(keys.shape[-2]) - keys.shape[-2])
        keys, values = (torch.nn.functional.pad(tensor, padding) for tensor in (keys, values))
        return cls({0: layout.lay_keys(keys)}, {0: layout.lay_values(values)}, {})


def are_right(kernels: Kernels) -> bool:
    """Whether products and attention are what torch makes of the same numbers, rounded as they are there."""
    layout = kernels.layout

    def draw(*shape: int, offset: int = 0) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.arange(count * 1.0).add(offset).sin().view(shape).to(layout.dtype).float()

    weight = draw(3 * layout.lanes, 64, offset=5)
    for count in range(1, FEW_ROWS + 1):  # each height of a tile is code of its own
        inputs = draw(count, 64)
        product = multiply(kernels, inputs, to_panels(kernels, weight))
        if not torch.allclose(product, inputs @ weight.T, atol=1e-4):
            return False
    heads, kept, width, known, own = 4, 2, 2 * layout.lanes, 5, 2 * layout.lanes
    queries = draw(3, heads, width)
    keys, values = (draw(3, kept, own, width, offset=offset) for offset in (1, 2))
    prefix = [draw(kept, known, width, offset=offset) for offset in (3, 4)]
    slots, places, groups = [2, 0, 1], [6, 0, own - 1], [1, 0, 1]
    rows = Rows(slots, places, groups, [0, known], 3, own)
    few = Few(kernels, rows, Held.lay(layout, keys, values), [None, Held.lay(layout, *prefix)])
    found = attend_rows(few, 0, queries, 0.2)
    for row, (slot, place, group) in enumerate(zip(slots, places, groups, strict=True)):
        key, value = (
            torch.cat([before[:, : group * known], own[slot, :, : place + 1]], 1)[None]
            for before, own in zip(prefix, (keys, values), strict=True)
        )
        expected = torch.nn.functional.scaled_dot_product_attention(
            queries[row][None, :, None], key, value, scale=0.2, enable_gqa=True
        )
        tolerance = 2e-2 if layout.dtype == torch.bfloat16 else 1e-4
        if not torch.allclose(found[row], expected[0, :, 0], atol=tolerance):
            return False
    return True
