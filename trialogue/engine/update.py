# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
"""Log-probabilities and gradients of rows, packed without padding and with shared prefixes computed once.

Rows are split into micro-batches by a budget of tree tokens. The hidden states of a micro-batch's tree are
computed together; logits are computed only for the tokens that need them, in chunks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import isfinite, nan

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trialogue.engine.api import LossFunction, OptimParams, Outputs, Row, TokenBatch, find_conversations
from trialogue.engine.attention import ModelAdapter
from trialogue.engine.logprobs import LOGITS_AT_ONCE, TokenLogprobs, TorchLogits
from trialogue.engine.prefixes import common_length
from trialogue.engine.shapes import ModelShape
from trialogue.engine.transfer import send
from trialogue.engine.tree import TreePlan, grow_tree
from trialogue.errors import EngineError

RECOMPUTING = {"use_reentrant": False, "preserve_rng_state": False}
"""How transformers recomputes layers; without dropout they draw no random numbers."""


def split_micro_batches(rows: Sequence[list[int]], budget: int) -> list[list[int]]:
    """Indices of rows in micro-batches of at most `budget` tree tokens; rows that share prefixes stay
    together."""
    batches: list[list[int]] = []
    room = 0
    last: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: rows[index]):
        added = len(rows[index]) - common_length(last, rows[index])
        if not batches or added > room:
            batches.append([])
            added, room = len(rows[index]), budget
        batches[-1].append(index)
        room -= added
        last = rows[index]
    return batches


def check_tokens(rows: Sequence[Row], vocabulary: int) -> None:
    """Reject ids outside the vocabulary: the C kernel would read out of bounds."""
    for number, row in enumerate(rows):
        if row.tokens and not 0 <= min(row.tokens) <= max(row.tokens) < vocabulary:
            name = row.id or f"number {number}"
            raise EngineError(f"row {name}: token ids must be between 0 and {vocabulary - 1}")


def check_rows(rows: Sequence[Row]) -> None:
    for number, row in enumerate(rows):
        name = row.id or f"number {number}"
        lists = (row.mask, row.logprobs, row.advantages, row.reference_logprobs, row.turns)
        if any(values is not None and len(values) != len(row.tokens) for values in lists):
            raise EngineError(f"row {name}: every list must have the length of tokens, {len(row.tokens)}")
        if row.mask and row.mask[0]:
            raise EngineError(
                f"row {name}: position 0 has nothing before it and cannot be trained on (mask 1)"
            )
    if (
        len({row.reference_logprobs is None for row in rows}) > 1
        or len({row.turns is None for row in rows}) > 1
    ):
        raise EngineError("reference_logprobs and turns must be given for all rows or for none")


def gather_tokens(
    rows: Sequence[Row], masked: Sequence[Sequence[int]], entropy: Tensor, batch: Sequence[int] | None = None
) -> TokenBatch:
    """The masked tokens of the rows at the indices `batch` (default: all), as a loss gets them. Totals are
    over all rows."""
    places = range(len(rows)) if batch is None else batch
    here = [rows[index] for index in places]
    wanted = [masked[index] for index in places]
    conversations = find_conversations(rows)
    sizes, elsewhere = [0] * len(rows), [0.0] * len(rows)
    for members in conversations:
        for index in members:
            known = rows[index].elsewhere
            sizes[index] = sum(len(masked[member]) for member in members)
            elsewhere[index] = known if known is not None else nan if len(members) > 1 else 0.0

    def flat(lists: Sequence[Sequence[float] | None], dtype: torch.dtype) -> Tensor | None:
        if any(values is None for values in lists):
            return None
        pairs = zip(lists, wanted, strict=True)
        chosen = [values[position] for values, positions in pairs if values for position in positions]
        return torch.tensor(chosen, dtype=dtype)

    counts = torch.tensor([len(positions) for positions in wanted])
    flat_lists = {
        "old_logprobs": flat([row.logprobs for row in here], torch.float32),
        "advantages": flat([row.advantages for row in here], torch.float32),
        "reference_logprobs": flat([row.reference_logprobs for row in here], torch.float32),
        "row": torch.arange(len(here)).repeat_interleave(counts),
        "turns": flat([row.turns for row in here], torch.long),
        "conversation_tokens": torch.tensor([sizes[index] for index in places]),
        "elsewhere": torch.tensor([elsewhere[index] for index in places]),
    }
    given = {name: tensor for name, tensor in flat_lists.items() if tensor is not None}
    there = dict(zip(given, send(list(given.values()), entropy.device), strict=True))
    return TokenBatch(
        old_logprobs=there["old_logprobs"],
        advantages=there["advantages"],
        reference_logprobs=there.get("reference_logprobs"),
        entropy=entropy,
        row=there["row"],
        turns=there.get("turns"),
        conversation_tokens=there["conversation_tokens"],
        elsewhere=there["elsewhere"],
        rows=len(here),
        total_conversations=len(conversations),
        total_tokens=sum(map(len, masked)),
    )


class Update:
    """Gradients accumulate over `forward_backward` calls until `optim_step` applies them."""

    def __init__(
        self,
        adapted: ModelAdapter,
        device: torch.device,
        *,
        max_tokens: int,
        checkpointing: bool = False,
        shape: ModelShape | None = None,
    ) -> None:
        self.adapted, self.device, self.max_tokens, self.shape = adapted, device, max_tokens, shape
        if checkpointing and adapted.fast is not None:
            adapted.fast.learns_fused = False  # transformers can recompute only its own layers
        self.recomputed = find_recomputed_layers(adapted.model) if checkpointing else []
        self.parameters = {
            name: value for name, value in adapted.model.named_parameters() if value.requires_grad
        }
        decayed = [value for value in self.parameters.values() if value.ndim >= 2]
        plain = [value for value in self.parameters.values() if value.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": group, "decays": decays}
                for group, decays in ((decayed, True), (plain, False))
                if group
            ],
            lr=0.0,
            fused=True,
        )
        self.skipped = 0
        self.computed_tokens = 0
        self.operations = 0.0
        """What the model needs for everything so far; layers that are recomputed count once."""
        is_frozen = any(not value.requires_grad for value in adapted.model.parameters())
        self.products = 2 if is_frozen else 3  # forward, and back to the inputs; back to the weights

    def _plan(self, sequences: Sequence[list[int]]) -> TreePlan:
        return TreePlan(grow_tree(sequences), self.device, self.adapted.fast)

    def _score(
        self, plan: TreePlan, wanted: Sequence[Sequence[int]], temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and entropies of the distinct tokens at the wanted positions of all rows, and the
        index of each wanted position's token among them, row by row."""
        tree = plan.tree
        self.computed_tokens += len(tree.tokens)
        packed: list[Tensor] = []
        for path, positions in zip(tree.paths, wanted, strict=True):
            whole = torch.cat([torch.arange(start, stop) for start, stop in path])
            packed.append(whole[torch.tensor(positions, dtype=torch.long)])
        needed, places = torch.cat(packed).unique(return_inverse=True)
        self._count(len(tree.tokens), len(needed), sum(tree.positions))
        tokens = torch.tensor(tree.tokens)
        planned = [tokens, torch.tensor(tree.positions), plan.previous[needed], tokens[needed], places]
        tokens, positions, before, targets, places = send(planned, self.device)
        hidden = self.adapted.hidden(tokens, positions)
        weight, bias = self.adapted.output()
        logprobs, entropy = TokenLogprobs.apply(
            hidden.index_select(0, before).to(self.adapted.dtype),
            weight,
            bias,
            targets,
            temperature,
            max(1, LOGITS_AT_ONCE // weight.shape[0]),
            torch.is_grad_enabled(),
            TorchLogits() if self.adapted.fast is None else self.adapted.fast.logits,
        )
        return logprobs, entropy, places

    def _count(self, tokens: int, scored: int, pairs: int) -> None:
        """Count operations: of `tokens`, of which `scored` have logits, and of attention between `pairs` of
        them."""
        if self.shape is None:
            return
        is_learning = torch.is_grad_enabled()
        products = 2.0 * (self.shape.matrices - self.shape.output) * tokens + 2.0 * self.shape.output * scored
        self.operations += products * (self.products if is_learning else 1)
        self.operations += self.shape.count_attention(pairs) * (3 if is_learning else 1)

    def forward(self, rows: Sequence[Row], temperature: float) -> list[list[float]]:
        check_tokens(rows, self.adapted.vocabulary)
        results: list[list[float]] = [[0.0] * len(row.tokens) for row in rows]
        sequences = [row.tokens if len(row.tokens) > 1 else [] for row in rows]
        for batch in self._batches(sequences):
            plan = self._plan([sequences[index] for index in batch])
            wanted = [range(1, len(sequences[index])) for index in batch]
            with torch.no_grad(), self.adapted.using(plan):
                logprobs, _, places = self._score(plan, wanted, temperature)
            for index, values in zip(batch, split(logprobs[places], wanted), strict=True):
                results[index][1:] = values
        return results

    def _batches(self, sequences: Sequence[list[int]]) -> list[list[int]]:
        """Micro-batches: indices of the sequences that have something to compute."""
        filled = [index for index, sequence in enumerate(sequences) if sequence]
        batches = split_micro_batches([sequences[index] for index in filled], self.max_tokens)
        return [[filled[place] for place in batch] for batch in batches]

    def forward_backward(self, rows: Sequence[Row], loss: LossFunction, temperature: float) -> Outputs:
        check_rows(rows)
        check_tokens(rows, self.adapted.vocabulary)
        if self.adapted.fast is None:
            self.adapted.forget()  # makes room for the gradients
        masked = [[position for position, mask in enumerate(row.mask) if mask] for row in rows]
        # Tokens after the last trained one of a row have no gradient.
        sequences = [
            row.tokens[: places[-1] + 1] if places else [] for row, places in zip(rows, masked, strict=True)
        ]
        results: list[list[float]] = [[] for _ in rows]
        metrics: dict[str, float] = {}
        for batch in self._batches(sequences):
            plan = self._plan([sequences[index] for index in batch])
            wanted = [masked[index] for index in batch]
            with self.adapted.using(plan), self._recomputing():
                logprobs, entropy, places = self._score(plan, wanted, temperature)
                new = logprobs.index_select(0, places)
                value, found = loss(new, gather_tokens(rows, masked, entropy[places], batch))
                value.backward()
            _add_metrics(metrics, {"loss": value, **found})
            for index, values in zip(batch, split(new.detach(), wanted), strict=True):
                results[index] = values
        return Outputs(results, metrics)

    @contextmanager
    def _recomputing(self) -> Generator[None]:
        """Put layers into training mode, because transformers recomputes only such; their parts stay in
        evaluation mode."""
        for layer in self.recomputed:
            layer.training = True
        try:
            yield
        finally:
            for layer in self.recomputed:
                layer.training = False

    def optim_step(self, params: OptimParams) -> dict[str, float]:
        gradients = [value.grad for value in self.parameters.values() if value.grad is not None]
        if not gradients:
            raise EngineError("there is no gradient to apply: call forward_backward before optim_step")
        norm = nn.utils.get_total_norm(gradients)
        size = float(norm)
        finite = isfinite(size)
        if finite:
            if params.grad_clip > 0:
                nn.utils.clip_grads_with_norm_(self.parameters.values(), params.grad_clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"], group["betas"], group["eps"] = params.learning_rate, params.betas, params.eps
                group["weight_decay"] = params.weight_decay if group["decays"] else 0.0
            self.optimizer.step()
            weights = nn.utils.get_total_norm([value.detach() for value in self.parameters.values()])
            if not isfinite(float(weights)):
                raise EngineError(
                    "the weights are not finite after this step: resume from the last checkpoint with a "
                    "lower learning rate"
                )
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": size,
            "learning_rate": params.learning_rate,
            "skipped": 0.0 if finite else 1.0,
        }

    def recover(self) -> None:
        """After a failure, drop the gradient and moments that are incomplete."""
        self.optimizer.zero_grad(set_to_none=True)
        for parameter, moments in list(self.optimizer.state.items()):
            if "exp_avg_sq" not in moments:
                del self.optimizer.state[parameter]


def split(values: Tensor, positions: Sequence[Sequence[int]]) -> list[list[float]]:
    """The values of each row, by one copy to the host."""
    left = iter(values.tolist())
    return [list(islice(left, len(places))) for places in positions]


def find_recomputed_layers(model: PreTrainedModel) -> list[nn.Module]:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=RECOMPUTING)
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _add_metrics(totals: dict[str, float], found: dict[str, Tensor | float]) -> None:
    tensors = {name: value.detach().double() for name, value in found.items() if isinstance(value, Tensor)}
    if tensors:  # one copy to the host
        found = found | dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True))
    for name, value in found.items():
        number = float(value)
        if name not in totals:
            totals[name] = number
        elif name.endswith("_max"):
            totals[name] = max(totals[name], number)
        elif name.endswith("_min"):
            totals[name] = min(totals[name], number)
        else:
            totals[name] += number
