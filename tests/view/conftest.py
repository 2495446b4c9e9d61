"""Real runs, made once for all tests that look at them."""

import json
from pathlib import Path
from typing import Any

import pytest

from trialogue.config import EvalConfig, load_config
from trialogue.score.evaluate import evaluate
from trialogue.world.scaffold import write_domain


async def hold(folder: Path, *settings: str) -> dict[str, Any]:
    """An evaluation of the starter domain in `folder/runs`."""
    if not (folder / "bakery").exists():
        write_domain(folder / "bakery")
    known = [
        f"domain={json.dumps(str(folder / 'bakery'))}",
        f"run.directory={json.dumps(str(folder / 'runs'))}",
        'tasks.split="all"',
    ]
    return await evaluate(load_config(EvalConfig, None, [*known, *settings]))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one that won everything, one that lost everything."""
    import asyncio

    folder = tmp_path_factory.mktemp("view")
    asyncio.run(hold(folder, "run.name=good", "tasks.trials=2"))
    asyncio.run(hold(folder, "run.name=bad", "agent.model=naive"))
    return folder
