# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUntypedBaseClass=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportPrivateUsage=false
"""verl's synchronous trainer, learning from conversations as our own loop does.

The exported launch script has this module imported wherever verl is (`VERL_USE_EXTERNAL_MODULES`), and asks
for the trainer by its name in verl's registry (`trainer.v1.trainer_mode`). Where verl counts rows, this
counts conversations; where verl draws again without end, this stops; and weights move only when there is a
signal.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from trialogue.config import TrainConfig
from trialogue.errors import EngineError
from trialogue.learn.advantages import EPSILON, center, leave_one_out, normalize
from trialogue.run import read_trajectories

log = logging.getLogger(__name__)

FAILED_ROUNDS = 3
"""How often a step draws new tasks in place of groups whose conversations all failed."""
ADVANTAGES = {"dr_grpo": center, "rloo": leave_one_out}


def find_group(key: str) -> str:
    """The prompt's id in a row's key, which is PROMPT_SESSION_ROW."""
    return key.rsplit("_", 2)[0]


def find_conversation(key: str) -> str:
    return key.rsplit("_", 1)[0]


def find_last_rows(keys: Iterable[str]) -> dict[str, str]:
    """The key of each conversation's last row."""
    last: dict[str, str] = {}
    for key in sorted(keys, key=lambda key: int(key.rsplit("_", 1)[1])):
        last[find_conversation(key)] = key
    return last


def read_rewards(keys: Sequence[str], partition: str) -> dict[str, dict[str, float]]:
    """The reward of each conversation, by group. verl gives it to every row of a conversation."""
    rows = list(find_last_rows(keys).items())
    rewards: dict[str, dict[str, float]] = defaultdict(dict)
    if rows:
        data = tq.kv_batch_get(
            keys=[key for _, key in rows], partition_id=partition, select_fields=["rm_scores"]
        )
        for (conversation, key), scores in zip(rows, data["rm_scores"], strict=True):
            rewards[find_group(key)][conversation] = float(scores.sum())
    return rewards


def is_flat(rewards: Mapping[str, float]) -> bool:
    """Whether a group has no signal."""
    return len(rewards) < 2 or max(rewards.values()) - min(rewards.values()) < EPSILON


class GroupBuffer(ReplayBuffer):
    """Waits for all groups of a step, and draws new tasks for those that nothing can be learned from, as many
    rounds as the settings say: verl's own buffer would go on until it has enough."""

    def __init__(self, settings: TrainConfig, folder: Path, refill: Any) -> None:
        super().__init__(
            trainer_mode="sync",
            trainer_config={},
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs={},
            poll_interval=0.2,
            refill_fn=refill,
        )
        self.folder, self.redraws = folder, settings.training.redraw_no_signal
        self.conversations_per_group = settings.training.group_size

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        if partition_id == "val":
            return super().sample(global_steps, partition_id, batch_size)
        replaced: Counter[str] = Counter(no_signal=0, failed=0)
        missing, size = 0, self.conversations_per_group
        groups = self._wait_until_over(partition_id, batch_size)
        for number in range(max(self.redraws, FAILED_ROUNDS)):
            rewards = read_rewards(list(self.partitions[partition_id]), partition_id)
            failed = groups - rewards.keys() if number < FAILED_ROUNDS else set[str]()
            flat = {group for group in rewards if is_flat(rewards[group])} if number < self.redraws else set()
            if not failed | flat:
                break
            replaced.update(no_signal=len(flat), failed=len(failed))
            missing += size * len(failed) + sum(size - len(rewards[group]) for group in flat)
            self._clear_groups(partition_id, failed | flat)
            self.refill_fn(len(failed | flat))
            groups = self._wait_until_over(partition_id, batch_size)
        if not self.partitions[partition_id]:
            raise EngineError(
                f"all conversations of step {global_steps} failed, also those of {FAILED_ROUNDS} more "
                f"rounds; the last one: {self._find_reason(global_steps)}"
            )
        missing += size * len(groups) - len(find_last_rows(self.partitions[partition_id]))
        batch = self._materialize_batch(partition_id, sorted(groups), self.partitions[partition_id])
        metrics = {f"conversations/{kind}_groups_replaced": number for kind, number in replaced.items()}
        return batch, metrics | {"conversations/missing": missing}

    def _wait_until_over(self, partition: str, count: int) -> set[str]:
        """The groups of a step, when the last of them is over."""
        waited = 0.0
        while True:
            self._sync_metadata_from_transfer_queue()
            if self.failure_keys[partition]:  # a failed conversation raises nothing, so this is a mistake
                raise EngineError(
                    "a conversation could not be held at all, for a wrong setting, a spent budget or a bug: "
                    "the log of verl's agent workers has the error"
                )
            over = self.finished_keys[partition]
            if len(over) >= count and not self.pending_keys[partition] | self.running_keys[partition]:
                return set(over)
            waited = self._wait_for_next_poll(partition, waited)

    def _find_reason(self, step: int) -> str:
        files = sorted((self.folder / "trajectories").glob(f"step-{step:06d}.*"))
        errors = [
            f"{item.blame} to blame: {item.error}" for file in files for item in read_trajectories(file)
        ]
        return errors[-1] if errors else f"nothing was recorded in {self.folder / 'trajectories'}"


@register_trainer("trialogue")  # pyright: ignore[reportUntypedClassDecorator]
class ConversationTrainer(PPOTrainerSync):
    def __init__(self, config: Any) -> None:
        settings = Path(config.trainer.v1.trialogue.settings)
        self.settings = TrainConfig.model_validate_json(settings.read_text(encoding="utf-8"))
        self.folder = settings.parent
        self.is_compared = False
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)

    def _build_replay_buffer(self) -> ReplayBuffer:
        return GroupBuffer(self.settings, self.folder, self._add_prompts_to_generate)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Rows are padded until they can be divided among workers and mini-batches, not to verl's fixed
        number of rows: with it, conversations of several rows would make several optimizer steps of one."""
        return dp_size * self.settings.training.mini_batches

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Compare the sampler's log-probabilities with the trainer's, and stop if they are two models."""
        batch = super()._compute_old_log_prob(batch, metrics)
        fields = ["rollout_log_probs", "old_log_probs", "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        sampled, scored, mask = (data[name].values().float() for name in fields)
        gap = float(((sampled - scored).abs() * mask).sum() / mask.sum().clamp(min=1))
        metrics["conversations/logprob_gap"] = gap
        bound = self.settings.checks.logprob_gap
        if bound and gap > bound:
            told = (
                f"the sampler's log-probabilities are {gap:.3f} from the trainer's in the mean of all "
                f"tokens, more than checks.logprob_gap={bound}"
            )
            if not self.is_compared:
                raise EngineError(
                    f"{told}. Both had the same weights, so one of them computes another model: check "
                    "actor_rollout_ref.model.use_remove_padding, the attention and the precision"
                )
            log.warning("step %d: %s", self.global_steps, told)
        self.is_compared = True
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Our own advantages in place of verl's: a conversation counts once, however many rows it is, and one
        that has nobody to be compared with gets 0."""
        batch = super()._compute_advantage(batch, metrics)
        advantage = ADVANTAGES.get(self.settings.loss.name, normalize)
        known: dict[str, float] = {}
        for rewards in read_rewards(find_real(batch), batch.partition_id).values():
            known |= zip(rewards, advantage(list(rewards.values())), strict=True)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
        )
        values = [
            known.get(find_conversation(key), 0.0) * mask.float()
            for key, mask in zip(batch.keys, data["response_mask"], strict=True)
        ]
        write_rows(batch, {"advantages": values, "returns": values})
        self.signal = [key for key in find_real(batch) if known[find_conversation(key)]]
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Update on the rows that have a signal, and on nothing but them: others would count in the means,
        and an update without any would still move the weights by Adam's momentum."""
        if not self.signal:
            metrics["actor/skipped"] = 1.0
            return batch
        actor, mini_batches = self.config.actor_rollout_ref.actor, self.settings.training.mini_batches
        workers = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        others = [key for key in batch.keys if key not in set(self.signal)]
        fillers = others[: -len(self.signal) % (workers * mini_batches)]
        part = batch.select_keys(balance([*self.signal, *fillers], batch, workers))
        part.extra_info = {
            "calculate_entropy": actor.calculate_entropy,
            "global_batch_size": len({find_conversation(key) for key in self.signal}) / mini_batches,
            "mini_batch_size": len(part) // mini_batches,
            "epochs": actor.ppo_epochs,
            "seed": actor.data_loader_seed,
            "dataloader_kwargs": {"shuffle": actor.shuffle},
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
        }
        masks = hide_rows(fillers, batch.partition_id)
        output = rename_dict(self.actor_rollout_wg.update_actor(part)["metrics"], "actor/")
        if fillers:
            write_rows(batch.select_keys(fillers), {"response_mask": masks, "loss_mask": masks})
        output["perf/mfu/actor"] = output.pop("actor/mfu")
        metrics |= reduce_metrics(output)
        return batch

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], *arguments: Any, **options: Any
    ) -> None:
        """verl's metrics, and those of the conversations, which verl reports for validations only."""
        super()._compute_metrics(batch, metrics, *arguments, **options)
        last = list(find_last_rows(find_real(batch)).values())
        data = tq.kv_batch_get(keys=last, partition_id=batch.partition_id, select_fields=["extra_fields"])
        figures = [getattr(item, "data", item)["reward_extra_info"] for item in data["extra_fields"]]
        lost = {"failed": metrics.pop("conversations/missing", 0)}
        for name in figures[0]:
            values = [float(known[name]) for known in figures]
            counts = name in ("failed", "excluded")
            metrics[f"conversations/{name}"] = sum(values) + lost.get(name, 0) if counts else fmean(values)
        metrics["conversations/count"] = len(last)

    def _val_metrics_update(
        self, data_sources: Any, sample_uids: Any, *arguments: Any, expected_acc_counts: Any = None
    ) -> dict[str, float]:
        """A failed conversation gives verl no row, so it is counted as one that is missing."""
        metrics = super()._val_metrics_update(
            data_sources, sample_uids, *arguments, expected_acc_counts=expected_acc_counts
        )
        expected = sum((expected_acc_counts or {}).values())
        return metrics | {"val-aux/conversations/missing": float(expected - len(sample_uids))}

    def _save_checkpoint(self) -> None:
        """verl forgets at a resume which checkpoints it has written, and leaves their folders."""
        super()._save_checkpoint()
        keep = self.config.trainer.max_actor_ckpt_to_keep
        folder = Path(self.config.trainer.default_local_dir)
        written = sorted(folder.glob("global_step_*"), key=lambda path: int(path.name.rsplit("_", 1)[1]))
        known = [path for path in written if int(path.name.rsplit("_", 1)[1]) <= self.global_steps]
        for path in known[: -keep if keep else 0]:
            shutil.rmtree(path, ignore_errors=True)


def find_real(batch: KVBatchMeta) -> list[str]:
    """The keys of the rows that are no padding."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]


def balance(keys: Sequence[str], batch: KVBatchMeta, workers: int) -> list[str]:
    """The rows in an order that gives each worker about as many tokens."""
    sizes = {key: tag["seq_len"] for key, tag in zip(batch.keys, batch.tags, strict=True)}
    loads = calculate_workload(torch.tensor([sizes[key] for key in keys]))
    parts: list[list[int]] = get_seqlen_balanced_partitions(loads, k_partitions=workers, equal_size=True)
    return [keys[place] for part in parts for place in part]


def hide_rows(keys: Sequence[str], partition: str) -> list[torch.Tensor]:
    """Mask rows that are there only to fill a batch; gives their masks."""
    if not keys:
        return []
    data = tq.kv_batch_get(keys=list(keys), partition_id=partition, select_fields=["response_mask"])
    masks = [mask.clone() for mask in data["response_mask"]]
    empty = [torch.zeros_like(mask) for mask in masks]
    write_rows(
        KVBatchMeta(keys=list(keys), tags=[{} for _ in keys], partition_id=partition),
        {"response_mask": empty, "loss_mask": empty},
    )
    return masks


def write_rows(batch: KVBatchMeta, fields: Mapping[str, Sequence[torch.Tensor]]) -> None:
    nested = {
        name: torch.nested.as_nested_tensor(list(rows), layout=torch.jagged) for name, rows in fields.items()
    }
    tq.kv_batch_put(
        keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(nested, batch_size=len(batch))
    )
