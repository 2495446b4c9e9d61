# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportIncompatibleMethodOverride=false
"""Rows that share prefixes as one packed tree, and attention along its paths with exact gradients.

Nodes are packed depth first, so the descendants of a node are one contiguous range. Attention splits into
causal blocks (a node to itself) and full blocks (all descendants to a node), merged by their log-sums. In the
backward pass each block uses the merged result, as in ring attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trialogue.engine.attention import merge_parts
from trialogue.engine.blocks import attend_block, backpropagate_block
from trialogue.engine.prefixes import common_length
from trialogue.engine.transfer import send

if TYPE_CHECKING:
    from trialogue.engine.cpu.fast_path import FastPath
    from trialogue.engine.cpu.kernels import DecodeBatch
    from trialogue.engine.cpu.tree_kernels import Paths

Span = tuple[int, int, int, list[int]]  # rows [first, last) continue at a depth, below a path of nodes


@dataclass(slots=True)
class Node:
    start: int  # packed range of its own tokens
    stop: int
    below: int  # end of the packed range of its descendants, which begins at `stop`
    above: list[int]  # its ancestors, from the root on


@dataclass(slots=True)
class Tree:
    """Packed tokens of rows; `paths[i]` lists the packed ranges that spell row i."""

    tokens: list[int]
    positions: list[int]
    previous: list[int]  # packed index of the token before, -1 at the start of a row
    nodes: list[Node]
    paths: list[list[tuple[int, int]]]


def grow_tree(rows: Sequence[list[int]], shortest: int = 16) -> Tree:
    """Pack rows as a tree. Shared prefixes of fewer than `shortest` tokens get no node."""
    order = sorted(range(len(rows)), key=lambda index: rows[index])
    ordered = [rows[index] for index in order]
    heights = [common_length(ordered[i], ordered[i + 1]) for i in range(len(ordered) - 1)]
    tree = Tree([], [], [], [], [[] for _ in rows])
    pending: list[Span] = [(0, len(ordered), 0, [])] if rows else []
    while pending:
        first, last, depth, path = pending.pop()
        groups: list[Span] = []
        begin = first
        for index in range(first, last):
            if index + 1 == last or heights[index] < depth + shortest:
                groups.append((begin, index + 1, depth, path))
                begin = index + 1
        if len(groups) > 1:
            pending.extend(reversed(groups))
            continue
        stop = min(heights[first : last - 1], default=len(ordered[first]))
        chunk = ordered[first][depth:stop]
        if chunk:
            start = len(tree.tokens)
            parent = tree.nodes[path[-1]].stop - 1 if path else -1
            tree.tokens += chunk
            tree.positions += range(depth, stop)
            tree.previous += [parent, *range(start, start + len(chunk) - 1)]
            for ancestor in path:
                tree.nodes[ancestor].below = len(tree.tokens)
            tree.nodes.append(Node(start, len(tree.tokens), len(tree.tokens), path))
            path = [*path, len(tree.nodes) - 1]
        if last - first == 1:
            tree.paths[order[first]] = [(tree.nodes[node].start, tree.nodes[node].stop) for node in path]
        else:
            pending.append((first, last, stop, path))
    return tree


@dataclass(slots=True)
class CausalBlock:
    """Nodes of similar length, padded at the end to one batch. The padding comes after all tokens, so a
    causal block needs no mask."""

    rows: int
    count: int
    gather: Tensor  # [rows * count] packed index, padded with the node's first token
    real: Tensor | None  # which of them are tokens, None when all are
    packed: Tensor  # their packed indices


class TreePlan:
    """An `AttentionPlan` in which each packed token attends along its path in the tree."""

    decode_batch: DecodeBatch | None = None

    def __init__(self, tree: Tree, device: torch.device, fast: FastPath | None = None) -> None:
        self.tree, self.device, self.fast = tree, device, fast
        self.inner = [node for node in tree.nodes if node.below > node.stop]

    @cached_property
    def blocks(self) -> list[CausalBlock]:
        blocks = [self._block(nodes) for nodes in group_by_length(self.tree.nodes)]
        tensors = [tensor for block in blocks for tensor in (block.gather, block.packed, block.real)]
        moved = iter(send([tensor for tensor in tensors if tensor is not None], self.device))
        for block in blocks:
            block.gather, block.packed = next(moved), next(moved)
            block.real = None if block.real is None else next(moved)
        return blocks

    def _block(self, nodes: Sequence[Node]) -> CausalBlock:
        starts = torch.tensor([node.start for node in nodes])[:, None]
        counts = torch.tensor([node.stop - node.start for node in nodes])[:, None]
        steps = torch.arange(int(counts.max()))
        gather = torch.where(steps < counts, starts + steps, starts).flatten()
        real = (steps < counts).flatten().nonzero()[:, 0]
        complete = len(real) == len(gather)
        return CausalBlock(
            len(nodes), len(steps), gather, None if complete else real, gather if complete else gather[real]
        )

    @cached_property
    def paths(self) -> Paths:
        """The tree as the kernels of the fast path read it."""
        assert self.fast is not None
        nodes = self.tree.nodes
        return self.fast.to_paths([(node.start, node.stop) for node in nodes], [node.above for node in nodes])

    @cached_property
    def previous(self) -> Tensor:
        """Packed index of the token before each token, on the host. The index past the end means none; it is
        its own predecessor."""
        end = len(self.tree.tokens)
        return torch.tensor([end if index < 0 else index for index in self.tree.previous] + [end])

    @cached_property
    def previous_there(self) -> Tensor:
        """`previous` on the device."""
        return send([self.previous], self.device)[0]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return TreeAttention.apply(query, key, value, self, scaling)

    def look_back(self, layer: int, inputs: Tensor, kernel: int) -> list[Tensor]:
        padded = torch.cat([inputs, inputs.new_zeros(1, inputs.shape[1])])
        found: list[Tensor] = []
        index = previous = self.previous_there
        for _ in range(1, kernel):
            found.append(padded.index_select(0, index[:-1]))
            index = previous[index]
        return found


def group_by_length(nodes: Sequence[Node], waste: float = 1.25) -> list[list[Node]]:
    """Batches of nodes whose longest is at most `waste` times the shortest."""
    groups: list[list[Node]] = []
    for node in sorted(nodes, key=lambda node: node.stop - node.start):
        length = node.stop - node.start
        if groups and length <= max(waste * (groups[-1][0].stop - groups[-1][0].start), 8):
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


class TreeAttention(torch.autograd.Function):
    """query [H, N, D], key and value [KV, N, D] → [N, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scaling: float
    ) -> Tensor:
        # Token first: then a node's tokens are contiguous, and the result is already [N, H, D].
        query, key, value = (tensor.transpose(0, 1).contiguous() for tensor in (query, key, value))
        fast = plan.fast
        kernels = None if fast is None else fast.find_tree_kernels(query, key, value)
        ctx.plan, ctx.scaling, ctx.kernels = plan, scaling, kernels
        if fast is not None and kernels is not None:
            given = (query.float(), key.float(), value.float())
            output, sums = fast.attend_paths(kernels, *given, plan.paths, scaling)
            output = output.to(value.dtype)
            ctx.save_for_backward(query, key, value, output, sums)
            return output
        output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        sums = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        for block in plan.blocks:
            part, part_sum = attend_block(
                *(_batched(tensor, block) for tensor in (query, key, value)), scaling=scaling, causal=True
            )
            output.index_copy_(0, block.packed, _flat(part, block))
            sums.index_copy_(0, block.packed, _flat(part_sum, block))
        for node in plan.inner:
            own, below = slice(node.start, node.stop), slice(node.stop, node.below)
            part, part_sum = attend_block(
                _single(query[below]), _single(key[own]), _single(value[own]), scaling=scaling, causal=False
            )
            part, part_sum = part[0].transpose(0, 1), part_sum[0].transpose(0, 1)
            output[below], sums[below] = merge_parts(part, part_sum, output[below], sums[below])
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        plan, scaling = ctx.plan, ctx.scaling
        grad = grad.contiguous()
        if ctx.kernels is not None:
            inputs = [tensor.float() for tensor in (query, key, value)]
            results = [tensor.float() for tensor in (output, sums, grad)]
            found = plan.fast.backpropagate_paths(ctx.kernels, inputs, results, plan.paths, scaling)
            return *(total.transpose(0, 1).to(value.dtype) for total in found), None, None
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for block in plan.blocks:
            batch = [_batched(tensor, block) for tensor in (grad, query, key, value, output, sums)]
            if block.real is not None:
                # Padding repeats a token as query and key. With gradient 0 and weight 0 it adds nothing.
                absent = torch.ones(block.rows * block.count, dtype=torch.bool, device=grad.device)
                absent = absent.index_fill_(0, block.real, False).view(block.rows, 1, block.count)
                batch[0] = batch[0].masked_fill(absent[..., None], 0)
                batch[5] = batch[5].masked_fill(absent, torch.inf)
            for total, part in zip(
                grads, backpropagate_block(*batch, scaling=scaling, causal=True), strict=True
            ):
                total.index_copy_(0, block.packed, _flat(part, block))
        for node in plan.inner:
            own, below = slice(node.start, node.stop), slice(node.stop, node.below)
            parts = backpropagate_block(
                _single(grad[below]),
                _single(query[below]),
                _single(key[own]),
                _single(value[own]),
                _single(output[below]),
                _single(sums[below]),
                scaling=scaling,
                causal=False,
            )
            for total, part, place in zip(grads, parts, (below, own, own), strict=True):
                total[place] += part[0].transpose(0, 1)
        return *(total.transpose(0, 1) for total in grads), None, None


def _batched(tensor: Tensor, block: CausalBlock) -> Tensor:
    """[N, H, …] → [rows, H, count, …]"""
    return (
        tensor.index_select(0, block.gather).view(block.rows, block.count, *tensor.shape[1:]).transpose(1, 2)
    )


def _flat(tensor: Tensor, block: CausalBlock) -> Tensor:
    """[rows, H, count, …] → [tokens, H, …]"""
    flat = tensor.transpose(1, 2).flatten(0, 1)
    return flat if block.real is None else flat.index_select(0, block.real)


def _single(tensor: Tensor) -> Tensor:
    """[n, H, …] → [1, H, n, …]"""
    return tensor.transpose(0, 1)[None]
