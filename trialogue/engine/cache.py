# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What the sampler keeps of the past: slots of keys, values and convolution inputs, and shared prefixes.

A slot holds the tokens of one conversation after its shared prefix. `StepPlan` is how the packed new
tokens of one step read and extend the slots: one product of all queries against each shared prefix, one
batched attention against every row's own slot, combined by their log-sums. Where each conversation has one
new token and all share one prefix or none, which is most steps, both parts go into one softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trialogue.engine.attention import LayerShapes, attend_with_sum, merge_parts
from trialogue.engine.kernels import Kernels, attend_rows, find_kernels, refuse_outside, turn_keys

MOST_SCORES = 1 << 24
"""Attention scores of one layer that are held at once in a step of single tokens."""


class Slab:
    """Keys and values [slots, KV, capacity, D] of each attention layer, inputs [slots, margin + capacity, C]
    of each convolution. The margin holds the last inputs before a slot begins (zeros at the very start)."""

    def __init__(self, shapes: LayerShapes, slots: int, capacity: int, device: torch.device) -> None:
        self.shapes, self.slots, self.capacity, self.device = shapes, slots, capacity, device
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        for layer, (heads, key_width, value_width) in shapes.attention.items():
            self.keys[layer] = self._zeros(slots, heads, capacity, key_width)
            self.values[layer] = self._zeros(slots, heads, capacity, value_width)
        for layer, (channels, kernel) in shapes.convolution.items():
            self.inputs[layer] = self._zeros(slots, kernel - 1 + capacity, channels)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=self.shapes.dtype, device=self.device)

    def resize(self, slots: int, capacity: int, kept: Sequence[int]) -> None:
        """Take new dimensions; slot `kept[i]` becomes slot i. Layer by layer: the peak is one layer more."""
        index = torch.tensor(kept, dtype=torch.long, device=self.device)
        shared = min(capacity, self.capacity)
        for store in (self.keys, self.values):
            for layer, old in store.items():
                store[layer] = self._zeros(slots, old.shape[1], capacity, old.shape[3])
                store[layer][: len(kept), :, :shared] = old[:, :, :shared].index_select(0, index)
        for layer, old in self.inputs.items():
            margin = old.shape[1] - self.capacity
            self.inputs[layer] = self._zeros(slots, margin + capacity, old.shape[2])
            self.inputs[layer][: len(kept), : margin + shared] = old[:, : margin + shared].index_select(
                0, index
            )
        self.slots, self.capacity = slots, capacity

    def begin(self, slot: int, prefix: Prefix | None) -> None:
        """Make a slot ready for tokens that follow `prefix`."""
        for layer, inputs in self.inputs.items():
            margin = inputs.shape[1] - self.capacity
            inputs[slot, :margin] = 0 if prefix is None else prefix.inputs[layer][-margin:]

    def take_in(self, slot: int, prefix: Prefix) -> None:
        """Begin a slot with a copy of `prefix`."""
        count = len(prefix.tokens)
        for store, held in ((self.keys, prefix.keys), (self.values, prefix.values)):
            for layer, tensor in store.items():
                tensor[slot, :, :count] = held[layer]
        for layer, tensor in self.inputs.items():
            tensor[slot, : tensor.shape[1] - self.capacity + count] = prefix.inputs[layer]

    def shift(self, slot: int, start: int, length: int) -> None:
        """Drop the first `start` of `length` tokens of a slot: from now on they are in a shared prefix."""
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[slot, :, : length - start] = tensor[slot, :, start:length].clone()
        for tensor in self.inputs.values():
            margin = tensor.shape[1] - self.capacity
            tensor[slot, : margin + length - start] = tensor[slot, start : margin + length].clone()

    def to_prefix(self, slot: int, tokens: list[int]) -> Prefix:
        """Copy the first tokens of a slot out as a shared prefix."""
        count = len(tokens)
        return Prefix(
            tokens,
            {layer: tensor[slot, :, :count].clone() for layer, tensor in self.keys.items()},
            {layer: tensor[slot, :, :count].clone() for layer, tensor in self.values.items()},
            {
                layer: tensor[slot, : tensor.shape[1] - self.capacity + count].clone()
                for layer, tensor in self.inputs.items()
            },
        )


def bytes_per_token(shapes: LayerShapes, *, is_shared: bool = False) -> int:
    """Of a prefix keys are kept twice: as the model and as the kernel reads them."""
    copies = 2 if is_shared else 1
    floats = sum(heads * (copies * key + value) for heads, key, value in shapes.attention.values())
    floats += sum(channels for channels, _ in shapes.convolution.values())
    return floats * shapes.dtype.itemsize


@dataclass(slots=True, eq=False)
class Prefix:
    """Leading tokens computed once for all conversations that begin with them: keys [KV, P, D] by layer."""

    tokens: list[int]
    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    inputs: dict[int, Tensor]  # of each convolution, with what lies before the first token
    used: int = 0  # step of last use
    turned: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # keys as the kernel reads them

    def find_turned(self, layer: int, lanes: int) -> Tensor:
        if layer not in self.turned:
            self.turned[layer] = turn_keys(self.keys[layer], lanes)
        return self.turned[layer]


@dataclass(slots=True)
class Piece:
    """The new tokens of one conversation in one step: `count` tokens written at `start` of `slot`."""

    slot: int
    start: int
    count: int
    prefix: Prefix | None


@dataclass(slots=True)
class Bucket:
    """Pieces of about the same length, attended as one padded batch over their own slots."""

    tokens: Tensor  # [R * C] packed index of each query, padded with the first
    picked: Tensor  # which of the R * C results are real, in the order of `targets`
    targets: Tensor  # packed indices they belong to
    rows: int
    count: int
    length: int
    bias: Tensor  # [R, 1, C, T]: 0 where a query may look, else -inf
    slots: Tensor | slice
    is_straight: bool = False  # whether `tokens` and `picked` change nothing
    ends: tuple[Tensor, Tensor] | None = None  # where one new token a row: the slot of each, and its length

    def read(self, kept: Tensor) -> Tensor:
        """[slots, KV, capacity, D] → [R, KV, T, D], in place where slots are a range."""
        kept = kept[:, :, : self.length]
        return kept[self.slots] if isinstance(self.slots, slice) else kept.index_select(0, self.slots)


@dataclass(slots=True)
class StepPlan:
    """A `Plan` for packed pieces, in the order given."""

    slab: Slab
    slots: Tensor  # of each packed token
    places: Tensor  # index inside its slot
    buckets: list[Bucket]
    shared: list[tuple[Prefix, Tensor | None]] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.slab.keys[layer], self.slab.values[layer]
        keys.transpose(1, 2)[self.slots, self.places] = key.transpose(0, 1)
        values.transpose(1, 2)[self.slots, self.places] = value.transpose(0, 1)
        queries = query.transpose(0, 1)  # [N, H, D]
        if self._is_plain(queries.shape[1]):
            return self._attend_rows(layer, queries * scaling)
        output = queries.new_empty(queries.shape[0], queries.shape[1], values.shape[3])
        sums = torch.empty(queries.shape[:2], dtype=torch.float32, device=query.device)
        for bucket in self.buckets:
            picked = queries.index_select(0, bucket.tokens)
            picked = picked.view(bucket.rows, bucket.count, *queries.shape[1:]).transpose(1, 2)
            own_keys, own_values = bucket.read(keys), bucket.read(values)
            part, part_sum = attend_with_sum(picked, own_keys, own_values, scaling, bucket.bias)
            output[bucket.targets] = part.transpose(1, 2).flatten(0, 1).index_select(0, bucket.picked)
            sums[bucket.targets] = (
                part_sum.transpose(1, 2).flatten(0, 1).index_select(0, bucket.picked).float()
            )
        for prefix, tokens in self.shared:
            picked = query if tokens is None else query.index_select(1, tokens)
            part, part_sum = attend_with_sum(
                picked[None], prefix.keys[layer][None], prefix.values[layer][None], scaling
            )
            part, part_sum = part[0].transpose(0, 1), part_sum[0].transpose(0, 1)
            if tokens is None:
                output, sums = merge_parts(part, part_sum, output, sums)
            else:
                output[tokens], sums[tokens] = merge_parts(part, part_sum, output[tokens], sums[tokens])
        return output

    def _is_plain(self, heads: int) -> bool:
        """One new token in each conversation, one prefix that all share, or none, and room for all scores."""
        if len(self.buckets) > 1 or self.buckets[0].count > 1 or len(self.shared) > 1:
            return False
        known = 0
        for prefix, tokens in self.shared:
            if tokens is not None:
                return False
            known = len(prefix.tokens)
        (bucket,) = self.buckets
        return bucket.rows * heads * (known + bucket.length) <= MOST_SCORES

    def _attend_rows(self, layer: int, queries: Tensor) -> Tensor:
        """Scaled queries [N, H, D] → [N, H, D]."""
        (bucket,) = self.buckets
        keys, values = self.slab.keys[layer], self.slab.values[layer]
        kernels = self._find_kernels(queries, values)
        if kernels is not None and bucket.ends is not None:
            pairs = [(one.find_turned(layer, kernels.lanes), one.values[layer]) for one, _ in self.shared]
            prefix = pairs[0] if pairs else ()
            return attend_rows(kernels, queries.contiguous(), keys, values, *bucket.ends, *prefix)
        own_keys, own_values = bucket.read(keys), bucket.read(values)
        rows, heads, length, width = own_keys.shape
        if not bucket.is_straight:
            queries = queries.index_select(0, bucket.tokens)
        # The queries that share a key head are rows of one matrix product.
        grouped = queries.reshape(rows * heads, -1, width)
        groups = grouped.shape[1]
        bias = bucket.bias.expand(rows, heads, 1, length).reshape(rows * heads, 1, length)
        scores = torch.baddbmm(bias, grouped, own_keys.flatten(0, 1).transpose(1, 2))
        if not self.shared:
            output = torch.bmm(scores.softmax(-1), own_values.flatten(0, 1))
        else:
            keys, values = self.shared[0][0].keys[layer], self.shared[0][0].values[layer]
            known = keys.shape[1]
            turned = queries.view(rows, heads, groups, width).transpose(0, 1).reshape(heads, -1, width)
            before = torch.bmm(turned, keys.transpose(1, 2)).view(heads, rows, groups, known)
            both = torch.cat([before.transpose(0, 1), scores.view(rows, heads, groups, length)], 3)
            weights = both.softmax(-1)
            turned = weights[..., :known].transpose(0, 1).reshape(heads, -1, known)
            part = torch.bmm(turned, values).view(heads, rows, groups, -1).transpose(0, 1)
            own = weights[..., known:].flatten(0, 1)
            output = torch.baddbmm(part.reshape(rows * heads, groups, -1), own, own_values.flatten(0, 1))
        output = output.view(rows, heads * groups, -1)
        return output if bucket.is_straight else output.index_select(0, bucket.picked)

    def _find_kernels(self, queries: Tensor, values: Tensor) -> Kernels | None:
        width = queries.shape[2]
        is_at_hand = queries.dtype == torch.float32 and queries.device.type == "cpu"
        kernels = find_kernels() if is_at_hand and values.shape[3] == width else None
        return kernels if kernels is not None and width % kernels.lanes == 0 else None

    def look_back(self, layer: int, inputs: Tensor, kernel: int) -> list[Tensor]:
        kept = self.slab.inputs[layer]
        kept[self.slots, self.places + (kernel - 1)] = inputs
        return [kept[self.slots, self.places + (kernel - 1 - distance)] for distance in range(1, kernel)]


def plan_step(slab: Slab, pieces: Sequence[Piece]) -> StepPlan:
    """Lay out one step. Pieces are padded together only with others of about their length."""
    device = slab.device
    offsets: list[int] = []
    slots: list[int] = []
    places: list[int] = []
    groups: dict[int, list[int]] = {}
    shared: dict[int, tuple[Prefix, list[int]]] = {}
    total = 0
    for number, piece in enumerate(pieces):
        offsets.append(total)
        if piece.count == 1:
            slots.append(piece.slot)
            places.append(piece.start)
            groups.setdefault(1, []).append(number)
        else:
            slots.extend([piece.slot] * piece.count)
            places.extend(range(piece.start, piece.start + piece.count))
            groups.setdefault(max(8, 1 << (piece.count - 1).bit_length()), []).append(number)
        if piece.prefix is not None:
            _, tokens = shared.setdefault(id(piece.prefix), (piece.prefix, []))
            tokens.extend(range(total, total + piece.count))
        total += piece.count
    buckets = [
        _plan_rows(slab, pieces, offsets, members)
        if count == 1
        else _plan_bucket(slab, pieces, offsets, members)
        for count, members in groups.items()
    ]
    return StepPlan(
        slab,
        torch.tensor(slots, device=device),
        torch.tensor(places, device=device),
        buckets,
        [
            (prefix, None if len(tokens) == total else torch.tensor(tokens, device=device))
            for prefix, tokens in shared.values()
        ],
    )


def _plan_rows(slab: Slab, pieces: Sequence[Piece], offsets: Sequence[int], members: list[int]) -> Bucket:
    """One new token a row. Where most slots of a range take part, the whole range is read in place; copying
    the chosen slots out pays only when they are few."""
    device = slab.device
    chosen = torch.tensor([pieces[number].slot for number in members], device=device)
    lengths = torch.tensor([pieces[number].start + 1 for number in members], device=device)
    targets = torch.tensor([offsets[number] for number in members], device=device)
    ends = chosen, lengths
    refuse_outside(chosen, lengths, slab.slots, slab.capacity)
    length = int(lengths.max())
    first, last = int(chosen.min()), int(chosen.max()) + 1
    rows = len(members)
    if 2 * rows >= last - first:
        rows = last - first
        picked = chosen - first
        tokens = torch.zeros(rows, dtype=torch.long, device=device).index_copy_(0, picked, targets)
        lengths = torch.ones(rows, dtype=torch.long, device=device).index_copy_(0, picked, lengths)
        slots: Tensor | slice = slice(first, last)
    else:
        picked = torch.arange(rows, device=device)
        tokens, slots = targets, chosen
    hidden = torch.arange(length, device=device) >= lengths[:, None]
    bias = torch.zeros(rows, length, dtype=slab.shapes.dtype, device=device).masked_fill_(hidden, -torch.inf)
    places = torch.arange(rows, device=device)
    is_straight = tokens.equal(places) and picked.equal(places)
    return Bucket(tokens, picked, targets, rows, 1, length, bias[:, None, None], slots, is_straight, ends)


def _plan_bucket(slab: Slab, pieces: Sequence[Piece], offsets: Sequence[int], members: list[int]) -> Bucket:
    device = slab.device
    chosen = [pieces[number] for number in members]
    count = max(piece.count for piece in chosen)
    length = max(piece.start + piece.count for piece in chosen)
    counts = torch.tensor([piece.count for piece in chosen], device=device)
    starts = torch.tensor([piece.start for piece in chosen], device=device)
    first = torch.tensor([offsets[number] for number in members], device=device)
    steps = torch.arange(count, device=device)
    real = steps < counts[:, None]
    tokens = torch.where(real, first[:, None] + steps, first[:, None]).flatten()
    hidden = torch.arange(length, device=device) > (starts[:, None] + steps)[:, :, None]
    bias = torch.zeros(hidden.shape, dtype=slab.shapes.dtype, device=device).masked_fill_(hidden, -torch.inf)
    picked = real.flatten().nonzero()[:, 0]
    places = [piece.slot for piece in chosen]
    in_order = places == list(range(places[0], places[0] + len(places)))
    slots = slice(places[0], places[-1] + 1) if in_order else torch.tensor(places, device=device)
    return Bucket(tokens, picked, tokens[picked], len(chosen), count, length, bias[:, None], slots)
