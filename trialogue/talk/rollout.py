"""Many conversations at once, and the one place where a failing one is caught.

A failed conversation is labelled with who is to blame, never scored, and held anew within a budget.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
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
    RunError,
)
from trialogue.reading import describe
from trialogue.talk.conversation import Transcript, converse, settle
from trialogue.talk.model import ModelSource
from trialogue.talk.party import Party
from trialogue.talk.rate_limit import CLOCK, LOG
from trialogue.talk.users import user_prompt
from trialogue.task import Task
from trialogue.trajectory import End, Finding, Group, Reward, Trajectory
from trialogue.world.bugs import Bugs, find_bug, find_place
from trialogue.world.domain import Domain, Environment
from trialogue.world.values import clean_text

Grade = Callable[
    [Task, Trajectory, Environment], Reward | Awaitable[Reward] | Awaitable[Reward | None] | None
]
Audit = Callable[[Trajectory], Sequence[Finding] | Awaitable[Sequence[Finding]]]


class Deadline:
    """Cuts whatever is still under way, at once, when somebody decides that it has taken long enough."""

    def __init__(self) -> None:
        self.passed = False
        self._clocks: set[asyncio.Timeout] = set()

    def cut(self) -> None:
        self.passed = True
        for clock in self._clocks:
            clock.reschedule(asyncio.get_running_loop().time())

    def add(self, clock: asyncio.Timeout) -> None:
        self._clocks.add(clock)
        if self.passed:
            clock.reschedule(asyncio.get_running_loop().time())

    def drop(self, clock: asyncio.Timeout) -> None:
        self._clocks.discard(clock)


class _Calm:
    """Keeps the garbage collector's full rounds short and rare while rollouts go on: in one through all the
    modules, or through hundreds of open conversations, a tenth of a second passes in which none goes on."""

    RARE = 100  # rounds of the middle generation to a full one, in place of Python's ten

    def __init__(self) -> None:
        self._rollouts = 0
        self._own = False
        self._usual = (0, 0, 0)

    def __enter__(self) -> None:
        if not self._rollouts:
            self._own = not gc.get_freeze_count()  # else the program itself has seen to it
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


_CALM = _Calm()


async def rollout(
    domain: Domain,
    tasks: Iterable[Task],
    agent: ModelSource,
    user: ModelSource,
    *,
    group_size: int = 1,
    concurrency: int = 64,
    limits: Limits | None = None,
    seed: int = 0,
    redraws: int = 2,
    grade: Grade | None = None,
    audit: Audit | None = None,
    exclude: bool = False,
    name: str = "",
    skip: Callable[[Task, int], bool] | None = None,
    failures: Callable[[Task, int], int] | None = None,
    each: Callable[[Trajectory], None] | None = None,
    deadline: Deadline | None = None,
) -> AsyncGenerator[Group]:
    """Hold `group_size` conversations of each task and yield each group when its last one is over.

    `skip(task, trial)` leaves conversations out that are already on record, `failures(task, trial)` tells
    how often one has failed before, and `each` is told every conversation as soon as it is over. `audit` says
    what the user did wrong; with `exclude` such a conversation is held anew like a failed one. A `deadline`
    that passes cuts those under way, which fail. Closing the generator early cancels them.
    """
    limits = limits or Limits()
    room = asyncio.Semaphore(concurrency)
    done: asyncio.Queue[Group | BaseException] = asyncio.Queue()

    bugs = Bugs()

    def count(trajectory: Trajectory) -> None:
        nonlocal won, failed
        is_failed = trajectory.end == "error" or trajectory.excluded
        won += not is_failed and trajectory.reward is not None and trajectory.reward.value >= 1
        failed += is_failed
        seen.done += not is_failed
        seen.note = f"{won} won, {failed} failed"

    async def hold(task: Task, trial: int, number: int | None) -> tuple[Trajectory | None, list[Trajectory]]:
        spoilt: list[Trajectory] = []
        first = failures(task, trial) if failures is not None else 0
        last = redraws if first <= redraws else first + redraws  # what was given up gets a new budget
        for draw in range(first, last + 1):
            errors: list[Exception] = []
            async with room:
                trajectory = await attempt(
                    domain,
                    task,
                    trial,
                    draw,
                    agent,
                    user,
                    limits=limits,
                    seed=seed,
                    grade=grade,
                    audit=audit,
                    exclude=exclude,
                    name=name,
                    deadline=deadline,
                    errors=errors,
                )
            if each is not None:
                each(trajectory)
            count(trajectory)
            if number is not None:
                bug = find_bug(errors[0], domain.database) if errors else ""
                bugs.add(number, bug, trajectory.error)
            if trajectory.end != "error" and not trajectory.excluded:
                return trajectory, spoilt
            spoilt.append(trajectory)
            if deadline is not None and deadline.passed:
                break
        return None, spoilt

    async def gather(task: Task, trials: list[int], number: int) -> None:
        try:
            async with asyncio.TaskGroup() as siblings:  # when one cannot go on, the others stop
                held_by = [
                    siblings.create_task(hold(task, trial, None if place else number))
                    for place, trial in enumerate(trials)
                ]
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
    ahead = max(2, 2 * concurrency // group_size)
    outstanding = begun = won = failed = 0
    exhausted = False
    try:
        with _CALM, phase("conversations", count_wanted(tasks, group_size, skip)) as seen:
            while True:
                while not exhausted and outstanding < ahead:
                    task = next(waiting, None)
                    if task is None:
                        exhausted = True
                        break
                    trials = [trial for trial in range(group_size) if skip is None or not skip(task, trial)]
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
    """How many conversations are to be held; None where nobody knows yet how many tasks there are."""
    if not isinstance(tasks, Sequence):
        return None
    if skip is None:
        return len(tasks) * group_size
    return sum(not skip(task, trial) for task in tasks for trial in range(group_size))


async def attempt(
    domain: Domain,
    task: Task,
    trial: int,
    draw: int,
    agent: ModelSource,
    user: ModelSource,
    *,
    limits: Limits,
    seed: int = 0,
    grade: Grade | None = None,
    audit: Audit | None = None,
    exclude: bool = False,
    name: str = "",
    deadline: Deadline | None = None,
    errors: list[Exception] | None = None,
) -> Trajectory:
    """Hold and grade one conversation. The error boundary: nothing a party, tool or judge does gets past.
    What failed it is added to `errors`."""
    transcript = Transcript()
    identity = f"{name}{task.id}/{trial}" + (f".{draw}" if draw else "")
    own_seed = derive_seed(seed, name, task.id, trial, draw)
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
            model = agent(task, own_seed)
            if domain.agent_manner is not None:
                model = domain.agent_manner(task, model)
            speaks = Party("agent", model, environment.policy, environment.tools)
            transcript.acting = "user"
            name_, manner = domain.persona(own_seed) if domain.persona is not None else ("", "")
            told = user_prompt(domain, task, manner)
            meta["prompt"] = hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:12]
            meta |= {"persona": name_} if name_ else {}
            answers = Party("user", user(task, own_seed), told, environment.user_tools, domain.user_cue)
            trajectory = await converse(task, environment, speaks, answers, limits, transcript)
            trajectory = trajectory.model_copy(update={"id": identity, "trial": trial, "seed": own_seed})
            transcript.acting = "judge"
            if grade is not None:
                reward = await settle(grade(task, trajectory, environment))
                if reward is not None and not isfinite(reward.value):
                    raise GradeError(f"the reward is {reward.value}, which is no number to learn from")
            if audit is not None:
                findings = await settle(
                    audit(trajectory.model_copy(update={"reward": reward, "seed": own_seed}))
                )
            end = trajectory.end
    except asyncio.CancelledError:
        if _is_being_cancelled():
            raise
        failure = "a part of the conversation was cancelled", "infrastructure"
        reward = None
    except (BudgetError, ConfigError, RunError):
        raise  # whoever set this up has to be told; no other draw would help
    except Exception as error:  # noqa: BLE001 - the boundary: whatever it was, it is labelled
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
        excluded=exclude and bool(findings),
        meta=meta,
    )


async def _close(environment: Environment, identity: str) -> None:
    """Let go of what a conversation held open. It is over: a fault here spoils neither it nor the others."""
    try:
        await environment.close()
    except asyncio.CancelledError:
        if _is_being_cancelled():
            raise
        LOG.warning("%s: closing its environment was cancelled", identity)
    except Exception as error:  # noqa: BLE001 - the boundary reaches to the very end
        LOG.warning("%s: its environment could not be closed: %s: %s", identity, type(error).__name__, error)


def _is_being_cancelled() -> bool:
    """Whether somebody wants this very task to stop, rather than a part of it having been cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def find_blame(error: BaseException, acting: Blame) -> Blame:
    """Who is to blame for a failure: what the error says of itself, else whoever was at work."""
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
    """A seed of its own for each conversation, the same on every machine."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:6], "big")
