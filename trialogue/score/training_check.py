"""What stands in the way of learning a domain: found in its tasks, before anything is trained.

Each finding says what to do. None of them makes a domain wrong: `check` finds that.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from trialogue.activity import phase
from trialogue.config import Limits, Speaker, TrainConfig
from trialogue.errors import DomainError, GradeError, TrialogueError
from trialogue.score.check import spread, to_conversation
from trialogue.score.reward import grade
from trialogue.talk.conversation import BYTES_PER_TOKEN
from trialogue.talk.evidence import find_leaves
from trialogue.talk.find import find_model
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.talk.teacher.teacher import make_teacher
from trialogue.talk.teacher.work import is_refusal
from trialogue.task import SPLITS, Task
from trialogue.trajectory import Reward, Trajectory
from trialogue.world.domain import Domain

READ = 300
"""Tasks read of each split."""
PLAYED = 80
"""Tasks that the teacher plays."""
FEW_VALUES = 50
"""Values of a slot below which a small model learns them by heart."""
FEW_PHRASINGS = 8
"""Ways to put a wish below which its words are learned by heart."""
REPEATED = 0.8
"""Share of a slot's uses with a value of their own below which values repeat."""
SHARED = 0.05
"""Share of a split's values that may be in train, too, by chance."""
REFUSED = 0.4
"""Share of tasks that may be won by words of refusal."""
SHOWN = 5


@dataclass
class Findings:
    """The outcome."""

    texts: list[str] = field(default_factory=lambda: [])
    figures: dict[str, Any] = field(default_factory=lambda: {})

    def to_data(self) -> dict[str, Any]:
        return {"findings": self.texts, **self.figures}


def check_for_training(domain: Domain, seed: int = 0) -> Findings:
    """Look at the tasks of a domain as something to learn from."""
    found = Findings()
    tasks = {split: each for split in SPLITS if (each := _read(domain, split, seed))}
    found.figures["tasks"] = {split: len(each) for split, each in tasks.items()}
    if "train" not in tasks:
        found.texts.append(
            "there are no tasks in split 'train': give the tasks that are learned from this split"
        )
        return found
    found.texts += find_split_problems(tasks)
    found.texts += find_value_problems(domain, tasks, found.figures)
    found.texts += find_wording_problems(tasks, found.figures)
    found.texts += find_family_problems(tasks, found.figures)
    won = find_won_for_nothing(domain, tasks["train"])
    refusals = {task.id for task in tasks["train"] if _is_refused(domain, task)}
    for kind, names in won.items():
        told = [name for name in names if name not in refusals]
        if len(names) - len(told) > REFUSED * len(tasks["train"]):
            told = names  # words of refusal alone are no skill
        if told:
            found.texts.append(
                f"an agent that {kind} wins {len(told)} of {len(tasks['train'])} training tasks "
                f"({_name(told)}): expect a change, or something that only the right answer says"
            )
    found.texts += _play(domain, spread(tasks["train"], PLAYED), won, seed, found.figures)
    return found


def _read(domain: Domain, split: str, seed: int) -> list[Task]:
    try:
        return list(domain.tasks(split, READ, seed))
    except TrialogueError:
        return []


def _name(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def find_split_problems(tasks: Mapping[str, Sequence[Task]]) -> Iterator[str]:
    for split in SPLITS:
        if split not in tasks:
            yield (f"there are no tasks in split '{split}': dev tells when to stop, test what was learned")


# -- values ------------------------------------------------------------------------------------------------


def find_slots(tasks: Sequence[Task]) -> dict[str, list[str]]:
    """The values of each slot: what users tell, and what gold calls are given."""
    slots: dict[str, list[str]] = defaultdict(list)
    for task in tasks:
        own = [(name, str(fact["value"])) for name, fact in _list_facts(task) if fact.get("value")]
        own += [
            (name, leaf)
            for call in task.expected.calls
            for name, value in call.arguments.items()
            for leaf in find_leaves(value)
            if isinstance(leaf, str)
        ]
        for name, value in dict.fromkeys(own):
            slots[name].append(value)
    return slots


def _list_wishes(task: Task) -> Iterator[dict[str, Any]]:
    agenda = cast("dict[str, Any]", task.meta.get("agenda") or {})
    for wish in agenda.get("wishes", ()):
        each = wish
        while each:
            yield each
            each = each.get("instead")


def _list_facts(task: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    agenda = cast("dict[str, Any]", task.meta.get("agenda") or {})
    yield from (agenda.get("facts") or {}).items()
    for wish in _list_wishes(task):
        yield from (wish.get("facts") or {}).items()


def find_closed(domain: Domain, listed: Mapping[str, Sequence[str]]) -> set[str]:
    """Slots whose values are listed in the schemas: these are meant to be few."""
    sides = [side for side in (domain.database, domain.user_database) if side is not None]
    shapes = [tool.parameters for side in sides for tool in side.tools.values()]
    shapes += [shape for side in sides for shape in type(side).schemas().values()]
    fields = [
        each
        for shape in shapes
        for each in cast("dict[str, dict[str, Any]]", shape.get("properties", {})).items()
    ]
    choices = {str(value).lower() for _, inner in fields for value in inner.get("enum", ())}
    return {
        name
        for name, inner in fields
        if "enum" in inner or inner.get("type") in ("boolean", "integer", "number")
    } | {name for name, values in listed.items() if choices.issuperset(map(str.lower, values))}


def find_value_problems(
    domain: Domain, tasks: Mapping[str, Sequence[Task]], figures: dict[str, Any]
) -> Iterator[str]:
    """Slots with few values, and values that splits share."""
    listed = {split: find_slots(each) for split, each in tasks.items()}
    closed = find_closed(domain, listed["train"])
    slots = {split: {name: set(values) for name, values in each.items()} for split, each in listed.items()}
    figures["values"] = {
        split: {name: len(own) for name, own in each.items()} for split, each in slots.items()
    }
    is_small = len(tasks["train"]) < FEW_VALUES
    few = {
        name: len(own)
        for name, own in slots["train"].items()
        if name not in closed and len(own) < FEW_VALUES
        if is_small or len(own) < REPEATED * len(listed["train"][name])
    }
    if few:
        told = ", ".join(f"{name} {number}" for name, number in sorted(few.items()))
        yield (
            f"few distinct values in train ({told}): a small model learns them by heart; generate tasks with "
            "values drawn anew, or let Vary replace them"
        )
    for split in [name for name in slots if name != "train"]:
        shared = {
            name: f"{len(both)} of {len(own)}"
            for name, own in slots[split].items()
            if name not in closed
            if len(both := own & slots["train"].get(name, set())) > SHARED * len(own)
        }
        if shared:
            told = ", ".join(f"{name} {number}" for name, number in sorted(shared.items()))
            yield (
                f"values of {split} are in train too ({told}): {split} does not tell whether new ones are "
                "understood; share the values out with Slots"
            )


# -- words -------------------------------------------------------------------------------------------------


def to_template(text: str, values: Sequence[str]) -> str:
    """A sentence without the values of its task."""
    for value in sorted(values, key=len, reverse=True):
        if len(value) > 1:
            text = re.sub(re.escape(value), "…", text, flags=re.IGNORECASE)
    return re.sub(r"\d+", "0", text)


def find_templates(tasks: Sequence[Task]) -> dict[str, set[str]]:
    """The ways users put a wish, by family."""
    found: dict[str, set[str]] = defaultdict(set)
    for task in tasks:
        values = [str(fact["value"]) for _, fact in _list_facts(task) if fact.get("value")]
        for wish in _list_wishes(task):
            found[task.family or "(no family)"].update(
                to_template(text, values) for text in wish.get("says", ())
            )
    return found


def find_wording_problems(tasks: Mapping[str, Sequence[Task]], figures: dict[str, Any]) -> Iterator[str]:
    """Wishes with few phrasings, and sentences that splits share."""
    templates = {split: find_templates(each) for split, each in tasks.items()}
    figures["phrasings"] = {name: len(found) for name, found in templates["train"].items()}
    few = {name: number for name, number in figures["phrasings"].items() if number < FEW_PHRASINGS}
    if few:
        told = ", ".join(f"{name} {number}" for name, number in sorted(few.items()))
        yield f"few ways to put a wish in train ({told}): write {FEW_PHRASINGS} or more, such as with Phrases"
    for split in [name for name in templates if name != "train"]:
        own = set[str]().union(*templates[split].values())
        both = own & set[str]().union(*templates["train"].values())
        if both:
            yield (
                f"{len(both)} of {len(own)} sentences of {split} are in train too (such as {min(both)!r}): "
                f"{split} does not tell whether new wording is understood; share them out with Phrases"
            )


def find_family_problems(tasks: Mapping[str, Sequence[Task]], figures: dict[str, Any]) -> Iterator[str]:
    """What is tested and never learned."""
    counted = {split: Counter((task.family, task.level) for task in each) for split, each in tasks.items()}
    figures["families"] = {
        split: {
            f"{family or '(no family)'} × level {level}": number
            for (family, level), number in sorted(each.items())
        }
        for split, each in counted.items()
    }
    learned = {family for family, _ in counted["train"]}
    for split in [name for name in counted if name != "train"]:
        if missing := sorted({family for family, _ in counted[split]} - learned):
            yield f"train has no tasks of these families of {split}: {_name(missing)}; add some"


# -- what tasks pay for -------------------------------------------------------------------------------------


def find_won_for_nothing(domain: Domain, tasks: Sequence[Task]) -> dict[str, list[str]]:
    """Tasks that an agent wins without understanding: by doing nothing, or by saying all words that are ever
    expected (numbers aside)."""
    expected = {text for task in tasks for item in task.expected.say for text in _wordings(item)[:1]}
    everything = sorted(text for text in expected if not re.search(r"\d", text))
    won: dict[str, list[str]] = {"does and says nothing": [], "does nothing and says everything": []}
    for task in tasks:
        if domain.open(task).remote or task.expected.nothing:
            continue
        for kind, say in zip(won, ([], everything), strict=True):
            environment = domain.open(task)
            with suppress(GradeError, DomainError):
                reward: Any = grade(task, to_conversation(task, (), say, environment), environment)
                if isinstance(reward, Reward) and reward.value >= 1:
                    won[kind].append(task.id)
    quiet = set(won["does and says nothing"])
    won["does nothing and says everything"] = [
        name for name in won["does nothing and says everything"] if name not in quiet
    ]
    return won


def _is_refused(domain: Domain, task: Task) -> bool:
    """Whether a task asks for something that has to be refused."""
    tools = domain.open(task).tools
    changes = [call for call in task.expected.calls if call.side == "user" or tools[call.name].writes]
    return not changes and is_refusal([_wordings(item) for item in task.expected.say])


def _wordings(item: str | tuple[str, ...]) -> tuple[str, ...]:
    return (item,) if isinstance(item, str) else item


def _play(
    domain: Domain,
    tasks: Sequence[Task],
    won: Mapping[str, Sequence[str]],
    seed: int,
    figures: dict[str, Any],
) -> Iterator[str]:
    """Let the teacher play: what it loses cannot be taught, and its conversations have a length."""
    if not tasks or domain.open(tasks[0]).remote or (domain.user is None and "agenda" not in tasks[0].meta):
        yield (
            "the teacher played nothing: it needs a rule-based user (an agenda in each task) and tools that "
            "answer here"
        )
        return
    with phase(f"the teacher plays {len(tasks)} tasks"):
        held, lost = asyncio.run(_hold(domain, tasks, seed))
    figures["teacher"] = {"played": len(tasks), "solved": len(held)}
    if lost:
        by_text: dict[str, list[str]] = defaultdict(list)
        for name, text in lost.items():
            by_text[text.replace(name, "…")].append(name)
        for text, names in list(by_text.items())[:SHOWN]:
            yield f"the teacher does not solve {_name(names)}: {text}; it is left out of what is imitated"
    idle = set(won["does and says nothing"])
    flat = [task.id for task in tasks if task.id in lost or task.id in idle]
    if flat:
        yield (
            f"{len(flat)} of {len(tasks)} groups are likely to give no signal ({_name(flat)}): all of their "
            "conversations would be lost, or won for nothing"
        )
    limits = TrainConfig().limits
    lengths = sorted(map(_measure, held))
    if lengths:
        middle = lengths[len(lengths) // 2]
        figures["tokens"] = {"median": middle, "longest": lengths[-1], "limit": limits.context_tokens}
        if lengths[-1] > limits.context_tokens:
            yield (
                f"the longest conversation has about {lengths[-1]} tokens without policy and tools, and "
                f"limits.context_tokens is {limits.context_tokens}: raise it, or let tools return less"
            )


def _measure(item: Trajectory) -> int:
    """About how many tokens a conversation has."""
    texts = [f"{turn.message.content}{turn.message.tool_calls or ''}" for turn in item.turns]
    return sum(map(len, texts)) // BYTES_PER_TOKEN


async def _hold(domain: Domain, tasks: Sequence[Task], seed: int) -> tuple[list[Trajectory], dict[str, str]]:
    limits = Limits(seconds=30)
    user = find_model(Speaker(model="agenda"), "user", domain, limits, seed)
    held: list[Trajectory] = []
    lost: dict[str, str] = {}
    settings = RolloutSettings(limits=limits, seed=seed, redraws=0, grade=grade)
    async for group in rollout(domain, tasks, make_teacher(domain), user, settings):
        for item in group.failed:
            lost[item.task.id] = item.error or "it fails"
        for item in group.trajectories:
            if item.reward is not None and item.reward.value >= 1:
                held.append(item)
            else:
                lost[item.task.id] = "; ".join(item.reward.why) if item.reward else item.end
    return held, lost
