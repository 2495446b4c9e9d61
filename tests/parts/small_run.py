"""A small run for tests that look at one: a real evaluation of the starter domain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trialogue.config import EvalConfig, load_config
from trialogue.score.evaluate import evaluate
from trialogue.world.scaffold import write_domain


async def make_run(
    folder: Path, *settings: str, domain: str | None = None, **options: Any
) -> tuple[Path, dict[str, Any]]:
    """Evaluate the oracle in `folder/runs`: the run and its result. Default domain: all tasks of a bakery."""
    if domain is None:
        if not (folder / "bakery").exists():
            write_domain(folder / "bakery")
        domain = str(folder / "bakery")
        settings = ('tasks.split="all"', *settings)
    known = [f"domain={json.dumps(domain)}", f"run.directory={json.dumps(str(folder / 'runs'))}"]
    result = await evaluate(load_config(EvalConfig, None, [*known, *settings]), **options)
    return Path(result["run"]), result
