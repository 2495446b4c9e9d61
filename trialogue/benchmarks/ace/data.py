"""Read ACEBench's files: tasks, answers, the initial phone, and the wording of a checkout."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

from trialogue.benchmarks.ace.execute import UnreadableCalls, read_calls
from trialogue.benchmarks.ace.phone import AcePhone, to_users
from trialogue.benchmarks.folder import find_data, read_json_lines, read_texts
from trialogue.benchmarks.toolkit import Plain
from trialogue.errors import ConfigError
from trialogue.reading import reading
from trialogue.task import Assertion, Call, Expected, Task

HELP = "Get it with `git clone https://github.com/ACEBench/ACEBench` and name that folder"
CATEGORIES = ("multi_turn", "multi_step")


def find_ace_folder(data: str | None, name: str) -> Path:
    """The folder `data_all` of a checkout or a copy."""
    places = [f"{place}data_all" for place in ("", "acebench/", "ACEBench/")]
    return find_data(data, places, name, HELP)


def read_phone(folder: Path, language: str) -> AcePhone:
    """The initial phone. No file contains its messages and reminders, so they are taken from the majority of
    the expected end states."""
    inbox: dict[int, Counter[str]] = {}
    reminders: dict[int, Counter[str]] = {}
    for category in CATEGORIES:
        path = find_answer_file(folder, language, category)
        with reading(path, ConfigError):
            for answer in read_json_lines(path):
                for item in answer["ground_truth"]:
                    for attributes in item.values():
                        for votes, key in ((inbox, "inbox"), (reminders, "reminder_list")):
                            for number, record in attributes.get(key, {}).items():
                                votes.setdefault(int(number), Counter())[json.dumps(record)] += 1
    with reading(find_answer_file(folder, language, "*"), ConfigError):
        return AcePhone.load(
            {
                "language": language,
                "inbox": _elect(inbox, 6),
                "reminder_list": _elect(reminders, 3),
                "users": to_users(),
            }
        )


def _elect(votes: dict[int, Counter[str]], last: int) -> dict[int, Plain]:
    return {number: json.loads(votes[number].most_common(1)[0][0]) for number in range(1, last + 1)}


def find_task_file(folder: Path, language: str, category: str) -> Path:
    return folder / f"data_{language}" / f"data_agent_{category}.json"


def find_answer_file(folder: Path, language: str, category: str) -> Path:
    return folder / f"data_{language}" / "possible_answer" / f"data_agent_{category}.json"


def read_ace_tasks(folder: Path, language: str, category: str, name: str) -> list[Task]:
    """Every task of a category with its answer."""
    path = find_answer_file(folder, language, category)
    with reading(path, ConfigError):
        answers = {
            item["id"]: {key: item[key] for key in ("ground_truth", "mile_stone")}
            for item in read_json_lines(path)
        }
    path = find_task_file(folder, language, category)
    keys = ("initial_config", "function", "involved_classes")
    with reading(path, ConfigError):
        return [
            Task(
                id=item["id"],
                domain=name,
                instructions=item["question"],
                expected=Expected(assertions=(Assertion(name="is_end_right"),)),
                meta={**{key: item[key] for key in keys}, **answers[item["id"]]},
            )
            for item in read_json_lines(path)
        ]


def read_milestones(task: Task) -> tuple[Call, ...]:
    """The calls of the first solution in a task's answer; empty if they cannot be read."""
    stones: list[Any] = task.meta["mile_stone"]
    way = cast("list[str]", stones[0] if stones and isinstance(stones[0], list) else stones)
    try:
        return tuple(call for text in way for call in read_calls(text.strip()))
    except UnreadableCalls:
        return ()


def read_official_prompts(folder: Path, language: str) -> dict[str, str]:
    """The official prompts of a checkout, read from its Python files without running them."""
    code = folder.parent / "model_inference"
    suffix = language.upper()
    wanted = {
        f"prompt_{language}.py": {f"TRAVEL_PROMPT_{suffix}": "travel", f"BASE_PROMPT_{suffix}": "phone"},
        "multi_turn/APIModel_user.py": {
            f"SYSTEM_PROMPT_TRAVEL_{suffix}": "user_travel",
            f"SYSTEM_PROMPT_BASE_{suffix}": "user_phone",
        },
        "multi_turn/APIModel_agent.py": {
            f"MULTI_TURN_AGENT_PROMPT_SYSTEM_{suffix}": "system",
            f"MULTI_TURN_AGENT_PROMPT_USER_{suffix}": "frame",
        },
        "multi_step/APIModel_agent.py": {
            f"MULTI_TURN_AGENT_PROMPT_SYSTEM_{suffix}": "alone_system",
            f"MULTI_TURN_AGENT_PROMPT_USER_{suffix}": "alone_frame",
        },
    }
    found: dict[str, str] = {}
    for place, names in wanted.items():
        if (code / place).is_file():
            texts = read_texts(code / place)
            found |= {key: texts[name] for name, key in names.items() if name in texts}
    return found
