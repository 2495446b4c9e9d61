"""Runs that begin at the same moment: each takes a name of its own, and none is overwritten or lost."""

from __future__ import annotations

import gc
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from trialogue.config import EvalConfig, RunSettings
from trialogue.errors import RunError
from trialogue.run import Run, read_about, set_aside

AT_ONCE = 20


def create(folder: Path, name: str | None = None) -> str:
    """Create a run and close it; the name it got, or what was said."""
    try:
        run = Run.create(RunSettings(directory=str(folder), name=name), "eval", "shop", EvalConfig(), 0)
    except RunError as error:
        return f"refused: {error}"
    run.close("finished")
    return run.path.name


def begin_together(work: Callable[[], str]) -> list[str]:
    """The answers of processes that all begin in the same instant."""
    gc.collect()
    gc.freeze()  # else each process looks for garbage in all that the tests have loaded, and so copies it
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(AT_ONCE), context.SimpleQueue()

    def run() -> None:
        barrier.wait()
        try:
            answers.put(work())
        except Exception as error:  # noqa: BLE001 - the test shows what it was
            answers.put(f"{type(error).__name__}: {error}")

    processes = [context.Process(target=run) for _ in range(AT_ONCE)]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join(30)
    gc.unfreeze()
    return found


def list_runs(folder: Path) -> dict[str, Any]:
    assert not [item for item in folder.iterdir() if item.name.startswith(".")]
    return {item.name: read_about(item)["state"] for item in folder.iterdir()}


def test_processes_that_begin_together_each_get_a_name(tmp_path: Path) -> None:
    names = begin_together(lambda: create(tmp_path))
    assert len(set(names)) == AT_ONCE, names
    assert list_runs(tmp_path) == dict.fromkeys(names, "finished")


def test_threads_that_begin_together_each_get_a_name(tmp_path: Path) -> None:
    barrier = Barrier(AT_ONCE)

    def work(_: int) -> str:
        barrier.wait()
        return create(tmp_path)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        names = list(pool.map(work, range(AT_ONCE)))
    assert len(set(names)) == AT_ONCE, names
    assert list_runs(tmp_path) == dict.fromkeys(names, "finished")


def test_of_many_who_want_one_name_one_gets_it_and_the_others_are_told(tmp_path: Path) -> None:
    answers = begin_together(lambda: create(tmp_path, "mine"))
    assert answers.count("mine") == 1, answers
    path = tmp_path / "mine"
    told = f"refused: {path} exists; resume it with --resume {path}, or choose another run.name"
    assert {answer for answer in answers if answer != "mine"} == {told}
    assert list_runs(tmp_path) == {"mine": "finished"}


def test_folders_set_aside_together_are_all_kept(tmp_path: Path) -> None:
    def work() -> str:
        own = tmp_path / "demo"
        aside = set_aside(own)
        if aside is None:
            return ""
        return json.dumps([aside.name, (aside / "note").read_text(encoding="utf-8")])

    for number in range(3):
        (tmp_path / "demo").mkdir()
        (tmp_path / "demo" / "note").write_text(f"{number}", encoding="utf-8")
        answers = [answer for answer in begin_together(work) if answer]
        assert answers == [json.dumps([f"demo-{number + 1}", f"{number}"])]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["demo-1", "demo-2", "demo-3"]


def test_a_folder_in_which_a_run_is_being_written_is_not_set_aside(tmp_path: Path) -> None:
    settings = RunSettings(directory=str(tmp_path / "demo"), name="rl")
    run = Run.create(settings, "eval", "shop", EvalConfig(), 0)
    with pytest.raises(RunError, match=r"another process \(process \d+\) is writing to .*demo/rl"):
        set_aside(tmp_path / "demo")
    run.close("stopped")
    assert set_aside(tmp_path / "demo") == tmp_path / "demo-1"
