"""Files that survive: whole or not at all, damage recognised, torn tails cut off, one writer."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trialogue.config import EvalConfig, RunSettings
from trialogue.corpus.review import Verdict, Verdicts
from trialogue.durable import append, find_damage, mend, put_back, put_in_place, seal, write
from trialogue.errors import RunError
from trialogue.run import Run


@contextmanager
def at_most(size: int) -> Generator[None]:
    """No file may grow beyond this: the system refuses as it does when a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_that_do_not_fit_leave_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    append(file, '{"a": 1}\n')
    with at_most(100), pytest.raises(RunError, match=r"no room left on the disk to write .*log.jsonl"):
        append(file, json.dumps({"b": "x" * 200}) + "\n")
    assert file.read_text(encoding="utf-8") == '{"a": 1}\n'
    append(file, '{"c": 2}\n')
    assert file.read_text(encoding="utf-8") == '{"a": 1}\n{"c": 2}\n'


def test_a_verdict_that_does_not_fit_is_not_given(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path)
    verdicts.add(Verdict(id="a", stage="review", accepted=True))
    before = verdicts.file.read_bytes()
    with at_most(100), pytest.raises(RunError, match="no room left"):
        verdicts.add(Verdict(id="b", stage="review", accepted=False, note="x" * 200))
    assert verdicts.file.read_bytes() == before
    assert not verdicts.has("b", "review")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write(file, "old")
    with at_most(100), pytest.raises(RunError, match="no room left"):
        write(file, "new" * 100)
    assert file.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(RunError, match=r"cannot write .*: No such file or directory"):
        write(tmp_path / "none" / "x", "y")


@pytest.mark.parametrize(
    "tail",
    [b"", b'{"b"', b"\x00" * 5000, b'{"b": 1}\n'[:-1], b'\x00\x00\x00\n{"c": 1}\x00', b'{"b": "\xff"}\n'],
)
def test_torn_tails_are_cut_off(tmp_path: Path, tail: bytes) -> None:
    file = tmp_path / "log.jsonl"
    whole = b"".join(json.dumps({"a": "x" * size}).encode() + b"\n" for size in (0, 70_000, 3))
    file.write_bytes(whole + tail)
    assert mend(file) == len(tail)
    assert file.read_bytes() == whole
    assert mend(file) == 0


def test_a_file_of_nothing_but_a_torn_line_becomes_empty(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_bytes(b'{"a": ' + b"x" * 200_000)
    mend(file)
    assert file.read_bytes() == b""
    mend(file)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damage_is_recognised(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    (folder / "deep").mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(range(256)) * 100)
    (folder / "deep" / "note").write_text("x", encoding="utf-8")
    assert find_damage(folder) == "manifest.json is missing"
    seal(folder)
    put_in_place(folder, tmp_path / "named")
    folder = tmp_path / "named"
    assert find_damage(folder) is None
    flip(folder / "weights")
    assert find_damage(folder) == "weights has changed"
    os.truncate(folder / "weights", 100)
    assert find_damage(folder) == "weights has 100 bytes instead of 25600"
    (folder / "weights").unlink()
    assert find_damage(folder) == "weights is missing"
    for text in ("{", "[]", '{"files": 3}', '{"files": {"deep": {}}}'):
        (folder / "manifest.json").write_text(text, encoding="utf-8")
        assert find_damage(folder) is not None


def test_a_folder_is_replaced_without_a_moment_in_which_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def make(name: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name, encoding="utf-8")
        return tmp_path / name

    target = make("old").rename(tmp_path / "step")
    rename = Path.rename

    def rename_until(left: list[int]) -> None:
        def counted(self: Path, to: Path) -> Path:
            if not left:
                raise Killed
            left.pop()
            return rename(self, to)

        monkeypatch.setattr(Path, "rename", counted)

    new = make("new")
    for renames in range(2):
        rename_until([1] * renames)
        with pytest.raises(Killed):
            put_in_place(new, target)
        monkeypatch.setattr(Path, "rename", rename)
        put_back(tmp_path)
        assert (target / "weights").read_text(encoding="utf-8") == "old"
    put_in_place(new, target)
    assert (target / "weights").read_text(encoding="utf-8") == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_run_is_rewound_to_a_mark(tmp_path: Path) -> None:
    run = Run.create(RunSettings(directory=str(tmp_path), name="r"), "train", "shop", EvalConfig(), 0)
    assert run.path == tmp_path / "r"
    assert [item.name for item in tmp_path.iterdir()] == ["r"]
    run.add_metrics({"step": 1})
    run.append("trajectories/step-1.jsonl", "{}")
    run.append("ledger.jsonl", '{"paid": 1}')
    mark = run.mark()
    run.add_metrics({"step": 2})
    run.add_timings(2, update=1.0)
    run.append("trajectories/step-2.jsonl", "{}")
    run.append("ledger.jsonl", '{"paid": 2}')
    run.rewind(mark)
    assert run.mark() == mark
    assert not (run.path / "trajectories" / "step-2.jsonl").exists()
    assert not (run.path / "timings.jsonl").exists()
    assert len((run.path / "ledger.jsonl").read_text(encoding="utf-8").splitlines()) == 2  # money stays spent
    os.truncate(run.path / "metrics.jsonl", 3)
    with pytest.raises(RunError, match=r"metrics.jsonl is shorter than when the checkpoint was made"):
        run.rewind(mark)
    run.close("stopped")
