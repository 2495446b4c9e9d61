"""Synthesis: sample conversations of a teacher, verify and filter them, and write a corpus to imitate.

    rollout ─► reward ─► verify (corpus.verify) ─► sift (corpus.corpus) ─► judge ─► review ─► accepted,
    rejected

Conversations are written to `trajectories/synthesize.jsonl` at once, so a killed run can be resumed. All
later stages are computed again from that file and the recorded verdicts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any

from trialogue.activity import phase
from trialogue.config import Speaker, SynthesizeConfig
from trialogue.corpus.corpus import Forbidden, Sieve, find_split, find_usual, write_lines, write_parquet
from trialogue.corpus.review import Verdict, Verdicts, judge_all
from trialogue.corpus.verify import verify
from trialogue.digests import refuse_injured
from trialogue.durable import write_json
from trialogue.errors import BudgetError, ConfigError, RunError
from trialogue.records import write_records
from trialogue.run import (
    Run,
    State,
    collect_marks,
    read_about,
    read_config,
    read_ledger,
    read_prompts,
    read_seconds,
    read_trajectories,
)
from trialogue.score.evaluate import LEDGER_SECONDS
from trialogue.score.metrics import PriceOf, find_prices
from trialogue.score.parties import open_parties
from trialogue.score.resume import refuse_claims, settle_config
from trialogue.score.reward import grade, with_reward
from trialogue.talk.budget import add_up, to_cost
from trialogue.talk.find import find_model
from trialogue.talk.model import ModelSource, save_tokenizer
from trialogue.talk.prompts import collect_prompts
from trialogue.talk.rollout import rollout
from trialogue.talk.users import set_user_prompt, user_prompt
from trialogue.task import Expected, Side, Task
from trialogue.trajectory import Trajectory, in_order
from trialogue.world.domain import Domain, Environment
from trialogue.world.find import find_domain

Watch = Callable[[int, int, int], None]
"""Called after each conversation with the numbers of held, verified and wanted conversations."""
FILE = "trajectories/synthesize.jsonl"
TOLD = 256
"""Number of tasks whose prompts are collected: all tasks have the same prompts."""


async def synthesize(
    config: SynthesizeConfig,
    *,
    resume: Path | None = None,
    started: Callable[[Path], None] | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Sample conversations until enough are accepted or the budget is spent. Returns the figures."""
    began = written = monotonic()
    config = settle_config(config, "synthesize", resume)
    domain, parties = open_parties(config)
    if config.agent.model == "oracle" and domain.oracle is None:
        config = config.model_copy(update={"agent": config.agent.model_copy(update={"model": "teacher"})})
    account = parties.account
    workshop = Workshop(config, domain)

    def find(speaker: Speaker, side: Side, role: str) -> ModelSource:
        source = find_model(speaker, side, domain, config.limits, config.seed, account, role)
        parties.opened.append(source)
        return source

    agent = find(config.agent, "agent", "agent")
    judge = find(config.judge, "user", "judge") if config.judge.model else None
    if resume is not None:
        run = Run.resume(resume)
    else:
        marks = collect_marks(config.agent.list_models(), config.renderer)
        run = Run.create(config.run, "synthesize", config.domain, config, config.seed, marks)
    with run.setting_up():
        run.add_prompts(collect_prompts(domain, workshop.tasks[:TOLD]))
        save_tokenizer(agent, run.path)
        account.load(read_ledger(run.path))
        for item in read_trajectories(run.path / FILE) if (run.path / FILE).exists() else ():
            workshop.take(item)
        verdicts = Verdicts(run.path)

    def keep(item: Trajectory) -> None:
        nonlocal written
        run.add_trajectories("synthesize", [item])
        workshop.take(item)
        if monotonic() - written > LEDGER_SECONDS:
            written = monotonic()
            run.add_ledger(account.take())
        seen.done, seen.note = workshop.verified, f"{len(workshop.held)} held"
        if watch is not None:
            watch(len(workshop.held), workshop.verified, config.synthesize.count)

    chosen: set[tuple[str, int]] = set()

    def is_skipped(task: Task, trial: int) -> bool:
        return (task.id, trial) not in chosen or (task.id, trial) in workshop.done

    def count_failures(task: Task, trial: int) -> int:
        return workshop.failures[task.id, trial]

    state: State = "failed"
    try:
        if started is not None:
            started(run.path)
        order = [(task.id, trial) for trial in range(config.tasks.trials) for task in workshop.tasks]
        budget = min(len(order), ceil(config.synthesize.attempts * config.synthesize.count))
        wanted = min(budget, config.synthesize.count)
        while True:
            chosen = set(order[:wanted])
            groups = rollout(
                domain,
                workshop.tasks,
                agent,
                parties.user,
                replace(
                    parties.to_settings(config),
                    group_size=config.tasks.trials,
                    grade=grade_if_expected,
                    skip=is_skipped,
                    failures=count_failures,
                    each=keep,
                ),
            )
            with phase("synthesize", config.synthesize.count, "verified", workshop.verified) as seen:
                async with aclosing(groups):
                    async for _ in groups:
                        pass
            sifted = workshop.sift(verdicts)
            if judge is not None:
                missing = [item for item in sifted.accepted if not verdicts.has(item.id, "judge")]
                with phase("judging", len(missing)) as judging:
                    async for verdict in judge_all(missing, domain, judge, config.judge.model):
                        verdicts.add(verdict)
                        judging.done += 1
                sifted = workshop.sift(verdicts)
            lacking = config.synthesize.count - len(sifted.accepted)
            if lacking <= 0 or wanted >= budget:
                break
            rate = max(0.1, len(sifted.accepted) / wanted)
            wanted = min(budget, wanted + max(1, ceil(lacking / rate)))
        run.add_seconds(monotonic() - began)
        run.add_ledger(account.take())
        result = finish(run, config, domain, sifted)
        state = "finished"
        return result
    except (asyncio.CancelledError, KeyboardInterrupt, BudgetError):
        state = "stopped"
        run.add_seconds(monotonic() - began)
        raise
    finally:
        with suppress(RunError):  # on a full disk another error is raised
            run.add_ledger(account.take())
        await parties.close()
        run.close(state)


def grade_if_expected(task: Task, trajectory: Trajectory, environment: Environment) -> Any:
    """The reward of a task that expects something. A mere wish has none."""
    if environment.domain.reward is None and task.expected == Expected():
        return None
    return grade(task, trajectory, environment)


@dataclass(slots=True)
class Sifted:
    """Accepted and rejected conversations with their verdicts."""

    accepted: list[Trajectory] = field(default_factory=lambda: [])
    rejected: list[Trajectory] = field(default_factory=lambda: [])
    reasons: Counter[str] = field(default_factory=Counter[str])
    reasons_of: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Id of a rejected conversation → reasons."""


class Workshop:
    """All conversations of a run, each verified when it is added."""

    def __init__(self, config: SynthesizeConfig, domain: Domain) -> None:
        self.config = config
        self.domain = domain
        wanted = config.tasks
        count = wanted.count
        if count is None and domain.endless:
            count = ceil(config.synthesize.attempts * config.synthesize.count / wanted.trials)
        self.tasks = domain.tasks(
            wanted.split, count, config.seed, levels=wanted.levels, families=wanted.families
        )
        if not self.tasks:
            raise ConfigError(f"{domain.name} has no matching tasks in split '{wanted.split}'")
        self.forbidden = Forbidden(config.synthesize.against, config.data)
        self.usual = frozenset[str]() if self.forbidden.is_empty else find_usual(self.tasks)
        self.held: list[Trajectory] = []
        self.done: set[tuple[str, int]] = set()
        self.failures: Counter[tuple[str, int]] = Counter()
        self.verified = 0
        self._verdicts: dict[str, Verdict] = {}

    def take(self, item: Trajectory) -> None:
        """Add a conversation and verify it."""
        self.held.append(item)
        if item.is_failed:
            self.failures[item.task.id, item.trial] += 1
        else:
            self.done.add((item.task.id, item.trial))
        verdict = self._verify(item)
        self._verdicts[item.id] = verdict
        self.verified += verdict.accepted

    def _verify(self, item: Trajectory) -> Verdict:
        if item.is_failed:
            return Verdict(
                id=item.id, stage="program", accepted=False, reasons=("failed",), note=item.error or ""
            )
        flaws = verify(item, self.domain, self.config.synthesize.free_text)
        if item.reward is not None and not item.is_success:
            why = "; ".join(item.reward.why)
            return Verdict(
                id=item.id,
                stage="program",
                accepted=False,
                reasons=("reward",),
                note=why,
                flaws=tuple(flaws),
            )
        reasons = tuple(dict.fromkeys(flaw.check for flaw in flaws))
        return Verdict(id=item.id, stage="program", accepted=not flaws, reasons=reasons, flaws=tuple(flaws))

    def sift(self, verdicts: Verdicts) -> Sifted:
        """Decide about all conversations so far, in the order of the tasks."""
        families = len({task.family for task in self.tasks})
        sieve = Sieve(self.domain, self.config.synthesize, families, self.forbidden, self.usual)
        sifted = Sifted()
        for item in in_order(self.held, self.tasks):
            passed = [self._verdicts[item.id], *verdicts.find(item.id)]
            review = next((verdict for verdict in passed if verdict.stage == "review"), None)
            against = next((verdict for verdict in passed if not verdict.accepted), None)
            if review is not None:  # a person has the last word
                against = None if review.accepted else review
            elif against is None:
                left_out = sieve.find_reason(item)
                if left_out is None and len(sifted.accepted) >= self.config.synthesize.count:
                    left_out = "not needed", f"there are {len(sifted.accepted)} already"
                if left_out is not None:
                    against = Verdict(
                        id=item.id, stage="sift", accepted=False, reasons=left_out[:1], note=left_out[1]
                    )
                    passed.append(against)
            item = self._describe(item, passed)
            if against is None:
                sifted.accepted.append(item)
            else:
                sifted.rejected.append(item)
                why = [f"{against.stage}: {reason}" for reason in against.reasons or ("rejected",)]
                sifted.reasons.update(why)
                sifted.reasons_of[item.id] = why
        return sifted

    def _describe(self, item: Trajectory, passed: Sequence[Verdict]) -> Trajectory:
        """The conversation with its verdicts, its provenance and its part of the corpus."""
        verdicts = [
            verdict.model_dump(mode="json", exclude_defaults=True, exclude={"id"}) for verdict in passed
        ]
        meta = {
            **item.meta,
            "split": find_split(item.task, self.config.synthesize, self.config.seed),
            "provenance": self._find_provenance(item),
            "verdicts": verdicts,
        }
        return item.model_copy(update={"meta": meta})

    def _find_provenance(self, item: Trajectory) -> dict[str, Any]:
        config = self.config
        environment = self.domain.open(item.task)
        tools = [tool.schema for tool in environment.tools.values()]
        speakers = {"agent": config.agent, "user": config.user, "tools": config.simulator}
        price = find_prices(config.budget.prices, **speakers)
        spent = {who: to_spent(item, who, speaker.model, price) for who, speaker in speakers.items()}
        known = [each["cost"] for each in spent.values() if each["cost"] is not None]
        return {
            "source": self.domain.source,
            "domain": self.domain.reference or self.domain.name,
            "agent": config.agent.model,
            "user": config.user.model,
            "tools": config.simulator.model or self.domain.source,
            "judge": config.judge.model,
            "seed": item.seed,
            "prompts": {
                "policy": to_hash(environment.policy),
                "tools": to_hash(json.dumps(tools, sort_keys=True)),
                "user": to_hash(user_prompt(self.domain, item.task)),
            },
            "spent": spent,
            "cost": sum(known) if known else None,
            "trialogue": version("trialogue"),
        }


def to_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def to_spent(item: Trajectory, who: str, model: str, price: PriceOf) -> dict[str, Any]:
    """Tokens and money spent by one side of a conversation or by its simulated tools."""
    name = model.removeprefix("openai:") if model.startswith("openai:") else None
    said = [("tools" if turn.message.role == "tool" else turn.side, turn) for turn in item.turns]
    used = [
        (turn.usage, price(who, turn.model or name))
        for side, turn in said
        if side == who and turn.usage is not None
    ]
    costs = [to_cost(usage, known) for usage, known in used if known is not None]
    return {
        "calls": sum(usage.calls for usage, _ in used),
        "prompt": sum(usage.prompt for usage, _ in used),
        "completion": sum(usage.completion for usage, _ in used),
        "cost": sum(costs) if costs else None,
    }


def finish(run: Run, config: SynthesizeConfig, domain: Domain, sifted: Sifted) -> dict[str, Any]:
    """Write the corpus and its figures."""
    path = run.path
    write_lines(path / "accepted.jsonl", sifted.accepted)
    write_lines(path / "rejected.jsonl", sifted.rejected)
    write_records(path / "decisions.jsonl", [json.dumps(line) for line in to_decisions(sifted)])
    parts = {
        split: [item for item in sifted.accepted if item.meta["split"] == split]
        for split in ("train", "validation")
    }
    for split, items in parts.items():
        write_parquet(path / f"{split}.parquet", items, domain)
    figures = to_corpus_figures(path, config, sifted.accepted, sifted.rejected, sifted.reasons)
    result = {"domain": domain.name, "source": domain.source, **figures, "run": str(path)}
    run.write_metrics(result)
    write_json(path / "result.json", result)
    return result


def to_corpus_figures(
    path: Path,
    config: SynthesizeConfig,
    accepted: Sequence[Trajectory],
    rejected: Sequence[Trajectory],
    reasons: Mapping[str, int],
) -> dict[str, Any]:
    """The figures of a corpus, from its records."""
    wall, _ = read_seconds(path)
    prompts = read_prompts(path)
    splits = Counter(item.meta["split"] for item in accepted)
    costs = [item.meta["provenance"]["cost"] for item in (*accepted, *rejected)]
    known = [cost for cost in costs if cost is not None]
    return {
        "agent": config.agent.model,
        "user": config.user.model,
        "judge": config.judge.model,
        "seed": config.seed,
        "wanted": config.synthesize.count,
        "held": len(accepted) + len(rejected),
        "accepted": len(accepted),
        "rejected": len(rejected),
        "reasons": dict(Counter(reasons).most_common()),
        "families": dict(sorted(Counter(item.task.family for item in accepted).items())),
        "train": splits["train"],
        "validation": splits["validation"],
        "cost": sum(known) if known else None,
        "ledger": add_up(read_ledger(path)),
        "wall_seconds": round(wall, 3),
        "prompts": prompts["hash"],
        "tasks_hash": prompts["tasks_hash"],
    }


def to_decisions(sifted: Sifted) -> Iterator[dict[str, Any]]:
    """One line per conversation: whether it was accepted, the reasons if not, and all verdicts."""
    for item in (*sifted.accepted, *sifted.rejected):
        verdicts: list[dict[str, Any]] = item.meta["verdicts"]
        reasons = sifted.reasons_of.get(item.id, [])
        yield {"id": item.id, "accepted": not reasons, "reasons": reasons, "verdicts": verdicts}


def read_decided(path: Path, *, trust: bool = False) -> SynthesizeConfig:
    """The settings of a run that is decided about again. No model is asked, but the domain is loaded: if the
    record names code to run, it must be trusted."""
    refuse_injured(path)
    config = read_config(SynthesizeConfig, path)
    opened = SynthesizeConfig(
        domain=config.domain, data=config.data, reward=config.reward, synthesize=config.synthesize
    )
    if not trust:
        refuse_claims(path, opened, can_name=False)
    return config


def decide_again(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Compute the corpus of a run again, after a person has reviewed some conversations."""
    config = read_decided(path, trust=trust)
    domain = with_reward(find_domain(config.domain, config.data), config.reward.name, config.reward.rules)
    domain = set_user_prompt(domain, config.user)
    workshop = Workshop(config, domain)
    if not (path / FILE).exists():
        raise RunError(f"{path} holds no synthesised conversations")
    state = read_about(path)["state"]
    run = Run.resume(path)
    try:
        for item in read_trajectories(path / FILE):
            workshop.take(item)
        return finish(run, config, domain, workshop.sift(Verdicts(path)))
    finally:
        run.close(state)
