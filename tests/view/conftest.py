"""Real runs, made once for all tests that look at them."""

import asyncio
from pathlib import Path

import pytest
from small_run import make_run


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one that won everything, one that lost everything."""
    folder = tmp_path_factory.mktemp("view")
    asyncio.run(make_run(folder, "run.name=good", "tasks.trials=2"))
    asyncio.run(make_run(folder, "run.name=bad", "agent.model=naive"))
    return folder
