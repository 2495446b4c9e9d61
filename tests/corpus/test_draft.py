"""A brief becomes a scenario folder, conversations with simulated tools, verdicts and a corpus: end to end
over a real endpoint whose models are scripted, and often wrong at first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import library as scripted
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from trialogue import ConfigError, DomainError, Trajectory, find_domain
from trialogue.cli.main import main
from trialogue.config import EvalConfig, RunSettings, SftConfig
from trialogue.corpus.verify import verify
from trialogue.learn.sft import sft, to_played
from trialogue.run import read_lines, read_trajectories
from trialogue.score.check import check
from trialogue.score.evaluate import evaluate
from trialogue.score.parties import open_parties
from trialogue.world.simulated import Simulated, SimulatedDomain, read_answer, read_scenario


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Any]:
    with scripted.serve() as server:
        yield server


@pytest.fixture(scope="module")
def library(endpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `draft` writes."""
    above = tmp_path_factory.mktemp("drafts")
    (above / "brief.md").write_text("The desk of a public library. Members extend their loans.\n")
    done = run(endpoint, "draft", str(above / "library"), "--brief", str(above / "brief.md"), "--tasks", "8")
    assert done.exit_code == 0, done.stderr
    assert "tables: it is not a JSON object" in done.stderr
    assert "tables.loans.fields.due.type: Input should be 'text'" in done.stderr
    assert "tables: ok after 2 repairs" in done.stderr
    assert "tools: no tool changes anything; at least one has to write" in done.stderr
    assert "task 2: the set-up fails" in done.stderr
    return above / "library"


def run(endpoint: Any, *words: str) -> Any:
    keys = [f"{who}.base_url={endpoint.url}" for who in ("agent", "user", "judge", "simulator")]
    extra = (
        [f"drafter.base_url={endpoint.url}", "drafter.model=openai:drafter"] if words[0] == "draft" else keys
    )
    return CliRunner().invoke(main, [*words, *extra], catch_exceptions=False)


@pytest.fixture(scope="module")
def corpus(endpoint: Any, library: Path) -> Path:
    """What `synthesize` makes of it."""
    done = run(
        endpoint,
        "synthesize",
        str(library),
        "--agent=openai:agent",
        "--user=openai:user",
        "--judge=openai:judge",
        "--count=7",
        "simulator.model=openai:tools",
        "agent.price=[1.0, 10.0]",
        "synthesize.balance=0",
        "synthesize.validation=0.3",
        f"run.directory={library.parent}",
        "run.name=corpus",
    )
    assert done.exit_code == 0, done.output + done.stderr
    return library.parent / "corpus"


def test_the_folder_can_be_reviewed_and_checked(library: Path) -> None:
    files = sorted(file.name for file in library.iterdir())
    assert files == ["README.md", "brief.md", "policy.md", "scenario.json", "tasks.jsonl"]
    domain = find_domain(str(library))
    assert domain.source == "simulated"
    assert list(domain.database.tools) == ["get_member", "list_loans", "extend_loan"]
    assert domain.database.tools["extend_loan"].parameters["required"] == ["loan_id", "due"]
    checked = check(domain)
    assert checked.ok, checked.problems
    assert checked.tasks == 8
    done = CliRunner().invoke(main, ["check", str(library)])
    assert done.exit_code == 0, done.output


def test_conversations_are_held_verified_and_judged(corpus: Path) -> None:
    accepted = list(read_trajectories(corpus / "accepted.jsonl"))
    rejected = list(read_trajectories(corpus / "rejected.jsonl"))
    assert (len(accepted), len(rejected)) == (7, 1)
    assert rejected[0].task.id == "task-4"
    assert rejected[0].meta["verdicts"][-1] == {
        "stage": "judge",
        "accepted": False,
        "reasons": ["natural"],
        "note": "stiff",
        "by": "openai:judge",
        "scores": {"faithful": 5, "policy": 5, "complete": 5, "user": 5, "natural": 2},
    }
    result = json.loads((corpus / "result.json").read_text())
    assert result["reasons"] == {"judge: natural": 1}
    assert result["source"] == "simulated"
    assert result["cost"] > 0
    won = next(item for item in accepted if item.task.family == "extend")
    (changes,) = [turn.changes for turn in won.turns if turn.changes]
    assert [set(record) for record in changes["loans"].values()] == [{"due", "state"}]
    assert won.value == 1
    origin = won.meta["provenance"]
    assert (origin["tools"], origin["judge"]) == ("openai:tools", "openai:judge")
    assert origin["spent"]["tools"]["calls"] == 4  # the answer that had to be repaired is paid for too
    for split in ("train", "validation"):
        rows = parquet.read_table(corpus / f"{split}.parquet").to_pylist()
        assert all(row["messages"][0]["role"] == "system" for row in rows)


def test_what_it_cost_is_in_the_ledger(corpus: Path) -> None:
    ledger = {entry["role"]: entry for entry in json.loads((corpus / "result.json").read_text())["ledger"]}
    assert set(ledger) == {"agent", "user", "judge", "tools"}
    everything = [
        *read_trajectories(corpus / "accepted.jsonl"),
        *read_trajectories(corpus / "rejected.jsonl"),
    ]
    for role in ("agent", "user", "tools"):
        spent = [item.meta["provenance"]["spent"][role] for item in everything]
        assert sum(each["calls"] for each in spent) == ledger[role]["calls"]
        assert sum(each["prompt"] for each in spent) == ledger[role]["prompt"]
    assert ledger["judge"]["calls"] == 9  # one of them was no judgement
    assert "| judge | judge | 9 | 900 | 90 |" in (corpus / "report.md").read_text()
    cost = sum(item.meta["provenance"]["cost"] for item in everything)
    assert cost == pytest.approx(ledger["agent"]["usd"])  # the only one with a price


def test_a_budget_stops_it_and_more_lets_it_go_on(endpoint: Any, library: Path, corpus: Path) -> None:
    words = [
        *("synthesize", str(library), "--agent=openai:agent", "--user=openai:user", "--judge=openai:judge"),
        *("--count=7", "simulator.model=openai:tools", "synthesize.balance=0", "synthesize.validation=0.3"),
        *("limits.reply_tokens=100", "rollout.concurrency=2", f"run.directory={library.parent}"),
    ]
    spent = sum(
        entry["prompt"] + entry["completion"]
        for entry in json.loads((corpus / "result.json").read_text())["ledger"]
    )
    cut = run(endpoint, *words, "run.name=cut", f"budget.tokens={spent // 2 + 8000}")
    assert cut.exit_code == 1
    assert "the budget is spent" in cut.stderr
    place = library.parent / "cut"
    assert json.loads((place / "run.json").read_text())["state"] == "stopped"
    some = len(list(read_trajectories(place / "trajectories" / "synthesize.jsonl")))
    assert 0 < some < 8
    lines = [json.loads(line) for line in (place / "ledger.jsonl").read_text().splitlines()]
    assert sum(line["prompt"] + line["completion"] for line in lines) <= spent // 2 + 8000
    more = CliRunner().invoke(
        main, ["synthesize", "--resume", str(place), "budget.tokens=10000000"], catch_exceptions=False
    )
    assert more.exit_code == 0, more.output + more.stderr
    assert read_said(corpus) == read_said(place)


def read_said(corpus: Path) -> list[list[str]]:
    """What was said and answered in each accepted conversation."""
    accepted = read_trajectories(corpus / "accepted.jsonl")
    return [[turn.message.content for turn in item.turns] for item in accepted]


def extended(corpus: Path) -> Trajectory:
    items = read_trajectories(corpus / "accepted.jsonl")
    return next(item for item in items if item.task.family == "extend")


def test_what_simulated_tools_make_up_is_found(library: Path, corpus: Path) -> None:
    domain = find_domain(str(library))
    item = extended(corpus)
    assert verify(item, domain) == []
    turns = list(item.turns)
    place = next(number for number, turn in enumerate(turns) if turn.message.role == "tool")
    invented = turns[place].message.content.replace("Ada", "M777 Ada")
    turns[place] = turns[place].model_copy(
        update={"message": turns[place].message.model_copy(update={"content": invented})}
    )
    found = verify(item.model_copy(update={"turns": tuple(turns)}), domain)
    assert any(flaw.check == "simulation" and "M777" in flaw.text for flaw in found)
    turns = [turn.model_copy(update={"changes": {"loans": {"L1": None}}}) for turn in item.turns]
    found = verify(item.model_copy(update={"turns": tuple(turns)}), domain)
    assert any(flaw.check == "simulation" and "no 'L1' to remove" in flaw.text for flaw in found)


async def test_a_scenario_can_be_evaluated_as_any_domain(
    endpoint: Any, library: Path, tmp_path: Path
) -> None:
    speaker = {"base_url": endpoint.url}
    config = EvalConfig.model_validate(
        {
            "domain": str(library),
            "agent": {"model": "openai:agent", **speaker},
            "user": {"model": "openai:user", **speaker},
            "simulator": {"model": "openai:tools", **speaker},
            "tasks": {"split": "train", "count": 2},
            "run": {"directory": str(tmp_path), "name": "one"},
        }
    )
    result = await evaluate(config)
    assert result["pass^1"] == 1.0
    nobody = {"simulator": EvalConfig().simulator, "run": RunSettings(directory=str(tmp_path), name="two")}
    with pytest.raises(ConfigError, match="are simulated; name the model"):
        await evaluate(config.model_copy(update=nobody))
    learned = SftConfig.model_validate(
        {
            **config.model_dump(include={"domain", "user", "simulator"}),
            "sft": {
                "examples": str(tmp_path / "one"),
                "validation": 0.0,
                "eval_tasks": 1,
                "eval_split": "train",
            },
            "limits": {"reply_tokens": 8, "context_tokens": 2048},
            "tasks": {"split": "train"},
            "run": {"directory": str(tmp_path), "name": "learned"},
        }
    )
    lines = [line for _, line in read_lines(await sft(learned) / "metrics.jsonl")]
    assert [line["step"] for line in lines if line.get("kind") == "eval"] == [0, 1]
    unplayed = to_played(learned).model_copy(update=nobody)
    assert open_parties(unplayed, is_played=False)[0].tool_model is None


def test_a_draft_that_stays_wrong_is_refused(tmp_path: Path) -> None:
    (tmp_path / "brief.md").write_text("A zoo.")
    with scripted.serve(drafter=lambda request, asked: '{"tables": 3}') as server:
        done = run(server, "draft", str(tmp_path / "zoo"), "--brief", str(tmp_path / "brief.md"), "repairs=1")
    assert done.exit_code == 1
    assert "trialogue: tables: refused after 1 repairs: summary: Field required" in done.stderr
    assert not (tmp_path / "zoo").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tables": {}}, "tables: Dictionary should have at least 1 item"),
        ({"tools": [scripted.TOOLS[0]] * 2}, "there are two tools get_member"),
        ({"tables": {"Loans": scripted.TABLES["tables"]["loans"]}}, "'Loans' is not a valid name"),
        ({"tables": {"digest": scripted.TABLES["tables"]["loans"]}}, "'digest' is reserved"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
    ],
)
def test_a_scenario_is_checked_field_by_field(change: dict[str, Any], told: str) -> None:
    data = {**scripted.TABLES, "tools": scripted.TOOLS, **change}
    with pytest.raises(DomainError, match=told):
        read_scenario(json.dumps(data), "scenario.json")


@pytest.mark.parametrize(
    ("tool", "answer", "told"),
    [
        ("extend_loan", "I have extended it.", "not a JSON object"),
        ("extend_loan", '{"done": true}', 'neither "result" nor "error"'),
        ("extend_loan", '{"result": 1, "changes": {"cars": {}}}', "there is no table 'cars'"),
        (
            "extend_loan",
            '{"result": 1, "changes": {"loans": {"L501": {"state": "lost"}}}}',
            "loans.L501.state",
        ),
        ("extend_loan", '{"result": 1, "changes": {"loans": {"L9": {"state": "open"}}}}', "Field required"),
        ("extend_loan", '{"error": "no", "changes": {"loans": {"L501": null}}}', "refuses changes nothing"),
        ("list_loans", '{"result": 1, "changes": {"loans": {"L501": null}}}', "list_loans only reads"),
    ],
)
def test_what_a_simulated_tool_may_not_do(tool: str, answer: str, told: str, library: Path) -> None:
    domain = find_domain(str(library))
    assert isinstance(domain, SimulatedDomain)
    environment = domain.open(domain.tasks("train")[0])
    database = environment.database
    assert isinstance(database, Simulated)
    before = database.digest()
    with pytest.raises(DomainError, match=told):
        read_answer(answer, database.tools[tool], database)
    assert database.digest() == before


def test_records_with_keys_nobody_knows_are_recognised(library: Path) -> None:
    domain = find_domain(str(library))
    database = domain.open(domain.tasks("train")[0]).database
    assert isinstance(database, Simulated)
    wanted = {"members": {"*": {"name": "New"}}}
    assert not database.is_reached(wanted)
    database.lay({"members": {"M5": {"member_id": "M5", "name": "New"}}})
    assert database.is_reached(wanted)
    database.lay({"loans": {"L900": None}})
    assert not database.is_reached(wanted)
