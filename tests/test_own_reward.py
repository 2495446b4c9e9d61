"""A reward from outside the package: how it is named, recorded and refused, and what counts as a success."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trialogue import (
    ConfigError,
    Environment,
    Reward,
    RolloutSettings,
    Task,
    Trajectory,
    find_domain,
    find_model,
    outcome,
    rollout,
)
from trialogue.cli.main import main
from trialogue.config import SftConfig, load_config
from trialogue.corpus.verify import verify
from trialogue.hosts.conversations import to_figures
from trialogue.learn.measure import measure
from trialogue.learn.sft import choose_good
from trialogue.records import to_entry
from trialogue.run import find_files, read_trajectories
from trialogue.score.check import check
from trialogue.score.compare import agree
from trialogue.score.metrics import summarize
from trialogue.score.play import Played
from trialogue.score.rescore import rescore
from trialogue.score.reward import with_reward
from trialogue.trajectory import Group
from trialogue.view.api import find_outcome
from trialogue.view.report import to_report

CODE = '''
from trialogue import Reward, outcome


def shaped(task, trajectory, environment):
    """Never 1: what is solved pays 0.9, less for every turn."""
    return Reward(value=0.9 * outcome(task, trajectory, environment).value - 0.01 * len(trajectory.turns))


async def told(task, trajectory, environment):
    """The same, and what is solved counts as a success."""
    found = outcome(task, trajectory, environment)
    return Reward(value=0.9 * found.value, success=found.is_success)


def two_arguments(task, trajectory):
    return Reward(value=1.0)


def nothing(task, trajectory, environment):
    return None


def number(task, trajectory, environment):
    return 1.0


async def number_later(task, trajectory, environment):
    return 1.0


def bug(task, trajectory, environment):
    return Reward(value=trajectory.turns + 1)


async def bug_later(task, trajectory, environment):
    return Reward(value=trajectory.turns + 1)


def no_value(task, trajectory, environment):
    return Reward(value=None)


absent = None
'''
Written = Callable[[str], str]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """The reference of a reward in `mine.py`, in the folder where commands run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE, encoding="utf-8")
    return lambda name: f"mine.py:{name}"


def invoke(*words: str, name: str = "run") -> Result:
    return CliRunner().invoke(main, [*words, f"run.name={name}"])


def evaluate(reward: str, *words: str, name: str = "run") -> Result:
    return invoke("eval", "shop", "--tasks", "6", "--reward", reward, *words, name=name)


def read_held(run: str = "run") -> list[Trajectory]:
    return [item for file in find_files(Path("runs") / run) for item in read_trajectories(file)]


# -- the name ------------------------------------------------------------------------------------------------


def test_the_reward_that_is_named_grades_and_is_on_record(mine: Written) -> None:
    done = evaluate(mine("told"), "--json")
    assert done.exit_code == 0, done.output
    assert {item.value for item in read_held()} == {0.9}
    recorded = json.loads(Path("runs/run/config.json").read_text(encoding="utf-8"))
    assert recorded["reward"] == {"name": "mine.py:told", "rules": "required"}
    assert json.loads(done.stdout)["pass^1"] == 1


def test_the_mean_reward_is_shown_where_it_is_not_the_success_rate(mine: Written) -> None:
    assert "mean reward: 0.900\n" in evaluate(mine("told")).output
    assert "mean reward" not in evaluate("outcome", name="usual").output


@pytest.mark.parametrize("verb", ["rollout", "synthesize"])
def test_the_other_verbs_that_grade_take_it_too(mine: Written, verb: str) -> None:
    count = ["--count", "2"] if verb == "synthesize" else ["--tasks", "2"]
    done = invoke(verb, "shop", *count, "--reward", mine("told"))
    assert done.exit_code == 0, done.output
    assert {item.value for item in read_held()} == {0.9}


def test_the_built_in_outcome_takes_the_place_of_a_domain_s_own() -> None:
    def half(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
        return Reward(value=0.5)

    own = replace(find_domain("shop"), reward=half)
    assert with_reward(own, "").reward is half
    assert with_reward(own, "outcome").reward is None


def test_check_plays_by_the_reward(mine: Written) -> None:
    done = CliRunner().invoke(main, ["check", "shop", "--tasks", "2", "--reward", mine("told")])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(main, ["check", "shop", "--tasks", "2", "--reward", mine("shaped")])
    assert done.exit_code == 1
    assert "the gold replay scores 0." in done.output


# -- what a record may not choose ----------------------------------------------------------------------------


def test_a_record_does_not_run_the_reward_that_it_names(mine: Written) -> None:
    assert evaluate(mine("shaped")).exit_code == 0
    done = CliRunner().invoke(main, ["score", "runs/run", "shop"])
    assert done.exit_code == 2
    assert "would run " in done.stderr
    assert "mine.py: add --reward mine.py:shaped to allow it, or --trust" in done.stderr
    for words in (["--reward", "mine.py:shaped"], ["--trust"]):
        done = CliRunner().invoke(main, ["score", "runs/run", *words])
        assert (done.exit_code, done.stdout.splitlines()[-1]) == (
            0,
            "6 conversations, 6 graded as recorded",
        )
    done = CliRunner().invoke(main, ["score", "runs/run", "--reward", "outcome", "--json"])
    assert done.exit_code == 1  # it is not the recorded reward
    assert [(row["reward"], row["success"]) for row in json.loads(done.stdout)] == [(1.0, True)] * 6


def test_a_resumed_run_does_not_run_it_either(mine: Written) -> None:
    assert evaluate(mine("told")).exit_code == 0
    done = CliRunner().invoke(main, ["eval", "--resume", "runs/run"])
    assert done.exit_code == 2
    assert "add reward.name=mine.py:told to allow it" in done.stderr
    assert (
        CliRunner().invoke(main, ["eval", "--resume", "runs/run", "--reward", "mine.py:told"]).exit_code == 0
    )
    assert CliRunner().invoke(main, ["eval", "--resume", "runs/run", "--trust"]).exit_code == 0


def test_the_file_is_found_again_from_another_folder(
    mine: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluate(mine("told")).exit_code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = CliRunner().invoke(main, ["eval", "--resume", str(tmp_path / "runs/run"), "--trust"])
    assert done.exit_code == 0, done.output


# -- mistakes of its author ----------------------------------------------------------------------------------

MISTAKES = {
    "two_arguments": "it is called as reward(task, trajectory, environment), but takes (task, trajectory)",
    "nothing": "nothing (mine.py, line 20) returned None; it must return Reward(value=…)",
    "number": "number (mine.py, line 24) returned an object of type float; it must return Reward(value=…)",
    "number_later": "number_later (mine.py, line 28) returned an object of type float",
    "bug": 'can only concatenate tuple (not "int") to tuple (in bug, mine.py, line 33)',
    "bug_later": 'can only concatenate tuple (not "int") to tuple (in bug_later, mine.py, line 37)',
    "no_value": "Reward: value: Input should be a valid number (mine.py, line 41)",
    "absent": "reward is None",
    "tolled": "mine.py has no 'tolled'; did you mean told?",
}


@pytest.mark.parametrize(("name", "told"), MISTAKES.items())
def test_a_mistake_is_raised_at_once_and_is_no_failed_conversation(
    mine: Written, name: str, told: str
) -> None:
    done = evaluate(mine(name))
    assert done.exit_code == 2, done.output
    assert done.stderr.count("\n") == 1
    assert told in done.stderr
    assert not [*Path().glob("runs/run/trajectories/*")]


def test_a_mistake_is_raised_when_grading_again(mine: Written) -> None:
    assert evaluate("outcome").exit_code == 0
    with pytest.raises(ConfigError, match=r"bug, mine\.py, line 33"):
        rescore(Path("runs/run"), reward=mine("bug"))


def test_a_domain_whose_reward_takes_other_arguments_is_refused() -> None:
    def half(task: Task) -> Reward:
        return Reward(value=0.5)

    with pytest.raises(ConfigError, match=r"reward half \(test_own_reward.py, line \d+\): it is called as"):
        replace(find_domain("shop"), reward=half)


def test_what_one_conversation_makes_of_it_is_no_mistake(
    mine: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge's answer that cannot be read spoils one conversation."""
    (tmp_path / "mine.py").write_text(
        "from trialogue import Reward\n\n\n"
        "def reward(task, trajectory, environment):\n"
        "    return Reward(value=float('no' if trajectory.trial else '1'))\n"
    )
    done = evaluate(mine("reward"), "--trials", "2", "rollout.redraws=0", "--json")
    assert done.exit_code == 1
    result = json.loads(done.stdout)
    assert (result["conversations"], result["blame"]) == (6, {"judge": 6})


# -- success -------------------------------------------------------------------------------------------------


def test_rewards_below_1_without_success_are_said_to_count_as_none(mine: Written) -> None:
    done = evaluate(mine("shaped"))
    lines = [line for line in done.stdout.splitlines() if "no conversation counts as a success" in line]
    assert len(lines) == 1
    assert "the rewards vary from " in lines[0]
    assert "return Reward(value=…, success=…)" in lines[0]
    values = [item.value for item in read_held()]
    result = json.loads(Path("runs/run/result.json").read_text(encoding="utf-8"))
    assert result["no_success"] == [min(values), max(values)]
    report = to_report(Path("runs/run"))
    assert report.count("no conversation counts as a success") == 1
    assert "**user_stop: no success** (6)" in report


def test_nothing_is_said_where_a_reward_tells_what_counts(mine: Written) -> None:
    assert "counts as a success" not in evaluate(mine("told"), "--agent", "naive").stdout
    assert "counts as a success" not in evaluate("outcome", "--agent", "naive", name="naive").stdout


def test_success_is_1_or_more_unless_the_reward_says_so() -> None:
    assert [Reward(value=value).is_success for value in (0.0, 0.999, 1 - 1e-9, 1.0, 7.5)] == [
        *(False, False),
        *(True, True, True),
    ]
    assert Reward(value=0.2, success=True).is_success
    assert not Reward(value=1.0, success=False).is_success


def graded(*rewards: Reward | None) -> list[Trajectory]:
    task = Task(id="t", domain="shop", instructions="", meta={"family": "cancel"})
    return [
        Trajectory(
            id=f"t/{trial}",
            task=task,
            trial=trial,
            turns=(),
            end="user_stop" if reward is not None else "error",
            reward=reward,
        )
        for trial, reward in enumerate(rewards)
    ]


WON = Reward(value=0.4, success=True)
LOST = Reward(value=1.0, success=False)


def test_every_figure_counts_by_it() -> None:
    items = graded(WON, LOST)
    summary = summarize(items, seed=1)
    assert (summary["pass^1"], summary["pass^2"], summary["reward"]) == (0.5, 0.0, 0.7)
    assert summary["families"]["cancel"]["pass^1"] == 0.5
    assert summary["audit"]["lost"] == 1
    assert summary["audit"]["success"]["all"]["pass^1"] == 0.5
    assert "no_success" not in summary
    group = Group(task=items[0].task, trajectories=tuple(items))
    assert measure([group])["success"] == 0.5
    assert measure([group])["all_right"] == 0
    assert measure([Group(task=items[0].task, trajectories=tuple(items[:1]))])["all_right"] == 1
    assert [to_figures([item])["success"] for item in items] == [1.0, 0.0]  # what verl and TRL are told
    assert agree(items, graded(Reward(value=1.0), Reward(value=0.0)))["same"] == 1


def test_what_is_imitated_and_what_is_shown_goes_by_it() -> None:
    items = graded(WON, LOST)
    assert choose_good(items, load_config(SftConfig)) == items[:1]
    entries = [to_entry(item, "eval", 0, 1) for item in items]
    assert [find_outcome(entry) for entry in entries] == ["won", "lost"]
    assert [entry.success for entry in entries] == [True, False]


async def test_verification_goes_by_it() -> None:
    domain = find_domain("shop")
    task = domain.tasks("train", 1)[0]

    def find_outcome_flaws(success: bool) -> list[str]:
        def reward(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
            return Reward(value=0.5, success=success)

        item = Trajectory(id="a/0", task=task, turns=(), end="user_stop", reward=Reward(value=0.5))
        return [flaw.text for flaw in verify(item, replace(domain, reward=reward)) if flaw.check == "outcome"]

    assert find_outcome_flaws(True) == []
    assert find_outcome_flaws(False) == ["the outcome is worth 0.5: "]


def test_check_lets_the_gold_calls_be_a_success_below_1() -> None:
    def half(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
        found = outcome(task, trajectory, environment)
        return Reward(value=found.value / 2, success=found.is_success)

    assert check(replace(find_domain("shop"), reward=half), "train", 2).ok


def test_a_record_without_success_is_as_before() -> None:
    item = graded(Reward(value=1.0))[0]
    assert json.loads(item.to_json())["reward"] == {"value": 1.0}
    told = graded(WON)[0]
    assert json.loads(told.to_json())["reward"] == {"value": 0.4, "success": True}
    assert Trajectory.model_validate_json(told.to_json()) == told


# -- from Python ---------------------------------------------------------------------------------------------


def grade_by_two(task: Task, trajectory: Trajectory) -> Reward:
    return Reward(value=1.0)


def grade_by_number(task: Task, trajectory: Trajectory, environment: Environment) -> float:
    return 1.0


def grade_by_mistake(task: Task, trajectory: Trajectory, environment: Environment) -> Reward:
    return Reward(value=task.worth)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (grade_by_two, r"it is called as grade\(task, trajectory, environment\), but takes \(task: "),
        (
            grade_by_number,
            r"grade_by_number \(test_own_reward.py, line \d+\) returned an object of type float",
        ),
        (grade_by_mistake, r"no attribute .worth. \(in grade_by_mistake, test_own_reward.py, line \d+\)"),
    ],
)
async def test_a_wrong_grade_given_from_python_is_raised_too(function: Any, told: str) -> None:
    shop = find_domain("shop")
    agent, user = find_model("oracle", "agent", shop), find_model("agenda", "user", shop)
    with pytest.raises(ConfigError, match=told):
        async for _ in rollout(shop, shop.tasks("train", 2), agent, user, RolloutSettings(grade=function)):
            pass


def test_a_recorded_reward_is_found_from_another_folder(
    mine: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(mine("told"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = CliRunner().invoke(main, ["score", "../runs/run", "--trust"])
    assert done.exit_code == 0, done.output
    assert "6 conversations, 6 graded as recorded" in done.output


def test_a_group_without_a_success_is_all_wrong_whatever_it_is_paid(mine: Written) -> None:
    evaluate(mine("shaped"))
    [first, *_] = read_held()
    assert 0 < first.value < 1
    group = Group(task=first.task, trajectories=(first,))
    assert measure([group])["all_wrong"] == 1.0
    assert first.reward is not None
    solved = first.model_copy(update={"reward": Reward(value=-0.5, success=True)})
    assert measure([Group(task=first.task, trajectories=(solved,))])["all_wrong"] == 0.0
    assert Played(solved, "", []).to_data()["success"] is True
