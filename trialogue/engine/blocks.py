# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Attention of one block of queries to one block of keys, with its log-sums, and its gradients.

A row of attention is put together from several blocks (`tree.py`). Flash attention computes a block in memory
linear in its length: on a CPU, and in half precision on a GPU. Everything else is computed by matmuls, some
queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

SCORES_AT_ONCE = 1 << 26
"""Most scores that matmuls make at a time: 256 MB."""
HAS_FLOAT_PRODUCTS = "dtype" in torch.ops.aten.bmm.overloads()
"""Whether this torch multiplies half-precision matrices into float32: since 2.8, on GPUs."""
MOST_WIDTH = 256
"""Widest head of flash attention on a GPU."""


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of query [B, H, Q, D] on key, value [B, KV, T, D], with its log-sums [B, H, Q] in float32.
    Causal blocks have Q = T."""
    if query.device.type == "cpu" and key.shape[3] == value.shape[3]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scaling
        )
    if is_for_flash(query, value):
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scaling
        )
        return found[0], found[1]
    return attend_block_plainly(query, key, value, scaling=scaling, causal=causal)


def backpropagate_block(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    *,
    scaling: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value through one block; output and sums are those over all blocks."""
    if query.device.type == "cpu" and key.shape[3] == value.shape[3]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, sums, 0.0, causal, scale=scaling
        )
    if is_for_flash(query, value):
        # Without dropout the seed is not read. The kernel takes the log-sums to be contiguous.
        unread = torch.empty(2, dtype=torch.uint64, device=query.device)
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, value, output, sums.contiguous(), None, None, query.shape[2], key.shape[2]),
            *(0.0, causal, unread, unread),
            scale=scaling,
        )
    return backpropagate_block_plainly(grad, query, key, value, output, sums, scaling=scaling, causal=causal)


def is_for_flash(query: Tensor, value: Tensor) -> bool:
    """Whether flash attention of a GPU computes these: half precision, and heads of one suitable width."""
    width = query.shape[3]
    suits = width == value.shape[3] and width % 8 == 0 and width <= MOST_WIDTH
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return suits and is_half and query.device.type != "cpu" and has_flash(query.device)


@cache
def has_flash(device: torch.device) -> bool:
    """Flash attention needs an Ampere GPU or a newer one, and a torch that was built with it."""
    if device.type != "cuda":
        return True
    is_built = torch.backends.cuda.is_flash_attention_available()
    return is_built and torch.cuda.get_device_capability(device) >= (8, 0)


def multiply_in_float32(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """Products of matrices [B, KV, M, D] and [B, KV, D, T], not rounded to half precision."""
    if left.dtype == torch.float32:
        return torch.matmul(left * scaling, right)
    if left.device.type == "cpu" or not HAS_FLOAT_PRODUCTS:
        return torch.matmul(left.float(), right.float()).mul_(scaling)
    product = torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out_dtype=torch.float32)
    return product.mul_(scaling).unflatten(0, left.shape[:2])


def to_chunks(query: Tensor, keys: int) -> Iterator[slice]:
    """Ranges of queries whose scores are made together."""
    batch, heads, queries, _ = query.shape
    size = max(1, SCORES_AT_ONCE // max(1, batch * heads * keys))
    return (slice(start, min(start + size, queries)) for start in range(0, queries, size))


def _scores(query: Tensor, key: Tensor, scaling: float, causal: bool, first: int) -> Tensor:
    """[B, KV, G, Q, T] in float32, -inf where a query may not attend. Queries begin at position `first`."""
    heads, queries = key.shape[1], query.shape[2]
    grouped = query.unflatten(1, (heads, -1)).flatten(2, 3)
    scores = multiply_in_float32(grouped, key.transpose(2, 3), scaling).unflatten(2, (-1, queries))
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu_(1 + first)
        scores = scores.masked_fill_(later, -torch.inf)
    return scores


def attend_block_plainly(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`attend_block` by matmuls."""
    outputs: list[Tensor] = []
    sums: list[Tensor] = []
    for part in to_chunks(query, key.shape[2]):
        seen = slice(part.stop if causal else None)
        scores = _scores(query[:, :, part], key[:, :, seen], scaling, causal, part.start)
        total = scores.logsumexp(-1)
        weights = scores.sub_(total[..., None]).exp_().to(value.dtype)
        outputs.append(torch.matmul(weights, value[:, :, None, seen]).flatten(1, 2))
        sums.append(total.flatten(1, 2))
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def backpropagate_block_plainly(
    *tensors: Tensor, scaling: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`backpropagate_block` by matmuls, of the same tensors."""
    grad, query, key, value, output, sums = tensors
    heads = key.shape[1]
    grad_query = torch.empty_like(query)
    grad_key, grad_value = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value))
    for part in to_chunks(query, key.shape[2]):
        seen = slice(part.stop if causal else None)
        grouped_grad, grouped_query, grouped_output, grouped_sums = (
            tensor[:, :, part].unflatten(1, (heads, -1)) for tensor in (grad, query, output, sums)
        )
        scores = _scores(query[:, :, part], key[:, :, seen], scaling, causal, part.start)
        weights = scores.sub_(grouped_sums[..., None]).exp_()
        mean = (grouped_grad.float() * grouped_output.float()).sum(-1)
        grad_scores = torch.matmul(grouped_grad, value[:, :, None, seen].transpose(3, 4)).float()
        grad_scores = grad_scores.sub_(mean[..., None]).mul_(weights).mul_(scaling).to(query.dtype)
        grad_query[:, :, part] = torch.matmul(grad_scores, key[:, :, None, seen]).flatten(1, 2)
        grad_key[:, :, seen] += torch.matmul(grad_scores.transpose(3, 4), grouped_query).sum(2)
        grad_value[:, :, seen] += torch.matmul(weights.to(grad.dtype).transpose(3, 4), grouped_grad).sum(2)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)
