"""ACEBench: agent tasks on a phone or with an airline, with a user (multi_turn) or alone (multi_step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from trialogue.benchmarks.ace import data as files
from trialogue.benchmarks.ace.execute import ASK_NOTHING
from trialogue.benchmarks.ace.grade import grade_ace, judge
from trialogue.benchmarks.ace.speech import STOP, TextCaller
from trialogue.benchmarks.ace.texts import WORLD
from trialogue.benchmarks.ace.travel import load_travel
from trialogue.benchmarks.ace.world import AceDomain
from trialogue.benchmarks.folder import find_version
from trialogue.benchmarks.rules import BenchmarkRules, count_messages
from trialogue.errors import ConfigError
from trialogue.reading import reading
from trialogue.talk.scripted import ScriptedModel, call
from trialogue.task import Expected, Task
from trialogue.trajectory import Turn
from trialogue.world.domain import from_list

LANGUAGES = ("en", "zh")
CUES = {"en": "Is there anything you need help with today?", "zh": "今天有什么需要帮助的吗？"}
MAX_MESSAGES = 40
"""Maximum number of messages after the first."""
UNHEARD = 3
"""Number of first messages in which the benchmark ignores the stop words."""


@dataclass(frozen=True)
class AceRules(BenchmarkRules):
    """The stop words of either side end a conversation, and so do forty messages."""

    stop_tokens: tuple[str, ...] = (STOP,)
    stop_anywhere: bool = True
    quirks: bool = True
    """True: the stop words are ignored in the first messages, as in the benchmark."""

    def is_over(self, turns: Sequence[Turn]) -> bool:
        return count_messages(turns) > MAX_MESSAGES

    def is_last(self, turns: Sequence[Turn]) -> bool:
        return self.is_stop(turns[-1].message.content) and (
            not self.quirks or count_messages(turns) > UNHEARD
        )


def find(name: str = "", data: str | None = None) -> AceDomain:
    """The domain `multi_turn` or `multi_step`, in English or, with `@zh`, in Chinese. After the language,
    `-text` lets the agent write its calls as text, as in the benchmark, and `-mended` plays and grades
    without the benchmark's mistakes."""
    category, _, variant = name.partition("@")
    language, *how = (variant or "en").split("-")
    if (
        category not in files.CATEGORIES
        or language not in LANGUAGES
        or not {"text", "mended"}.issuperset(how)
    ):
        raise ConfigError(
            f"there is no 'ace:{name}'; allowed are {', '.join(files.CATEGORIES)}, optionally "
            "followed by @en or @zh, and then by -text, -mended or both"
        )
    folder = files.find_ace_folder(data, f"ace:{category}")
    with reading(folder, ConfigError):
        return _find(category, language, "mended" not in how, "text" in how, folder)


@lru_cache(maxsize=8)
def _find(category: str, language: str, quirks: bool, text: bool, folder: Path) -> AceDomain:
    alone = category == "multi_step"
    name = f"ace:{category}"
    wording = files.read_official_prompts(folder, language)
    own_policies: dict[str, str] = WORLD["policies"]
    policies = {key: wording.get(key, text) for key, text in own_policies.items()}
    has_user = "user_travel" in wording and "user_phone" in wording

    def user_prompt(task: Task) -> str:
        kind = "travel" if "Travel" in task.meta["involved_classes"] else "phone"
        return wording[f"user_{kind}"].replace("{instruction}", task.instructions)

    is_official = has_user and all(key in wording for key in own_policies)
    phone = files.read_phone(folder, language)
    domain = AceDomain(
        name=name,
        policy=policies["phone"],
        database=phone,
        tasks=from_list(name, []),
        reward=grade_ace,
        user=_tell_task if alone else None,
        oracle=_make_gold_calls,
        user_prompt=user_prompt if has_user and not alone else None,
        rules=AceRules(user_cue=None if alone else CUES[language], grade_at_cap=quirks, quirks=quirks),
        reference=f"{name}@{language}{'-text' if text else ''}{'' if quirks else '-mended'}",
        notes={
            "benchmark": "ACEBench",
            "version": find_version(folder),
            "language": language,
            "grading": "official" if quirks else "mended: not comparable",
            "calls": "text" if text else "native tool calls; the benchmark's own are text",
            "wording": "official" if is_official else "prompts in our own words: not comparable",
        },
        language=language,
        alone=alone,
        quirks=quirks,
        phone=phone,
        airline=load_travel(language),
        policies=policies,
        wording=wording,
    )
    if text:
        domain = replace(domain, rules=replace(domain.rules, adapt_agent=partial(TextCaller, domain)))
    tasks: list[Task] = []
    for task in files.read_ace_tasks(folder, language, category, name):
        with reading(
            f"{files.find_task_file(folder, language, category)} and its answers, {task.id}", ConfigError
        ):
            tasks.append(_with_calls(domain, task))
    if not tasks:
        raise ConfigError(f"{files.find_task_file(folder, language, category)} holds no task")
    return replace(domain, tasks=from_list(name, tasks))


def _with_calls(domain: AceDomain, task: Task) -> Task:
    """Use the milestones as gold calls if they reach the expected end; many leave out steps."""
    calls = files.read_milestones(task)
    environment = domain.open(task)
    environment.tools  # noqa: B018 - report malformed descriptions now
    environment.replay((call.name, call.arguments, "agent") for call in calls)
    if not calls or not judge(environment, []).end_to_end:
        return task
    return task.model_copy(update={"expected": Expected(calls=calls)})


def _tell_task(task: Task, seed: int) -> ScriptedModel:
    """The user of a task that has none: states the task, then says that nobody will answer."""
    return ScriptedModel([task.instructions, ASK_NOTHING])


def _make_gold_calls(task: Task, seed: int) -> ScriptedModel:
    """Make the calls of a task's answer one by one and end the conversation."""
    return ScriptedModel([*(call(item.name, **item.arguments) for item in task.expected.calls), STOP])
