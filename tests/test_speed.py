"""The suite that measures speed: figures, parts in processes of their own, and what runs here in a moment."""

from __future__ import annotations

import json
from datetime import date
from functools import partial
from pathlib import Path

import pytest

from speed import growth, latency, reach, rules_learning, sample, step
from speed.__main__ import MEASUREMENTS, in_order, put, read_results, refuse_impossible, to_table
from speed.measure import ROOT, Options, Part, alternate, compare, join_versions, to_json

QUICK = Options(quick=True, repetitions=1)


def test_a_figure_tells_how_many_times_better_ours_is_and_how_far_from_the_bound() -> None:
    seconds = compare(
        "step", "s", [(2.0, 8.0), (4.0, 8.0), (3.0, 9.0)], "peer", bound=1.5, versions={"a": "1"}
    )
    assert (seconds.ours, seconds.theirs, seconds.ratio, seconds.low, seconds.high) == (3, 8, 3, 2, 4)
    assert seconds.away == 2
    rate = compare("sampling", "tokens/s", [(60.0, 20.0)], "peer", more_is_better=True, bound=120.0)
    assert (rate.ratio, rate.away) == (3, 2)
    row = to_table([seconds]).splitlines()[2]
    assert row == f"| step | 3 s | 8 | 3 (2–4) | peer | 1.5 (2) | 3 | {date.today().isoformat()} |"


def test_cases_stand_by_their_numbers() -> None:
    names = ["x, batch of 32", "x, batch of 8, bfloat16", "y, prefix 2,000", "x, batch of 8", "x, prefix 500"]
    figures = [compare(name, "s", [(1.0, 2.0)], "peer") for name in names]
    expected = [
        "x, batch of 8",
        "x, batch of 32",
        "x, prefix 500",
        "y, prefix 2,000",
        "x, batch of 8, bfloat16",
    ]
    assert [figure.name for figure in in_order(figures)] == expected


def test_the_page_shows_what_was_measured() -> None:
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    for figures in read_results(ROOT / "speed" / "results.json").values():
        for row in to_table(figures).splitlines()[2:]:
            assert row in page


def test_who_stops_keeps_what_was_measured_more_often() -> None:
    often, anew = (compare("step", "s", [(1.0, many)] * many, "peer") for many in (3, 2))
    assert put(anew, [often], finished=False) == [often]
    assert put(anew, [often]) == [anew]
    assert put(often, [anew], finished=False) == [often]
    other = compare("step", "s", [(1.0, 2.0)], "another")
    assert put(other, [often], finished=False) == [often, other]


def test_a_step_takes_at_least_what_its_products_and_its_weights_take() -> None:
    rates = {"flops": 1e9, "bytes": 1e9, "width": 4.0}
    times = step.find_least(100, 10, 2, rates)
    weights = 106.2e6 + 28.3e6
    read = 100 + 8 * 32  # the prompt once, an observation for each sibling
    assert times["generation"] == pytest.approx(2 * 106.2e6 * read / 1e9 + 10 * 2 * weights * 8 / 1e9)
    forward = 2 * (106.2e6 * (read + 80) + 28.3e6 * 80)
    assert times["update"] == pytest.approx(3 * forward / 1e9)
    slow = step.find_least(100, 10, 2, {**rates, "bytes": 1e8})  # weights arrive later than they are used
    assert slow["generation"] == pytest.approx(2 * 106.2e6 * read / 1e9 + 10 * weights * 4 / 1e8)


def test_sampling_brings_what_is_kept_of_conversations_too() -> None:
    case = (500, 2, 3, 10)
    read = 500 + 2 * (24 + 2 * 24)
    kept = 500 + 2 * (24 + 3 * 10 + 2 * 24) / 2
    expected = 2 * 106.2e6 * read / 1e12 + 30 * (134.5e6 + kept * 11520) * 4 / 1e9
    assert sample.find_least(case, {"flops": 1e12, "bytes": 1e9, "width": 4.0}) == pytest.approx(expected)


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    figure = compare("step", "s", [(2.0, 8.0)], "peer", versions={"trl": "1.16.0"})
    lines = [{"measurement": "step", **line} for line in json.loads(to_json([figure]))]
    file = tmp_path / "results.json"
    file.write_text(json.dumps(lines))
    assert read_results(file) == {"step": [figure]}
    assert {"name", "ours", "theirs", "unit", "ratio", "low", "high", "against", "versions"} <= lines[
        0
    ].keys()


def test_versions_that_differ_carry_the_name_of_the_peer() -> None:
    ours = {"versions": {"python": "3.11.7", "torch": "2.13"}}
    theirs = {"versions": {"python": "3.11.7", "torch": "2.12", "trl": "1.16"}}
    expected = {"python": "3.11.7", "torch": "2.13", "torch of TRL": "2.12", "trl": "1.16"}
    assert join_versions(ours, theirs, "TRL") == expected


def test_every_measurement_is_a_script_and_named_on_the_page() -> None:
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    for name in MEASUREMENTS:
        assert (ROOT / "speed" / f"{name}.py").is_file()
        assert f"`speed/{name}.py`" in page


def test_a_part_that_fails_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    broken = partial(Part, "episodes", "tau2-bench", domain="retail", checkout="/none", count=1)
    with pytest.raises(SystemExit, match=r"episodes:tau2-bench failed with status 1"):
        next(alternate([broken], 1))
    assert "Error" in capfd.readouterr().err


def test_a_part_that_ended_while_it_waited_is_named(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho '> {}'\nexit 3\n")
    script.chmod(0o755)
    part = Part("step", "TRL", str(script))
    part.process.wait()
    with pytest.raises(SystemExit, match=r"step:TRL failed with status 3"):
        part.run()


@pytest.mark.speed
def test_slow_users_are_waited_for_side_by_side() -> None:
    figures = list(latency.measure(QUICK))
    assert [figure.repetitions for figure in figures] == [1, 1]
    assert (figures[1].ratio or 0) > 2  # thirty-two conversations are not held one after the other


@pytest.mark.speed
def test_growth_is_told_as_a_slope() -> None:
    figures = list(growth.measure(QUICK))
    assert [figure.unit for figure in figures] == ["slope"] * 4
    assert growth.find_slope([(10, 1.0), (100, 10.0), (1000, 100.0)]) == pytest.approx(1.0)


def write_demo(folder: Path, scores: list[float]) -> None:
    model = folder / "rl" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"\0" * 400)
    (folder / "summary.json").write_text(
        json.dumps({"seed": 0, "after_rl": {"pass^1": scores[-1]}, "seconds": {"sft": 100.0, "total": 999.0}})
    )
    checks = [{"step": 2 * place, "kind": "eval", "pass^1": score} for place, score in enumerate(scores)]
    (folder / "rl" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in checks))
    phases = [
        {"step": 0, "evaluate": 1.0},
        *({"step": number, "rollout": 5.0, "update": 2.0} for number in range(1, 5)),
    ]
    (folder / "rl" / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in phases))
    turns = [{"side": "agent", "tokens": {"prompt": [1, 2], "reply": [3]}}, {"side": "user"}]
    (folder / "rl" / "trajectories").mkdir()
    for number in range(1, 5):
        file = folder / "rl" / "trajectories" / f"step-{number:06d}.jsonl"
        file.write_text(json.dumps({"turns": turns}) + "\n")


def test_seconds_to_the_goal_are_read_from_a_demonstration(tmp_path: Path) -> None:
    write_demo(tmp_path / "one", [0.5, 0.86, 0.9])
    write_demo(tmp_path / "two", [0.5, 0.6, 0.7])
    (figure,) = reach.measure(Options(demo=str(tmp_path)))
    assert figure.ours == 100 + 1 + (2 + 4) / 2 * 7  # the second one counts with all four steps
    assert figure.note == "1 of 2 seeds missed it"
    assert "dev tasks (1 of 2 seeds missed it) |" in to_table([figure])
    assert reach.count_flops(tmp_path / "one" / "rl", 2) == 8 * 100 * 2 * 3


def test_what_is_faster_than_the_machine_is_refused() -> None:
    whole = compare("step", "s", [(2.0, 9.0)], "peer", bound=1.9)
    refuse_impossible(whole)
    half = compare("step", "s", [(1.0, 9.0)], "peer", bound=1.9)
    with pytest.raises(SystemExit, match=r"step: ours is 1\.90 times better than its bound"):
        refuse_impossible(half)


def test_the_curves_of_learning_with_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, broken in (("sft", 0), ("report", 6), ("required", 1)):
        step = {
            "conversations": 8,
            "outcome": 0.5,
            "compliant": 1 - broken / 8,
            "breaches": {"confirm": broken, "civil": 1},
        }
        for run, file, content in (
            (name, "metrics.jsonl", step | {"step": 1}),
            (f"test-{name}", "result.json", step),
        ):
            (tmp_path / run).mkdir()
            figures = {"pass^1": 0.25, "pass^1_low": 0.1, "pass^1_high": 0.4, "turns": 12.0}
            (tmp_path / run / file).write_text(json.dumps(content | figures) + "\n")
    assert rules_learning.find_rules({0: tmp_path}) == ["confirm", "civil"]
    rules_learning.show_tables({0: tmp_path})
    told = capsys.readouterr().out
    assert "| 0 | report | 50.0% | 25.0% | 25.0% (10%–40%) | 12.0 |" in told
    assert "| confirm | 0.0% | 75.0% | 12.5% |" in told
    rules_learning.draw({0: tmp_path}, tmp_path / "rules.png")
    assert (tmp_path / "rules.png").read_bytes().startswith(b"\x89PNG")
