"""Hold many conversations at once. This is the one place that catches a failing conversation.

A failed conversation is labelled with who is to blame, gets no reward, and is drawn again within a budget.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from trialogue.activity import phase
from trialogue.config import Limits
from trialogue.errors import (
    Blame,
    BudgetError,
    ConfigError,
    DomainError,
    EngineError,
    GradeError,
    ModelError,
    OutOfMemory,
    RunError,
)
from trialogue.reading import describe
from trialogue.seams import check_signature, describe_type, describe_value, raise_bug
from trialogue.talk.conversation import Party, Transcript, converse, settle
from trialogue.talk.model import ModelSource
from trialogue.talk.own import Chat, to_source
from trialogue.talk.rate_limit import CLOCK, LOG
from trialogue.talk.users import user_prompt
from trialogue.task import Task
from trialogue.trajectory import End, Finding, Group, Reward, Trajectory
from trialogue.world.bugs import Failures, find_place
from trialogue.world.domain import REWARD_ARGUMENTS, Domain, Environment
from trialogue.world.values import clean_text

Grade = Callable[
    [Task, Trajectory, Environment], Reward | Awaitable[Reward] | Awaitable[Reward | None] | None
]
Audit = Callable[[Trajectory], Sequence[Finding] | Awaitable[Sequence[Finding]]]


class Deadline:
    """Cuts the conversations under way, all at once, when a caller no longer waits for them."""

    def __init__(self) -> None:
        self.passed = False
        self._clocks: set[asyncio.Timeout] = set()

    def cut(self) -> None:
        self.passed = True
        for clock in self._clocks:
            self._expire(clock)

    def add(self, clock: asyncio.Timeout) -> None:
        self._clocks.add(clock)
        if self.passed:
            self._expire(clock)

    def _expire(self, clock: asyncio.Timeout) -> None:
        if not clock.expired():  # one that is ending its conversation cannot be rescheduled
            clock.reschedule(asyncio.get_running_loop().time())

    def drop(self, clock: asyncio.Timeout) -> None:
        self._clocks.discard(clock)


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How conversations are held and graded: the same for training, evaluation, synthesis and other hosts."""

    group_size: int = 1
    """Conversations per task."""
    concurrency: int = 64
    """Conversations under way at once."""
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    redraws: int = 2
    """How often a failed conversation is drawn again."""
    grade: Grade | None = None
    audit: Audit | None = None
    """Finds what the simulated user did wrong."""
    exclude: bool = False
    """Draw a conversation again when the audit finds something, as if it had failed."""
    name: str = ""
    """What the ids of these conversations begin with. It also enters their seeds."""
    skip: Callable[[Task, int], bool] | None = None
    """`skip(task, trial)` says that a conversation is already on record."""
    failures: Callable[[Task, int], int] | None = None
    """`failures(task, trial)` is how often a conversation failed in an earlier rollout."""
    each: Callable[[Trajectory], None] | None = None
    """Called with every conversation as soon as it is over."""
    deadline: Deadline | None = None
    """Cuts the conversations under way when it passes; these fail."""


class _QuietCollector:
    """Makes full rounds of the garbage collector short and rare during rollouts. A full round through all
    modules, or through hundreds of open conversations, stops everything for a tenth of a second."""

    RARE = 100  # rounds of the middle generation per full one; Python does ten

    def __init__(self) -> None:
        self._rollouts = 0
        self._own = False
        self._usual = (0, 0, 0)

    def __enter__(self) -> None:
        if not self._rollouts:
            self._own = not gc.get_freeze_count()  # otherwise the program has already frozen its objects
            if self._own:
                self._usual = gc.get_threshold()
                gc.freeze()
                gc.set_threshold(*self._usual[:2], self.RARE)
        self._rollouts += 1

    def __exit__(self, *_: object) -> None:
        self._rollouts -= 1
        if self._own and not self._rollouts:
            gc.unfreeze()
            gc.set_threshold(*self._usual)


_QUIET_COLLECTOR = _QuietCollector()


def rollout(
    domain: Domain,
    tasks: Iterable[Task],
    agent: ModelSource | Chat,
    user: ModelSource | Chat,
    settings: RolloutSettings | None = None,
) -> AsyncGenerator[Group]:
    """Hold `settings.group_size` conversations of each task; yield each group when its last one is over.

    Closing the generator early cancels the conversations under way.
    """
    agents, users = to_source(agent, "agent"), to_source(user, "user")
    settings = settings or RolloutSettings()
    if settings.grade is not None:
        check_signature(settings.grade, REWARD_ARGUMENTS, "grade")
    return hold_groups(domain, tasks, agents, users, settings)


async def hold_groups(
    domain: Domain,
    tasks: Iterable[Task],
    agent: ModelSource,
    user: ModelSource,
    settings: RolloutSettings,
) -> AsyncGenerator[Group]:
    """`rollout` for parties and a grade that were checked when the run was opened."""
    skip, size = settings.skip, settings.group_size
    room = asyncio.Semaphore(settings.concurrency)
    done: asyncio.Queue[Group | BaseException] = asyncio.Queue()
    failures = Failures(len(tasks) if isinstance(tasks, Sequence) else None)

    def count(trajectory: Trajectory) -> None:
        nonlocal won, failed
        is_failed = trajectory.is_failed or trajectory.excluded
        won += not is_failed and trajectory.is_success
        failed += is_failed
        seen.done += not is_failed
        seen.note = f"{won} won, {failed} failed"

    async def hold(task: Task, trial: int, number: int) -> tuple[Trajectory | None, list[Trajectory]]:
        spoilt: list[Trajectory] = []
        first = settings.failures(task, trial) if settings.failures is not None else 0
        redraws = settings.redraws
        last = redraws if first <= redraws else first + redraws  # one that was given up gets a new budget
        for draw in range(first, last + 1):
            errors: list[Exception] = []
            async with room:
                trajectory = await attempt(
                    domain, task, agent, user, settings, trial=trial, draw=draw, errors=errors
                )
            if settings.each is not None:
                settings.each(trajectory)
            count(trajectory)
            error = errors[0] if errors else None
            failures.add(number, error, trajectory.blame, trajectory.error or "", domain.database)
            if not trajectory.is_failed and not trajectory.excluded:
                return trajectory, spoilt
            spoilt.append(trajectory)
            if settings.deadline is not None and settings.deadline.passed:
                break
        return None, spoilt

    async def gather(task: Task, trials: list[int], number: int) -> None:
        try:
            async with asyncio.TaskGroup() as siblings:  # when one cannot go on, the others stop
                held_by = [siblings.create_task(hold(task, trial, number)) for trial in trials]
            held = [sibling.result() for sibling in held_by]
            trajectories = tuple(trajectory for trajectory, _ in held if trajectory is not None)
            spoilt = [trajectory for _, spoilt in held for trajectory in spoilt]
            failed = tuple(trajectory for trajectory in spoilt if not trajectory.excluded)
            excluded = tuple(trajectory for trajectory in spoilt if trajectory.excluded)
            group = Group(task=task, trajectories=trajectories, failed=failed, excluded=excluded)
            done.put_nowait(group)
        except BaseExceptionGroup as errors:
            done.put_nowait(errors.exceptions[0])
        except BaseException as error:  # noqa: BLE001 - raised again where groups are taken
            done.put_nowait(error)

    waiting = iter(tasks)
    under_way: set[asyncio.Task[None]] = set()
    ahead = max(2, 2 * settings.concurrency // size)
    outstanding = begun = won = failed = 0
    exhausted = False
    try:
        with _QUIET_COLLECTOR, phase("conversations", count_wanted(tasks, size, skip)) as seen:
            while True:
                while not exhausted and outstanding < ahead:
                    task = next(waiting, None)
                    if task is None:
                        exhausted = True
                        break
                    trials = [trial for trial in range(size) if skip is None or not skip(task, trial)]
                    if trials:
                        outstanding += 1
                        job = asyncio.create_task(gather(task, trials, begun))
                        begun += 1
                        under_way.add(job)
                        job.add_done_callback(under_way.discard)
                if exhausted and not outstanding:
                    return
                group = await done.get()
                outstanding -= 1
                if isinstance(group, BaseException):
                    raise group
                yield group
    finally:
        for job in list(under_way):
            job.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def count_wanted(
    tasks: Iterable[Task], group_size: int, skip: Callable[[Task, int], bool] | None
) -> int | None:
    """How many conversations will be held; None while the number of tasks is unknown."""
    if not isinstance(tasks, Sequence):
        return None
    if skip is None:
        return len(tasks) * group_size
    return sum(not skip(task, trial) for task in tasks for trial in range(group_size))


async def attempt(
    domain: Domain,
    task: Task,
    agent: ModelSource,
    user: ModelSource,
    settings: RolloutSettings,
    *,
    trial: int = 0,
    draw: int = 0,
    errors: list[Exception] | None = None,
) -> Trajectory:
    """Hold and grade one conversation. The error boundary: no exception of a party, tool or judge passes it.
    The exception that made the conversation fail is appended to `errors`."""
    name, limits, deadline = settings.name, settings.limits, settings.deadline
    transcript = Transcript()
    identity = f"{name}{task.id}/{trial}" + (f".{draw}" if draw else "")
    own_seed = derive_seed(settings.seed, name, task.id, trial, draw)
    end: End = "error"
    reward: Reward | None = None
    failure: tuple[str, Blame] | None = None
    findings: Sequence[Finding] = ()
    meta: dict[str, Any] = {"domain": domain.reference or domain.name}
    clock = asyncio.timeout(limits.seconds)
    environment: Environment | None = None
    try:
        async with clock:
            CLOCK.set(clock)
            if deadline is not None:
                deadline.add(clock)
            transcript.acting = "tool"
            environment = domain.open(task)
            transcript.acting = "agent"
            model = domain.rules.adapt_agent(task, agent(task, own_seed))
            speaks = Party("agent", model, environment.policy, environment.tools)
            transcript.acting = "user"
            name_, manner = domain.persona(own_seed) if domain.persona is not None else ("", "")
            told = user_prompt(domain, task, manner)
            meta["prompt"] = hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:12]
            meta |= {"persona": name_} if name_ else {}
            model = user(task, own_seed)
            answers = Party("user", model, told, environment.user_tools, domain.rules.user_cue)
            trajectory = await converse(task, environment, speaks, answers, limits, transcript)
            trajectory = trajectory.model_copy(update={"id": identity, "trial": trial, "seed": own_seed})
            transcript.acting = "judge"
            if settings.grade is not None:
                reward = check_reward(
                    await settle(settings.grade(task, trajectory, environment)), settings.grade
                )
                if reward is not None and not isfinite(reward.value):
                    raise GradeError(f"the reward is {reward.value}, which is no number to learn from")
            if settings.audit is not None:
                findings = await settle(
                    settings.audit(trajectory.model_copy(update={"reward": reward, "seed": own_seed}))
                )
            end = trajectory.end
            if trajectory.blame is not None:  # it got stuck
                failure = trajectory.error or "", trajectory.blame
    except asyncio.CancelledError:
        if _is_being_cancelled():
            raise
        failure = "a part of the conversation was cancelled", "infrastructure"
        reward = None
    except (BudgetError, ConfigError, OutOfMemory, RunError):
        raise  # a mistake of the caller: drawing again would not help
    except Exception as error:  # noqa: BLE001 - the error boundary: every failure is labelled
        if transcript.acting in ("agent", "user", "judge"):
            broken = "grade" if transcript.acting == "judge" else transcript.acting
            raise_bug(error, f"the {broken} is broken")
        text = f"{describe(error)}{find_place(error, domain.database)}"
        if clock.expired():
            text = f"the conversation took longer than {limits.seconds:g} s"
            if deadline is not None and deadline.passed:
                text = "cut: still under way when its step no longer waited"
                meta["cut"] = True
        elif errors is not None:
            errors.append(error)
        failure = clean_text(text), find_blame(error, transcript.acting)
        reward = None
    finally:
        if deadline is not None:
            deadline.drop(clock)
        if environment is not None:
            await _close(environment, identity)
    if transcript.near_calls:
        meta["near_calls"] = transcript.near_calls
    error, blame = failure or (None, "user" if findings else None)
    return Trajectory(
        id=identity,
        task=task,
        trial=trial,
        seed=own_seed,
        turns=tuple(transcript.turns),
        end=end,
        reward=reward,
        error=error,
        blame=blame,
        findings=tuple(findings),
        excluded=settings.exclude and bool(findings),
        meta=meta,
    )


def check_reward(found: Any, grade: Grade) -> Reward | None:
    """What a grade gave, which may be None: not graded."""
    if found is not None and not isinstance(found, Reward):
        what = f"grade {describe_value(grade)} returned {describe_type(found)}"
        raise ConfigError(f"{what}; it must return Reward(value=…), or None for no grade")
    return found


async def _close(environment: Environment, identity: str) -> None:
    """Close what a conversation held open. A fault here changes neither this conversation nor the others."""
    try:
        await environment.close()
    except asyncio.CancelledError:
        if _is_being_cancelled():
            raise
        LOG.warning("%s: closing its environment was cancelled", identity)
    except Exception as error:  # noqa: BLE001 - the error boundary covers closing too
        LOG.warning("%s: its environment could not be closed: %s: %s", identity, type(error).__name__, error)


def _is_being_cancelled() -> bool:
    """Whether this very task is being cancelled, rather than a part of it."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def find_blame(error: BaseException, acting: Blame) -> Blame:
    """Who is to blame for a failure: the party that the error names, else the party that was acting."""
    if isinstance(error, ModelError) and error.blame is not None:
        return error.blame
    if isinstance(error, DomainError):
        return "tool"
    if isinstance(error, GradeError):
        return "judge"
    if isinstance(error, EngineError | MemoryError):
        return "infrastructure"
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return "infrastructure"
    return acting


def derive_seed(*parts: object) -> int:
    """A seed derived from these parts, the same on every machine."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:6], "big")
