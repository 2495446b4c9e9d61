# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Compiled kernels for a decode step on a CPU (`c/decode.c`): matmuls, attention, and all layers at once.

Matrix libraries are made for many rows. For a few rows they read weights, keys and values at half the speed
of memory. There are kernels for float32, and for bfloat16 on processors that multiply it. Where they cannot
be compiled, or give wrong results, callers use torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from trialogue.engine.cores import count_free
from trialogue.engine.cpu.compiled import compile_source, find_function, refuse_unreadable, require, share
from trialogue.engine.plan import LayerShapes, Layout

if TYPE_CHECKING:
    from trialogue.engine.cache import Prefix, Slab

FEW_ROWS = 32
"""Largest number of rows for which a large float32 matmul uses these kernels."""
THREADS = 8
"""Most threads that share a step. More than two were not measured."""


class CRows(ctypes.Structure):
    """`rows` of decode.c."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("count", "capacity", "groups")),
        *((name, ctypes.c_void_p) for name in ("slots", "places", "order", "edges", "prefix_lengths")),
    )


class CCache(ctypes.Structure):
    """`cache` of decode.c."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("heads", "kv_heads", "width")),
        ("scaling", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "prefixes")),
    )


class Rows:
    """Where new tokens are in the cache. Row i is at places[i] of slots[i], one of `slot_count` slots. It
    attends to its slot up to that place, and to the prefix of its group. Rows of one slot must be
    consecutive."""

    def __init__(
        self,
        slots: Sequence[int],
        places: Sequence[int],
        groups: Sequence[int],
        prefix_lengths: Sequence[int],
        slot_count: int,
        capacity: int,
    ) -> None:
        require(len(slots) == len(places) == len(groups), "rows without a place")
        require(0 <= min(slots) <= max(slots) < slot_count, "slots out of range")
        require(0 <= min(places) <= max(places) < capacity, "places outside a slot")
        require(0 <= min(groups) <= max(groups) < len(prefix_lengths), "groups out of range")
        order = sorted(range(len(slots)), key=groups.__getitem__)
        edges = [sum(group < number for group in groups) for number in range(len(prefix_lengths) + 1)]
        self.lists = [torch.tensor(values) for values in (slots, places, order, edges, prefix_lengths)]
        addresses = [values.data_ptr() for values in self.lists]
        self.prefix_lengths, self.slot_count = prefix_lengths, slot_count
        self.struct = CRows(len(slots), capacity, len(prefix_lengths), *addresses)

    def __len__(self) -> int:
        return len(self.lists[0])


class CachedTensors(Protocol):
    """The cached tensors by layer: of all slots, or of one prefix."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    inputs: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class Kernels:
    """`c/decode.c` compiled for this machine: functions that take addresses and sizes."""

    lay_out: Callable[..., int]
    product: Callable[..., int]
    attend: Callable[..., int]
    advance: Callable[..., int]
    attention_scratch: Callable[..., int]
    step_scratch: Callable[..., int]
    layout: Layout
    most_rows: int
    """Most rows of one step."""
    struct_bytes: tuple[int, int]
    """Sizes of the structs of a layer and of a step."""

    @property
    def lanes(self) -> int:
        """Floats of a vector; widths must be multiples of it."""
        return self.layout.lanes

    def make_batch(
        self,
        slots: Sequence[int],
        places: Sequence[int],
        groups: Sequence[int],
        slab: Slab,
        prefixes: Sequence[Prefix | None],
    ) -> DecodeBatch:
        """Row i is at places[i] of slots[i] of a slab, after the prefix of its group."""
        lengths = [0 if prefix is None else len(prefix.tokens) for prefix in prefixes]
        rows = Rows(slots, places, groups, lengths, slab.slots, slab.capacity)
        return DecodeBatch(self, rows, slab, prefixes)


def find_step_kernels(shapes: LayerShapes, *, is_half: bool) -> Kernels | None:
    """The kernels for attention of a step, if the layers' widths fit them."""
    kernels = load_kernels(is_half=is_half) if shapes.dtype == torch.float32 else None
    if kernels is None:
        return None
    widths = [(key, value) for _, key, value in shapes.attention.values()]
    return kernels if all(key == value and key % kernels.lanes == 0 for key, value in widths) else None


def to_panels(kernels: Kernels, weight: Tensor) -> Tensor:
    """[out, in] → [out / lanes, in / per_unit, lanes, per_unit], padded with zeros"""
    (outputs, width), layout = weight.shape, kernels.layout
    refuse_unreadable(weight)
    require(width % layout.per_unit == 0, "a width that is not a multiple of the unit")
    shape = layout.shape_keys(layout.pad(outputs), width)
    panels = torch.empty(shape, dtype=layout.dtype)
    places = (weight.data_ptr(), panels.data_ptr(), outputs, shape[1])
    share(lambda _, first, last: kernels.lay_out(*places, first, last), len(panels))
    return panels


def multiply(kernels: Kernels, inputs: Tensor, panels: Tensor) -> Tensor:
    """inputs [N, in] times a matrix in panels → [N, padded outputs]"""
    (rows, width), layout = inputs.shape, kernels.layout
    refuse_unreadable(inputs)
    refuse_unreadable(panels, dtype=layout.dtype)
    require(width % layout.per_unit == 0, "a width that is not a multiple of the unit")
    units = width // layout.per_unit
    require(panels.shape[1:] == (units, layout.lanes, layout.per_unit), "panels of another width")
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


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The new tokens of a step as the kernels read them: their rows, the slots, the prefix of each group."""

    kernels: Kernels
    rows: Rows
    slots: CachedTensors
    prefixes: Sequence[CachedTensors | None]

    def fill(self, layer: int, cache: CCache) -> list[int]:
        """Set the addresses of a layer's keys and values, after checking their layout; returns the addresses
        of the prefixes' keys and values."""
        layout, rows = self.kernels.layout, self.rows
        capacity, width = rows.struct.capacity, cache.width
        require(width % layout.lanes == 0, "a width that is not a multiple of the vector")
        require(capacity % layout.lanes == 0, "slots that end within a vector")
        require(cache.heads % cache.kv_heads == 0, "heads that are not a multiple of the KV heads")
        require(len(self.prefixes) == len(rows.prefix_lengths), "another number of prefixes than of groups")
        addresses: list[int] = []
        leading = (rows.slot_count, cache.kv_heads)
        lengths, holders = (capacity, *rows.prefix_lengths), (self.slots, *self.prefixes)
        for length, holder in zip(lengths, holders, strict=True):
            if holder is None:
                require(length == 0, "a prefix without keys and values")
                addresses += [0, 0]
                continue
            padded = layout.pad(length)
            shapes = layout.shape_keys(padded, width), layout.shape_values(padded, width)
            for tensor, shape in zip((holder.keys[layer], holder.values[layer]), shapes, strict=True):
                refuse_unreadable(tensor, dtype=layout.dtype)
                require(tensor.shape == (*leading, *shape), "keys or values in another layout")
                addresses.append(tensor.data_ptr())
            leading = (cache.kv_heads,)
        cache.keys, cache.values = addresses[:2]
        return addresses[2:]

    def attend(self, layer: int, queries: Tensor, scaling: float) -> Tensor:
        """Queries [N, H, D] of the new tokens, whose keys and values are already in the slots → [N, H, D]"""
        kernels, rows, (count, heads, width) = self.kernels, self.rows, queries.shape
        refuse_unreadable(queries)
        require(count == len(rows), "queries of other rows")
        cache = CCache(heads, self.slots.keys[layer].shape[1], width, scaling)
        prefixes = self.fill(layer, cache)
        addresses = (ctypes.c_void_p * len(prefixes))(*prefixes)
        cache.prefixes = ctypes.addressof(addresses)
        structs = ctypes.addressof(rows.struct), ctypes.addressof(cache)
        parts = min(count, count_free(), THREADS)
        each = kernels.attention_scratch(*structs)
        scratch, output = queries.new_empty(parts * each), torch.empty_like(queries)
        places = (*structs, queries.data_ptr(), output.data_ptr(), scratch.data_ptr())
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
        find_function(library, "attention_scratch", 2, result=size),
        find_function(library, "step_scratch", 1, size, ctypes.c_void_p, result=size),
        Layout(lanes, 2, torch.bfloat16) if is_half else Layout(lanes),
        size.in_dll(library, "most_rows").value,
        (size.in_dll(library, "bytes_of_a_layer").value, size.in_dll(library, "bytes_of_a_step").value),
    )
    return kernels if are_decode_kernels_right(kernels) else None


@dataclass(slots=True)
class SampleCache:
    """Keys and values of one layer, to test kernels with."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    inputs: dict[int, Tensor]

    @classmethod
    def pack(cls, layout: Layout, keys: Tensor, values: Tensor) -> SampleCache:
        padding = (0, 0, 0, layout.pad(keys.shape[-2]) - keys.shape[-2])
        keys, values = (torch.nn.functional.pad(tensor, padding) for tensor in (keys, values))
        return cls({0: layout.pack_keys(keys)}, {0: layout.pack_values(values)}, {})


def are_decode_kernels_right(kernels: Kernels) -> bool:
    """Whether matmuls and attention agree with torch on the same rounded inputs."""
    layout = kernels.layout

    def draw(*shape: int, offset: int = 0) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.arange(count * 1.0).add(offset).sin().view(shape).to(layout.dtype).float()

    weight = draw(3 * layout.lanes, 64, offset=5)
    for count in range(1, FEW_ROWS + 1):  # each tile height is compiled separately
        inputs = draw(count, 64)
        product = multiply(kernels, inputs, to_panels(kernels, weight))
        if not torch.allclose(product, inputs @ weight.T, atol=1e-4):
            return False
    heads, kv_heads, width, known, capacity = 4, 2, 2 * layout.lanes, 5, 2 * layout.lanes
    queries = draw(3, heads, width)
    keys, values = (draw(3, kv_heads, capacity, width, offset=offset) for offset in (1, 2))
    prefix = [draw(kv_heads, known, width, offset=offset) for offset in (3, 4)]
    slots, places, groups = [2, 0, 1], [6, 0, capacity - 1], [1, 0, 1]
    rows = Rows(slots, places, groups, [0, known], 3, capacity)
    prefixes = [None, SampleCache.pack(layout, *prefix)]
    batch = DecodeBatch(kernels, rows, SampleCache.pack(layout, keys, values), prefixes)
    found = batch.attend(0, queries, 0.2)
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
