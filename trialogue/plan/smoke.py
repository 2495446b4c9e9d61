"""A few minutes of the real thing on whatever is there, and a report worth sending back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trialogue.config import PlanConfig, load_config
from trialogue.durable import write, write_json
from trialogue.engine.hardware import find_gpu
from trialogue.plan.machine import Finding
from trialogue.plan.plan import make_plan
from trialogue.records import read_lines
from trialogue.run import find_versions, read_config
from trialogue.secrets import redact

Watch = Callable[[int, dict[str, Any]], None]


async def smoke(
    directory: Path, minutes: float, findings: Sequence[Finding], tell: Callable[[str], None], watch: Watch
) -> dict[str, Any]:
    """Cold start, reinforcement learning and evaluation of the built-in shop, shortened to some minutes.
    Writes `report.md` and `report.json` to the directory."""
    from trialogue.learn.demo import Size, demonstrate

    summary = await demonstrate(directory, 0, tell, watch, Size.fit(minutes))
    report = {
        "versions": find_versions(),
        "findings": [{name: getattr(one, name) for name in ("name", "state", "found")} for one in findings],
        "summary": summary,
        "step": compare_step(directory / "rl", summary["seconds"]["rl"]),
    }
    write_json(directory / "report.json", report)
    write(directory / "report.md", redact(to_text(report)))
    return report


def compare_step(run: Path, wall: float) -> dict[str, float]:
    """The seconds of a step, evaluations included: as measured, and as `plan` predicts them from the same
    conversations."""
    from trialogue.config import TrainConfig

    lines = [line for _, line in read_lines(run / "metrics.jsonl")]
    steps = [line for line in lines if "kind" not in line]
    known = read_config(TrainConfig, run).model_dump(mode="json")
    usual = load_config(
        PlanConfig, None, ["plan.gpus=1", "plan.gpu=here", f"plan.like={json.dumps(str(run))}"]
    )
    config = PlanConfig.model_validate({**known, "plan": usual.plan.model_dump()})
    row = make_plan(config, table=False).rows[0]
    here = find_gpu("here")
    return {
        "measured_seconds": wall / max(1, len(steps)),
        "predicted_seconds": row.hours * 3600 / max(1, len(steps)),
        "steps": float(len(steps)),
        "tflops": here.tflops,
        "bandwidth": here.bandwidth,
    }


def to_text(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    step, summary = report["step"], report["summary"]
    before, after = summary["after_sft"]["pass^1"], summary["after_rl"]["pass^1"]
    lines = ["# trialogue doctor --smoke", ""]
    lines += [f"- {name} {version}" for name, version in report["versions"].items()]
    lines += ["", "| | |", "| --- | --- |"]
    lines += [f"| {one['state']} {one['name']} | {one['found']} |" for one in report["findings"]]
    lines += ["", "| Seconds | |", "| --- | ---: |"]
    lines += [f"| {name} | {seconds} |" for name, seconds in summary["seconds"].items()]
    lines += [
        f"| a step, measured | {step['measured_seconds']:.1f} |",
        f"| a step, predicted | {step['predicted_seconds']:.1f} |",
        "",
        f"Test tasks solved: {before:.0%} after the cold start, {after:.0%} at the end.",
        "",
    ]
    return "\n".join(lines)
