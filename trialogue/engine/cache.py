# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The sampler's cache: slots of keys, values and convolution inputs, and shared prefixes.

A slot holds the tokens of one conversation after its shared prefix. `StepPlan` reads and extends the slots
for the packed new tokens of one step. With compiled kernels, keys and values are stored in their layout, and
each token attends on its own. Otherwise, and for long prompts, all queries attend to each shared prefix in
one matmul and to their own slots in batches; the parts are merged by their log-sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trialogue.engine.attention import attend_with_sum, merge_parts
from trialogue.engine.plan import LayerShapes, Layout
from trialogue.engine.transfer import send

if TYPE_CHECKING:
    from trialogue.engine.cpu.kernels import DecodeBatch, Kernels


class Slab:
    """Keys and values [slots, KV, capacity, D] of each attention layer, in the layout of `kernels` if given,
    and inputs [slots, margin + capacity, C] of each convolution. The margin holds the last inputs before the
    slot begins, or zeros."""

    def __init__(
        self,
        shapes: LayerShapes,
        slots: int,
        capacity: int,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        self.shapes, self.device, self.kernels = shapes, device, kernels
        self.layout = Layout(dtype=shapes.dtype) if kernels is None else kernels.layout
        self.slots, self.capacity = slots, self.layout.pad(capacity)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        for layer, (heads, key_width, value_width) in shapes.attention.items():
            self.keys[layer] = self._zeros(slots, heads, *self.layout.shape_keys(self.capacity, key_width))
            self.values[layer] = self._zeros(
                slots, heads, *self.layout.shape_values(self.capacity, value_width)
            )
        for layer, (channels, kernel) in shapes.convolution.items():
            self.inputs[layer] = self._zeros(
                slots, kernel - 1 + self.capacity, channels, dtype=self.shapes.dtype
            )

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(*shape, dtype=dtype or self.layout.dtype, device=self.device)

    def resize(self, slots: int, capacity: int, kept: Sequence[int]) -> None:
        """Change the dimensions; slot `kept[i]` becomes slot i. One layer is copied at a time."""
        index = send([torch.tensor(kept, dtype=torch.long)], self.device)[0]
        capacity = self.layout.pad(capacity)
        shared = min(capacity, self.capacity)
        for store, unit in ((self.keys, self.layout.lanes), (self.values, self.layout.per_unit)):
            for layer, old in store.items():
                store[layer] = self._zeros(slots, old.shape[1], capacity // unit, *old.shape[3:])
                store[layer][: len(kept), :, : shared // unit] = old[:, :, : shared // unit].index_select(
                    0, index
                )
        for layer, old in self.inputs.items():
            margin = old.shape[1] - self.capacity
            self.inputs[layer] = self._zeros(slots, margin + capacity, old.shape[2], dtype=old.dtype)
            self.inputs[layer][: len(kept), : margin + shared] = old[:, : margin + shared].index_select(
                0, index
            )
        self.slots, self.capacity = slots, capacity

    def begin(self, slot: int, prefix: Prefix | None) -> None:
        """Prepare a slot for tokens after `prefix`."""
        for layer, inputs in self.inputs.items():
            margin = inputs.shape[1] - self.capacity
            inputs[slot, :margin] = 0 if prefix is None else prefix.inputs[layer][-margin:]

    def take_in(self, slot: int, prefix: Prefix) -> None:
        """Copy `prefix` to the start of a slot."""
        for store, held in ((self.keys, prefix.keys), (self.values, prefix.values)):
            for layer, tensor in store.items():
                tensor[slot, :, : held[layer].shape[1]] = held[layer]
        for layer, tensor in self.inputs.items():
            tensor[slot, : tensor.shape[1] - self.capacity + len(prefix.tokens)] = prefix.inputs[layer]

    def write(self, layer: int, slots: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values [N, KV, D] to places of slots."""
        lanes, per_unit = self.layout.lanes, self.layout.per_unit
        keys, values = self.keys[layer].transpose(3, 4), self.values[layer].transpose(3, 4)
        keys[slots, :, places // lanes, places % lanes] = key.unflatten(2, (-1, per_unit)).to(keys.dtype)
        values[slots, :, places // per_unit, places % per_unit] = value.to(values.dtype)

    def read(self, layer: int, slots: Tensor | slice, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [R, KV, T, D] of the first places of slots; views where the layout is plain."""
        keys, values = self.keys[layer], self.values[layer]
        padded = self.layout.pad(length)
        keys, values = (
            keys[:, :, : padded // self.layout.lanes],
            values[:, :, : padded // self.layout.per_unit],
        )
        if isinstance(slots, slice):
            keys, values = keys[slots], values[slots]
        else:
            keys, values = keys.index_select(0, slots), values.index_select(0, slots)
        return self._plain(keys, values, length)

    def read_prefix(self, prefix: Prefix, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [KV, T, D]."""
        return self._plain(prefix.keys[layer], prefix.values[layer], len(prefix.tokens))

    def _plain(self, keys: Tensor, values: Tensor, length: int) -> tuple[Tensor, Tensor]:
        plain = self.layout.unpack_keys(keys), self.layout.unpack_values(values)
        keys, values = (tensor.to(self.shapes.dtype)[..., :length, :] for tensor in plain)
        return keys, values

    def shift(self, slot: int, start: int, length: int) -> None:
        """Drop the first `start` of `length` tokens of a slot, which are now in a shared prefix."""
        places = torch.arange(length - start, device=self.device)
        for layer in self.keys:
            both = self.read(layer, slice(slot, slot + 1), length)
            key, value = (tensor[0, :, start:].transpose(0, 1).clone() for tensor in both)
            self.write(layer, torch.full_like(places, slot), places, key, value)
        for tensor in self.inputs.values():
            margin = tensor.shape[1] - self.capacity
            tensor[slot, : margin + length - start] = tensor[slot, start : margin + length].clone()

    def to_prefix(self, slot: int, tokens: list[int]) -> Prefix:
        """Copy the first tokens of a slot to a new shared prefix."""
        padded = self.layout.pad(len(tokens))
        keys, values = padded // self.layout.lanes, padded // self.layout.per_unit
        return Prefix(
            tokens,
            {layer: tensor[slot, :, :keys].clone() for layer, tensor in self.keys.items()},
            {layer: tensor[slot, :, :values].clone() for layer, tensor in self.values.items()},
            {
                layer: tensor[slot, : tensor.shape[1] - self.capacity + len(tokens)].clone()
                for layer, tensor in self.inputs.items()
            },
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of cache per token."""
        floats = sum(heads * (key + value) for heads, key, value in self.shapes.attention.values())
        inputs = sum(channels for channels, _ in self.shapes.convolution.values())
        return floats * self.layout.dtype.itemsize + inputs * self.shapes.dtype.itemsize


@dataclass(slots=True, eq=False)
class Prefix:
    """Leading tokens, computed once for all conversations that begin with them; keys and values by layer, in
    the layout of the slots."""

    tokens: list[int]
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    inputs: dict[int, Tensor]  # of each convolution, with the margin
    used: int = 0  # step of last use


@dataclass(slots=True)
class Piece:
    """The new tokens of one conversation in one step: `count` tokens written at `start` of `slot`."""

    slot: int
    start: int
    count: int
    prefix: Prefix | None


@dataclass
class Bucket:
    """Pieces of similar length, which attend to their own slots as one padded batch of R rows."""

    count: int  # queries of a row
    length: int  # places they look at
    dtype: torch.dtype
    tokens: Tensor  # [R * count] packed index of each query, padded with the first
    picked: Tensor  # which of the R * count results are of tokens, in the order of `targets`
    targets: Tensor  # packed indices they belong to
    starts: Tensor  # [R] places before the first query
    slots: Tensor  # [R]
    whole: slice | None  # the slots, where they are consecutive

    @property
    def tensors(self) -> list[Tensor]:
        return [self.tokens, self.picked, self.targets, self.starts, self.slots]

    @tensors.setter
    def tensors(self, moved: list[Tensor]) -> None:
        self.tokens, self.picked, self.targets, self.starts, self.slots = moved

    @cached_property
    def bias(self) -> Tensor:
        """[R, 1, count, length]: 0 where a query may attend, else -inf."""
        device = self.starts.device
        last = self.starts[:, None] + torch.arange(self.count, device=device)
        hidden = torch.arange(self.length, device=device) > last[:, :, None]
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=device)
        return bias.masked_fill_(hidden, -torch.inf)[:, None]


class StepPlan:
    """An `AttentionPlan` for packed pieces, in the order given. `sent` are tensors that go to the device
    together with its own."""

    def __init__(self, slab: Slab, pieces: Sequence[Piece], sent: Sequence[Tensor] = ()) -> None:
        self.slab, self.pieces = slab, pieces
        self.offsets: list[int] = []
        slots: list[int] = []
        places: list[int] = []
        groups: list[int] = []
        self.prefixes: list[Prefix | None] = []
        group_numbers: dict[int, int] = {}
        for piece in pieces:
            self.offsets.append(len(slots))
            slots += [piece.slot] * piece.count
            places += range(piece.start, piece.start + piece.count)
            group = group_numbers.setdefault(id(piece.prefix), len(group_numbers))
            if group == len(self.prefixes):
                self.prefixes.append(piece.prefix)
            groups += [group] * piece.count
        self.sent = list(sent)
        self.slots, self.places = torch.tensor(slots), torch.tensor(places)
        self.decode_batch: DecodeBatch | None = None
        if slab.kernels is not None and max(piece.count for piece in pieces) <= slab.kernels.most_rows:
            self.decode_batch = slab.kernels.make_batch(slots, places, groups, slab, self.prefixes)
        else:
            self.buckets, self.shared = self._plan_buckets(), self._plan_shared()
            self._send()

    def _send(self) -> None:
        """Put all that was planned on the device, by one copy."""
        of_buckets = chain.from_iterable(bucket.tensors for bucket in self.buckets)
        shared = [tokens for _, tokens in self.shared if tokens is not None]
        moved = iter(send([*self.sent, self.slots, self.places, *of_buckets, *shared], self.slab.device))
        self.sent = list(islice(moved, len(self.sent)))
        self.slots, self.places = next(moved), next(moved)
        for bucket in self.buckets:
            bucket.tensors = list(islice(moved, 5))
        self.shared = [(prefix, tokens if tokens is None else next(moved)) for prefix, tokens in self.shared]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        slab = self.slab
        slab.write(layer, self.slots, self.places, key.transpose(0, 1), value.transpose(0, 1))
        queries = query.transpose(0, 1)  # [N, H, D]
        if self.decode_batch is not None:
            return self.decode_batch.attend(layer, queries.contiguous(), scaling)
        output = queries.new_empty(queries.shape[0], queries.shape[1], value.shape[2])
        sums = torch.empty(queries.shape[:2], dtype=torch.float32, device=query.device)
        for bucket in self.buckets:
            picked = queries.index_select(0, bucket.tokens)
            picked = picked.unflatten(0, (-1, bucket.count)).transpose(1, 2)
            slots = bucket.slots if bucket.whole is None else bucket.whole
            own_keys, own_values = slab.read(layer, slots, bucket.length)
            part, part_sum = attend_with_sum(picked, own_keys, own_values, scaling, bucket.bias)
            output[bucket.targets] = part.transpose(1, 2).flatten(0, 1).index_select(0, bucket.picked)
            sums[bucket.targets] = (
                part_sum.transpose(1, 2).flatten(0, 1).index_select(0, bucket.picked).float()
            )
        for prefix, tokens in self.shared:
            picked = query if tokens is None else query.index_select(1, tokens)
            keys, values = slab.read_prefix(prefix, layer)
            part, part_sum = attend_with_sum(picked[None], keys[None], values[None], scaling)
            part, part_sum = part[0].transpose(0, 1), part_sum[0].transpose(0, 1)
            if tokens is None:
                output, sums = merge_parts(part, part_sum, output, sums)
            else:
                output[tokens], sums[tokens] = merge_parts(part, part_sum, output[tokens], sums[tokens])
        return output

    def _plan_buckets(self) -> list[Bucket]:
        """Pieces, padded together with others of similar length."""
        groups: dict[int, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            size = 1 if piece.count == 1 else max(8, 1 << (piece.count - 1).bit_length())
            groups.setdefault(size, []).append(number)
        return [self._plan_bucket(members) for members in groups.values()]

    def _plan_bucket(self, members: list[int]) -> Bucket:
        chosen = [self.pieces[number] for number in members]
        count = max(piece.count for piece in chosen)
        length = max(piece.start + piece.count for piece in chosen)
        counts = torch.tensor([piece.count for piece in chosen])
        starts = torch.tensor([piece.start for piece in chosen])
        slots = torch.tensor([piece.slot for piece in chosen])
        first = torch.tensor([self.offsets[number] for number in members])
        steps = torch.arange(count)
        real = steps < counts[:, None]
        tokens = torch.where(real, first[:, None] + steps, first[:, None])
        targets, picked, whole = tokens[real], real.flatten().nonzero()[:, 0], None
        first_slot, last_slot = int(slots.min()), int(slots.max()) + 1
        rows = last_slot - first_slot
        if rows <= 2 * len(chosen):
            # Most slots of the range take part: read all as a view, and drop the results of the others.
            taken, whole = slots - first_slot, slice(first_slot, last_slot)
            starts = torch.full((rows,), length).index_copy_(0, taken, starts)
            tokens = torch.zeros(rows, count, dtype=torch.long).index_copy_(0, taken, tokens)
            picked = (taken[:, None] * count + steps)[real]
        dtype = self.slab.shapes.dtype
        return Bucket(count, length, dtype, tokens.flatten(), picked, targets, starts, slots, whole)

    def _plan_shared(self) -> list[tuple[Prefix, Tensor | None]]:
        """Each prefix and the tokens that attend to it, None for all."""
        found: list[tuple[Prefix, Tensor | None]] = []
        for prefix in self.prefixes:
            if prefix is not None:
                tokens = [
                    offset + number
                    for offset, piece in zip(self.offsets, self.pieces, strict=True)
                    if piece.prefix is prefix
                    for number in range(piece.count)
                ]
                all_share = len(tokens) == len(self.slots)
                found.append((prefix, None if all_share else torch.tensor(tokens)))
        return found

    def look_back(self, layer: int, inputs: Tensor, kernel: int) -> list[Tensor]:
        kept = self.slab.inputs[layer]
        kept[self.slots, self.places + (kernel - 1)] = inputs
        return [kept[self.slots, self.places + (kernel - 1 - distance)] for distance in range(1, kernel)]
