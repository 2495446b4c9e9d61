"""What was compiled is kept in the user's cache; what is whole and the user's own is taken from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trialogue import durable
from trialogue.engine.cpu import compiled


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trialogue" / "kernels"


@pytest.fixture
def compile_once(cache, tmp_path, monkeypatch) -> Callable[[], bool]:
    """Ask for a source, and tell whether it was compiled for that."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    made, script = tmp_path / "made", tmp_path / "cc"
    script.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) touch {made};; esac\nexec {compiler} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))

    def ask() -> bool:
        made.unlink(missing_ok=True)
        assert compiled.compile_source("logits.c") is not None
        return made.exists()

    return ask


def test_what_was_compiled_is_kept(compile_once, cache, monkeypatch):
    assert [compile_once(), compile_once()] == [True, False]
    (library,) = cache.iterdir()
    assert library.stat().st_mode & 0o077 == 0
    assert cache.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-O2"))
    assert compile_once()
    assert len(list(cache.iterdir())) == 2


def test_what_nobody_loaded_for_a_month_goes(compile_once, cache, monkeypatch):
    compile_once()
    (first,) = cache.iterdir()
    other = cache / "decode-0123.so"
    other.write_bytes(b"of another source")
    for path in (first, other):
        os.utime(path, (0, 0))
    assert not compile_once()  # loaded, it counts as new
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-O2"))
    assert compile_once()
    assert len(list(cache.iterdir())) == 3
    os.utime(first, (0, 0))
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-O1"))
    assert compile_once()
    assert other.exists()
    assert not first.exists()
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("left", [0, 10, 4096, -1])
def test_a_library_that_is_not_whole_is_made_anew(left, compile_once, cache):
    compile_once()
    (library,) = cache.iterdir()
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content[:left])
    library.chmod(0o600)
    assert compile_once()
    (library,) = cache.iterdir()
    assert library.read_bytes() == content


def test_what_somebody_else_can_write_is_not_loaded(compile_once, cache):
    compile_once()
    (library,) = cache.iterdir()
    for path, mode in ((library, 0o622), (library, 0o600), (cache, 0o777), (cache, 0o700)):
        path.chmod(mode)
        assert compile_once() == bool(mode & 0o022)


def test_a_cache_nobody_can_write_is_done_without(compile_once, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert [compile_once(), compile_once()] == [True, True]


def test_a_full_disk_leaves_nothing_behind(cache, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    compiled.store_library(b"content", cache / "one.so")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("named", ["", "relative/folder"])
def test_a_cache_is_never_below_the_working_folder(named, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert durable.find_cache_folder() == Path.home() / ".cache" / "trialogue"


def test_who_has_no_home_has_no_cache(compile_once, monkeypatch):
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)
    assert [compile_once(), compile_once()] == [True, False]  # named, it is not looked for
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert durable.find_cache_folder() is None
    assert [compile_once(), compile_once()] == [True, True]


def test_work_is_shared_whole(monkeypatch):
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for count in (0, 1, 2, 7):
            done: list[int] = []
            compiled.share(lambda _, first, last, done=done: done.extend(range(first, last)) or 0, count)
            assert sorted(done) == list(range(count))


def test_two_processes_at_once_keep_one_library(cache, tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    code = "from trialogue.engine.cpu.compiled import compile_source; assert compile_source('logits.c')"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    runs = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [run.wait() for run in runs] == [0, 0]
    (library,) = cache.iterdir()
    assert compiled.is_trusted_library(library)
