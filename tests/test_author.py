"""A domain whose author made a mistake: every verb says in one line what is wrong and where."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from trialogue.cli.main import main
from trialogue.world.scaffold import write_domain

GENERATOR = """

from dataclasses import replace

SPLITS = {name: domain.tasks(name) for name in ("train", "dev", "test")}


def generate(split, count=None, seed=0, *, levels=(), families=()):
    return SPLITS[split][:count]


class Nobody:
    async def reply(self, turns, tools):
        raise AssertionError("nobody plays")


domain = replace(domain, tasks=generate, oracle=lambda task, seed: Nobody())
"""
VERBS = [
    ["check", "bakery"],
    ["eval", "bakery"],
    ["rollout", "bakery"],
    ["play", "bakery"],
    ["synthesize", "bakery"],
    ["train", "bakery"],
    ["sft", "bakery"],
    ["export", "verl", "bakery", "--out", "verl"],
]


@pytest.fixture
def bakery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_domain(tmp_path / "bakery")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bakery"


def call(*words: str) -> Result:
    return CliRunner(env={"TRIALOGUE_PROGRESS_SECONDS": "600"}).invoke(main, list(words))


def read_line(result: Result) -> str:
    """The one line that was said."""
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_a_task_generator_that_raises_is_named_with_its_line(bakery: Path, words: list[str]) -> None:
    code = (bakery / "domain.py").read_text() + GENERATOR
    (bakery / "domain.py").write_text(code)
    number = code[: code.index("    return SPLITS")].count("\n") + 1
    result = call(*words, "--split=tset")
    line = read_line(result)
    assert f"split 'tset': KeyError: 'tset' (in generate, domain.py, line {number})" in line
    assert "it has train, dev, test; did you mean test?" in line
    assert result.exit_code == 2


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_an_empty_list_of_tasks_names_the_file(bakery: Path, words: list[str]) -> None:
    (bakery / "tasks.jsonl").write_text("\n")
    with (bakery / "domain.py").open("a") as file:
        file.write(
            "from dataclasses import replace\ndomain = replace(domain, oracle=lambda task, seed: None)\n"
        )
    result = call(*words)
    assert f"{bakery / 'tasks.jsonl'} holds no task" in read_line(result)
    assert result.exit_code == 1


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("[]", "Desk data: an object with names is needed, not list"),
        ('{"orders": 5}', "Desk data, orders: an object with names is needed, not int"),
        (
            '{"orders": {"A1": {"order_id": 7}}}',
            "Desk data, orders.A1.order_id: Input should be a valid string",
        ),
    ],
)
def test_a_database_of_the_wrong_type_names_the_file(
    bakery: Path, words: list[str], data: str, told: str
) -> None:
    (bakery / "database.json").write_text(data)
    result = call(*words)
    assert f"{bakery / 'database.json'}: {told}" in read_line(result)
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("None", "TypeError: the source gives NoneType, not a list of tasks"),
        ('["a"]', "TypeError: the source gives a list with str in it, not a list of tasks"),
    ],
)
def test_a_task_source_has_to_give_tasks(bakery: Path, result: str, told: str) -> None:
    with (bakery / "domain.py").open("a") as file:
        file.write("from dataclasses import replace\n")
        file.write(f"domain = replace(domain, tasks=lambda *given, **more: {result})\n")
    assert told in read_line(call("eval", "bakery"))


def test_a_misspelt_split_is_wrong_usage(bakery: Path) -> None:
    for domain, splits in (("bakery", "dev, test, train"), ("shop", "train, dev, test")):
        result = call("eval", domain, "--split", "tset")
        assert f"split 'tset'; it has {splits}; did you mean test?" in read_line(result)
        assert result.exit_code == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["eval", "bakery", "--tasks", "two"], "value for '--tasks': 'two' is no whole number from 1 up"),
        (["check", "bakery", "--tasks", "0"], "Invalid value for '--tasks': 0 is not in the range"),
        (["view", "--port", "http"], "Invalid value for '--port': 'http' is no whole number from 0 to 65535"),
        (["view", "nothing"], "there is no folder nothing; name a run or a folder of runs"),
    ],
)
def test_a_wrong_word_gets_one_line(bakery: Path, words: list[str], told: str) -> None:
    result = call(*words)
    assert told in read_line(result)
    assert result.exit_code == 2


# -- tools that break --------------------------------------------------------------------------------------


def break_tool(bakery: Path, name: str) -> int:
    """Give a tool of the bakery a bug; returns its line."""
    lines = (bakery / "domain.py").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if f"def {name}(" in line) + 2
    lines.insert(number - 1, "        order_id = order_id + 1")
    (bakery / "domain.py").write_text("\n".join(lines) + "\n")
    return number


def test_a_broken_tool_is_counted_once_and_named_with_its_line(bakery: Path) -> None:
    number = break_tool(bakery, "change_day")
    done = call("eval", "bakery")
    assert done.exit_code == 1
    said = " ".join((done.stdout + done.stderr).split())
    assert said.count("conversations failed") == 1
    assert "mean of 3 families" in said  # the fourth has no figure
    assert "1 of 4 conversations failed and is in no figure (3 attempts; blame: tool 3)" in said
    place = f"(in change_day, domain.py, line {number})"
    assert f'3 × TypeError: can only concatenate str (not "int") to str {place}' in said


def test_a_bug_that_breaks_every_conversation_stops_the_run(bakery: Path) -> None:
    number = break_tool(bakery, "cancel_order")
    line = (bakery / "tasks.jsonl").read_text().splitlines()[0]
    tasks = [line.replace("cancel-1", f"cancel-{number}") for number in range(200)]
    (bakery / "tasks.jsonl").write_text("\n".join(tasks))
    result = call("eval", "bakery", "--split", "train", "rollout.concurrency=4", "run.name=broken")
    assert result.exit_code == 1
    told = result.stderr.splitlines()[-1]
    assert "conversations so far failed for one reason, in the domain's own code: TypeError" in told
    assert f"(in cancel_order, domain.py, line {number}); mend it" in told
    held = (bakery.parent / "runs" / "broken" / "trajectories" / "eval.jsonl").read_text().splitlines()
    assert 6 <= len(held) <= 36  # of 200


def test_a_bug_that_breaks_some_conversations_does_not(bakery: Path) -> None:
    break_tool(bakery, "change_day")
    lines = (bakery / "tasks.jsonl").read_text().splitlines()
    cancel, move = lines[0], next(line for line in lines if '"change_day"' in line and '"train"' in line)
    tasks = [
        (move if number % 5 else cancel).replace('{"id": "', f'{{"id": "{number}-', 1) for number in range(20)
    ]
    (bakery / "tasks.jsonl").write_text("\n".join(tasks))
    result = call("eval", "bakery", "--split", "train", "run.name=partly")
    assert result.exit_code == 1
    assert "16 of 20 conversations failed" in " ".join(result.stdout.split())


# -- code that is not the domain's -------------------------------------------------------------------------

OWN = """
from trialogue import ModelError, Reward


def reward(task, trajectory, environment):
    return Reward(value=trajectory.meta["x"])


class Agent:
    async def reply(self, turns, tools):
        return int("x")


class User:
    async def reply(self, turns, tools):
        raise OSError("no such device")


class Gone:
    async def reply(self, turns, tools):
        raise ModelError("the line is dead")
"""
REASONS = {
    "--reward": ("reward", "KeyError: 'x' (in reward, own.py, line 6); blame: judge"),
    "--agent": ("Agent", "base 10: 'x' (in reply, own.py, line 11); blame: agent"),
    "--user": ("User", "OSError: no such device (in reply, own.py, line 16); blame: infrastructure"),
}


@pytest.mark.parametrize(("option", "given"), REASONS.items())
def test_a_rollout_stops_where_everything_fails_for_one_reason(
    bakery: Path, option: str, given: tuple[str, str]
) -> None:
    name, told = given
    (bakery.parent / "own.py").write_text(OWN)
    result = call(
        "eval", "shop", "--tasks", "200", "rollout.concurrency=4", option, f"own.py:{name}", "run.name=run"
    )
    assert result.exit_code == 1
    line = result.stderr.splitlines()[-1]
    assert "stopped: all " in line
    assert "conversations so far failed for one reason: " in line
    assert line.endswith(told)
    held = (bakery.parent / "runs" / "run" / "trajectories" / "eval.jsonl").read_text().splitlines()
    assert 6 <= len(held) <= 36  # of 600


def test_a_model_that_always_fails_stops_nothing(bakery: Path) -> None:
    (bakery.parent / "own.py").write_text(OWN)
    result = call("eval", "shop", "--tasks", "8", "--agent", "own.py:Gone", "rollout.redraws=0")
    assert result.exit_code == 1
    assert "8 of 8 conversations failed" in " ".join(result.stdout.split())
    assert "8 × ModelError: the line is dead" in result.stdout


def test_two_tasks_are_enough_where_they_are_all(bakery: Path) -> None:
    (bakery.parent / "own.py").write_text(OWN)
    result = call("eval", "shop", "--tasks", "2", "--trials", "50", "--reward", "own.py:reward")
    assert result.exit_code == 1
    held = int(result.stderr.split("stopped: all ")[1].split()[0])
    assert 6 <= held <= 200  # of 300
    assert "conversations so far failed for one reason: KeyError" in result.stderr
