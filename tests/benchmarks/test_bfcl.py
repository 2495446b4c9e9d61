"""BFCL: executor, parser and grades on a made-up package, and on real ones that TRIALOGUE_BFCL names."""

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trialogue.benchmarks import bfcl
from trialogue.benchmarks.bfcl.execute import parse_call
from trialogue.benchmarks.bfcl.grade import find_fault, to_step
from trialogue.benchmarks.bfcl.package import CATEGORIES, find_generation, find_package, read_entries
from trialogue.config import EvalConfig, load_config
from trialogue.errors import ConfigError, ToolError
from trialogue.messages import ToolCall
from trialogue.score.check import check
from trialogue.score.evaluate import evaluate
from trialogue.score.reward import grade, regrade
from trialogue.talk.rollout import RolloutSettings, attempt
from trialogue.talk.scripted import ScriptedModel
from trialogue.trajectory import Reply, Trajectory
from trialogue.view.report import write_report

LAMP = """
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.long_context import EXTRA

class TicketAPI:
    def __init__(self):
        self.lamps = {}
        self._secret = 0

    def _load_scenario(self, scenario, long_context=False):
        self.lamps = scenario.get("lamps", {})
        if long_context:
            self.lamps.update(EXTRA)

    def switch(self, name, on=True):
        self.lamps[name] = on
        self._secret += 1
        return {"name": name, "on": on}

    def count(self):
        return len(self.lamps)

    def run(self):
        return "never"
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "bfcl_eval"
    code = root / "eval_checker" / "multi_turn_eval" / "func_source_code"
    code.mkdir(parents=True)
    (code / "long_context.py").write_text("EXTRA = {'spare': False}\n")
    (code / "ticket_api.py").write_text(LAMP)
    (root / "constants").mkdir()
    (root / "constants" / "default_prompts.py").write_text(
        'raise SystemExit\nDEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC = "More now."\n'
    )
    described = [
        {"name": name, "description": name, "parameters": {"type": "dict", "properties": {}, "required": []}}
        for name in ("switch", "count")
    ]
    entry = {
        "question": [
            [{"role": "user", "content": "Light the hall."}],
            [],
            [{"role": "user", "content": "Hm."}],
        ],
        "initial_config": {"TicketAPI": {"lamps": {"hall": False}}},
        "involved_classes": ["TicketAPI"],
        "missed_function": {"1": ["count"]},
    }
    truth = [["switch('hall')"], ["count()"], []]
    for place, more in (("data", entry), ("data/possible_answer", {"ground_truth": truth})):
        (root / place).mkdir(exist_ok=True)
        for category in CATEGORIES:
            line = json.dumps({"id": f"multi_turn_{category}_0", **more})
            (root / place / f"BFCL_v4_multi_turn_{category}.json").write_text(line + "\n")
    (root / "data" / "multi_turn_func_doc").mkdir()
    lines = "\n".join(map(json.dumps, described))
    (root / "data" / "multi_turn_func_doc" / "ticket_api.json").write_text(lines)
    return tmp_path


def hold(domain: Any, agent: Any) -> Trajectory:
    [task] = domain.tasks("all")
    return asyncio.run(attempt(domain, task, agent, domain.user, RolloutSettings(grade=grade)))


def test_gold_is_right_and_functions_appear_in_time(package: Path) -> None:
    domain = bfcl.find("miss_func", str(package))
    offered: list[list[str]] = []

    class Watcher:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def reply(self, turns: Any, tools: Any) -> Reply:
            offered.append([tool.name for tool in tools])
            return await self.inner.reply(turns, tools)

    trajectory = hold(domain, lambda task, seed: Watcher(domain.oracle(task, seed)))
    assert (trajectory.end, trajectory.value) == ("user_stop", 1.0)
    assert offered == [["switch"], ["switch"], *[["switch", "count"]] * 3]
    assert [turn.message.content for turn in trajectory.turns if turn.side == "user"][1] == "More now."
    [task] = domain.tasks("all")
    assert regrade(trajectory, domain.open(task)) == (trajectory.reward, [])
    assert domain.notes["generation"] == "v4"
    assert check(domain).problems == []


def test_the_score_is_the_mean_of_the_four_categories(
    package: Path, tmp_path: Path, announced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("data", "data/possible_answer"):  # one category has more entries than the others
        file = package / "bfcl_eval" / place / "BFCL_v4_multi_turn_base.json"
        file.write_text(file.read_text() + file.read_text().replace("_0", "_1"))
    domain = bfcl.find("all", str(package))
    assert [task.family for task in domain.tasks("test", 4)] == list(CATEGORIES)

    def agent(task: Any, seed: int) -> Any:
        return ScriptedModel(["Done."]) if task.family == "long_context" else domain.oracle(task, seed)

    monkeypatch.setattr(sys.modules[__name__], "own_agent", agent, raising=False)
    own = f"agent.model={__name__}:own_agent"
    settings = [own, "domain=bfcl:all", f"data={package}", f"run.directory={tmp_path}", "run.name=all"]
    result = asyncio.run(evaluate(load_config(EvalConfig, None, settings)))
    assert (result["asked"], result["pass^1"], result["family_mean"]) == (5, 0.8, 0.75)
    assert "mean of the families' pass^1 is 0.750" in write_report(tmp_path / "all").read_text()


def test_more_than_twenty_steps_lose(package: Path) -> None:
    call = Reply(tool_calls=(ToolCall(id="c", name="count", arguments={}),))
    trajectory = hold(bfcl.find("base", str(package)), lambda _task, _seed: ScriptedModel([call]))
    assert (trajectory.end, trajectory.value) == ("max_turns", 0.0)
    assert sum(bool(turn.message.tool_calls) for turn in trajectory.turns) == 21


def test_grades(package: Path) -> None:
    domain = bfcl.find("base", str(package))
    [task] = domain.tasks("all")

    def fault(*turns: list[list[str]]) -> str | None:
        steps = [[to_step(step) for step in turn] for turn in turns]
        return find_fault(domain.find_gold(task), steps, domain.make_instances(task))

    assert fault([["switch(name='hall', on=True)"]], [["count()"]], [["count()"]]) is None
    assert fault([["count()"], ["switch('hall')"]], [["switch('hall')"]], []) is None  # counted before
    assert "no function was called" in str(fault([], [["count()"]], []))
    assert "lamps should be" in str(fault([["switch('hall')", "switch('x')"]], [["count()"]], []))
    assert "no call gave 1" in str(fault([["switch('hall')"]], [["switch('hall')"]], []))
    assert "2 turns" in str(fault([["switch('hall')"]], [["count()"]]))
    assert fault([["switch('hall')"]], [["count()"]], [["switch('y')"]]) is None  # nothing is asked there


def test_text_is_never_evaluated(package: Path, tmp_path: Path) -> None:
    domain = bfcl.find("base", str(package))
    instances = domain.make_instances(domain.tasks("all")[0])
    target = tmp_path / "made"
    for text in (
        f"__import__('os').mkdir('{target}')",
        f"switch(open('{target}', 'w'))",
        "count().bit_length()",
        "switch(**{'name': 'x'})",
        "switch(",
        "switch",
    ):
        with pytest.raises(ToolError):
            parse_call(text)
        assert instances.run_text(text).startswith("Error during execution: ")
    assert not target.exists()
    assert instances.run_text("run()") == "Error during execution: Function call run is not allowed."
    assert instances.run_text("open('x')") == "Error during execution: name 'open' is not defined"
    assert instances.run_text("_load_scenario({})").endswith("is not defined")
    assert instances.run_text("count(1)").startswith("Error during execution: TicketAPI.count() takes")
    assert instances.run_text("switch('a', on=-1)") == '{"name": "a", "on": -1}'


def test_worlds_are_apart(package: Path) -> None:
    domain = bfcl.find("long_context", str(package))
    [task] = domain.tasks("all")
    first, second = domain.open(task), domain.open(task)
    assert first.call("switch", {"name": "hall"}).text == '{"name": "hall", "on": true}'
    assert first.digest() != second.digest()
    assert [change.path for change in first.difference()] == ["TicketAPI.lamps.hall"]
    assert second.to_data() == {"TicketAPI": {"lamps": {"hall": False, "spare": False}}}
    assert first.call("switch", "{").failed
    assert not any(name.startswith("bfcl_eval") for name in sys.modules)


def test_what_is_wrong_is_told(tmp_path: Path, package: Path) -> None:
    with pytest.raises(ConfigError, match=r"allowed are base, miss_func"):
        bfcl.find("simple", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install --no-deps bfcl-eval mpmath"):
        bfcl.find("base", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"holds generation v4 and not 'v3'"):
        bfcl.find("base@v3", str(package))


REAL = os.environ.get("TRIALOGUE_BFCL")
FAULTS = ("gold", "drop", "swap", "alter", "extra")


def spoil(truth: list[list[str]], kind: str, seed: str) -> list[list[list[str]]]:
    """The gold calls, one a message, with one fault."""
    chance = random.Random(f"{seed}{kind}")
    turns = [[[call] for call in calls] for calls in truth]
    everything = [call for calls in truth for call in calls]
    turn = chance.choice([number for number, calls in enumerate(truth) if calls])
    place = chance.randrange(len(turns[turn]))
    text = turns[turn][place][0]
    if kind == "drop":
        turns[turn].pop(place)
    elif kind == "swap":
        turns[turn][place] = [chance.choice(everything)]
    elif kind == "alter":
        changed = text.replace("'", "'x", 1) if "'" in text else text.replace("(", "(unknown=1, ", 1)
        turns[turn][place] = [changed]
    elif kind == "extra":
        turns[chance.randrange(len(turns))].append([chance.choice(everything)])
    return turns


@pytest.mark.skipif(
    REAL is None, reason="TRIALOGUE_BFCL names no folder of unpacked packages: make test-bfcl"
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("version", "generation"), [("2025.8.6", "v3"), ("2026.3.23", "v4")])
def test_grades_are_those_of_the_package(version: str, generation: str) -> None:
    root = (Path(str(REAL)) / f"bfcl-{version}").resolve()
    package = find_package(str(root))
    assert find_generation(package, "") == generation
    cases: list[Any] = []
    ours: list[bool] = []
    for category in CATEGORIES:
        domain = bfcl.find(f"{category}@{generation}", str(root))
        entries = read_entries(package, generation, category)
        assert len(entries) == 200
        for entry, task in zip(entries, domain.tasks("all"), strict=True):
            for kind in FAULTS:
                turns = spoil(entry["ground_truth"], kind, entry["id"])
                cases.append((entry, turns))
                steps = [[to_step(step) for step in turn] for turn in turns]
                fault = find_fault(domain.find_gold(task), steps, domain.make_instances(task))
                ours.append(fault is None)
    script = Path(__file__).with_name("bfcl_official.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(cases),
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = json.loads(done.stdout)
    assert len(theirs) == 4000
    assert [case[0]["id"] for case, a, b in zip(cases, ours, theirs, strict=True) if a != b] == []
    assert all(theirs[::5])
    assert not all(theirs)
