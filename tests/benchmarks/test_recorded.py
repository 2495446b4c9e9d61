"""Grading what was recorded elsewhere, finding contamination, and both from the command line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from command import run_verb

from trialogue.benchmarks.folder import find_version, read_json_lines
from trialogue.benchmarks.recorded import score_recorded
from trialogue.errors import ConfigError
from trialogue.score.contamination import find_contamination
from trialogue.world.find import find_domain

NAME = "gpt-4.1__telecom-nouser"


def run(*arguments: str) -> Any:
    done = run_verb(Path.cwd(), *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_golden_lines_are_graded(data: Path) -> None:
    path = data / "tau2-golden" / f"{NAME}.jsonl.gz"
    graded = score_recorded(path, "tau2:telecom", str(data))
    for row, record in zip(graded, read_json_lines(path), strict=True):
        assert row.reward == record["expected"]["reward"]
        assert row.reward_breakdown == record["expected"]["reward_breakdown"]
        assert (row.initial_db_hash, row.final_db_hash) == (
            record["initial_db_hash"],
            record["final_db_hash"],
        )
        assert row.more["final_user_db_hash"] == record["final_user_db_hash"]
        assert row.tool_mismatches == []
        assert row.to_line().startswith(row.id)


def write_results(data: Path, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The same conversations as a results file of the benchmark's own."""
    records = read_json_lines(data / "tau2-golden" / "scripted_mock.jsonl.gz")[:40]
    tasks = json.loads(gzip.decompress((data / "tau2-golden" / "scripted_tasks.json.gz").read_bytes()))
    by_id: dict[str, Any] = {}
    kept = [
        record
        for record in records
        if by_id.setdefault(record["task_id"], record["task_ref"]) == record["task_ref"]
    ]
    simulations = [
        {key: record[key] for key in ("id", "task_id", "termination_reason", "messages")} for record in kept
    ]
    shape = {
        "info": {"agent_info": {"implementation": "llm_agent"}},
        "tasks": [tasks[reference] for reference in by_id.values()],
        "simulations": simulations,
    }
    path = folder / "results.json"
    path.write_text(json.dumps(shape))
    return path, kept


def test_a_results_file_is_graded(data: Path, tmp_path: Path) -> None:
    path, records = write_results(data, tmp_path)
    graded = score_recorded(path, "tau2:mock", str(data))
    assert [row.reward for row in graded] == [record["expected"]["reward"] for record in records]
    assert [row.db_match for row in graded] == [record["expected"]["db_match"] for record in records]


def test_what_comes_out_different_is_told(data: Path, tmp_path: Path) -> None:
    path, _ = write_results(data, tmp_path)
    shape = json.loads(path.read_text())
    answers = [m for item in shape["simulations"] for m in item["messages"] if m["role"] == "tool"]
    answers[0]["content"] = "something else"
    path.write_text(json.dumps(shape))
    [row] = [row for row in score_recorded(path, "tau2:mock", str(data)) if row.tool_mismatches]
    assert row.tool_mismatches[0]["recorded"] == "something else"
    assert "recorded 'something else', now" in row.to_line()


def test_an_unknown_benchmark_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"known are .*tau"):
        score_recorded(tmp_path / "x.jsonl", "nothing:here")


def test_benchmarks_are_found_by_name(data: Path, announced: Path) -> None:
    assert find_domain("tau2:retail@v0.2", str(data)).reference == "tau2:retail@v0.2"
    assert find_domain("tau:airline", str(data)).name == "tau:airline"
    with pytest.raises(ConfigError, match="allowed are"):
        find_domain("tau2:nonsense", str(data))


@pytest.mark.parametrize(("name", "shared", "tasks"), [("retail", 108, 114), ("airline", 41, 50)])
def test_the_first_benchmark_gives_the_second_away(
    name: str, shared: int, tasks: int, data: Path, announced: Path
) -> None:
    found = find_contamination(f"tau:{name}/test", f"tau2:{name}/base", str(data))
    assert (len(found.pairs), found.tasks) == (shared, tasks)
    with pytest.raises(ConfigError, match="DOMAIN/SPLIT"):
        find_contamination("tau:retail", "tau2:retail/base", str(data))


def test_the_command_line_grades_and_compares(data: Path, tmp_path: Path, announced: Path) -> None:
    path, records = write_results(data, tmp_path)
    rows = run("score", str(path), "--benchmark", "tau2:mock", "--data", str(data))
    assert [row["reward"] for row in rows] == [record["expected"]["reward"] for record in records]
    keys = {
        "id",
        "reward",
        "reward_breakdown",
        "db_match",
        "initial_db_hash",
        "final_db_hash",
        "tool_mismatches",
    }
    assert keys <= set(rows[0])
    found = run("check", "--contamination", "tau2:mock/base", "tau2:mock/base", "--data", str(data))
    assert found["shared"] == found["tasks"] == 10


def test_an_evaluation_says_what_it_was(data: Path, tmp_path: Path, announced: Path) -> None:
    script = tmp_path / "user.jsonl"
    script.write_text('"Hello."\n"###STOP###"\n')
    result = run(
        "eval",
        "tau2:airline@v0.2",
        "--data",
        str(data),
        "--agent",
        "naive",
        "--user",
        f"scripted:{script}",
        "--tasks",
        "4",
        f"run.directory={json.dumps(str(tmp_path / 'runs'))}",
    )
    assert result["conversations"] == 4
    assert result["notes"]["generation"] == "v0.2"
    assert result["notes"]["wording"].startswith("official")


def test_the_version_of_a_package_or_checkout_is_found(tmp_path: Path) -> None:
    assert find_version(tmp_path).startswith("unknown")
    inside = tmp_path / "checkout" / "data" / "tau2" / "domains" / "retail"
    inside.mkdir(parents=True)
    (tmp_path / "checkout" / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1.2.3"\n')
    assert find_version(inside) == "1.2.3"
    git = tmp_path / "checkout" / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# packed\n{'ab' * 20} refs/heads/main\n")
    assert find_version(inside) == "1.2.3, commit abababababab"
    (git / "refs" / "heads" / "main").write_text("cd" * 20 + "\n")
    assert find_version(inside) == "1.2.3, commit cdcdcdcdcdcd"
    (git / "HEAD").write_text("ef" * 20 + "\n")
    assert find_version(inside) == "1.2.3, commit efefefefefef"
    package = tmp_path / "site" / "bfcl_eval"
    package.mkdir(parents=True)
    (tmp_path / "site" / "bfcl_eval-2025.8.6.dist-info").mkdir()
    assert find_version(package) == "bfcl_eval 2025.8.6"
