"""Files of lines: JSON objects, one a line, each with its number and digest as the last field.

`"digest":"N-HASH"` holds the number of the line in its file and a BLAKE2b hash (8 bytes) of the number, a
space and the line without this field. A line without a digest is read all the same: it came from elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, cast

from trialogue.durable import append_bytes, write
from trialogue.errors import RunError
from trialogue.reading import explain, from_json
from trialogue.secrets import redact

_LONGEST_STAMP = 64
_STAMP = re.compile(rb',?"digest":"([1-9][0-9]{0,11})-([0-9a-f]{16})"\}\n?\Z')


def to_digest(text: bytes) -> str:
    return blake2b(text, digest_size=8).hexdigest()


def stamp(line: str, number: int) -> str:
    """A JSON object on one line with its digest as the last field."""
    if not line.endswith("}"):
        raise ValueError(f"only a JSON object has a digest, not {line[:80]!r}")
    comma = "" if line == "{}" else ","
    digest = to_digest(b"%d " % number + line.encode())
    return f'{line[:-1]}{comma}"digest":"{number}-{digest}"}}'


def check_line(line: bytes) -> tuple[int | None, bool]:
    """The number in a line's digest, None where it has none, and whether the digest agrees."""
    start = max(0, len(line) - _LONGEST_STAMP)
    found = _STAMP.search(line, start)
    if found is None:
        return None, False
    number = int(found[1])
    return number, to_digest(b"%d " % number + line[: found.start()] + b"}").encode() == found[2]


def unstamp(line: bytes) -> bytes:
    """A line without its digest."""
    found = _STAMP.search(line, max(0, len(line) - _LONGEST_STAMP))
    return line if found is None else line[: found.start()] + b"}\n"


def append_records(path: Path, lines: Sequence[str]) -> list[int]:
    """Append JSON objects to a file of lines, each with its digest. Returns their lengths in bytes."""
    stamped = _stamp_all(lines, find_next(path))
    append_bytes(path, b"".join(stamped))
    return [len(line) for line in stamped]


def write_records(path: Path, lines: Sequence[str]) -> list[int]:
    """Write all lines of a file at once, each with its digest. Returns their lengths in bytes."""
    stamped = _stamp_all(lines, 1)
    write(path, b"".join(stamped).decode())
    return [len(line) for line in stamped]


def _stamp_all(lines: Sequence[str], first: int) -> list[bytes]:
    """Secrets are masked before the digest is computed, not after."""
    masked = redact("\n".join(lines)).split("\n") if lines else []
    return [f"{stamp(line, number)}\n".encode() for number, line in enumerate(masked, first)]


def find_next(path: Path) -> int:
    """The number of the next line of a file; it stands at the end of the last one."""
    try:
        with path.open("rb") as source:
            size = source.seek(0, 2)
            source.seek(max(0, size - _LONGEST_STAMP))
            if found := _STAMP.search(source.read()):
                return int(found[1]) + 1
            source.seek(0)
            return sum(1 for _ in source) + 1
    except FileNotFoundError:
        return 1


class Line(NamedTuple):
    """A line of a JSONL file: which one, where it begins and how long it is in bytes, and what it says."""

    number: int
    at: int
    length: int
    value: dict[str, Any]


def read_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; a last line cut off by a crash is left out, but a
    file that does not even begin with an object is something else."""
    return ((line.number, line.value) for line in read_spans(file))


def read_spans(file: Path) -> Iterator[Line]:
    """The same with the place of each line."""
    try:
        source = file.open("rb")
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror}") from None
    at = 0
    with source:
        for number, line in enumerate(source, 1):
            start, at = at, at + len(line)
            if not line.strip():
                continue
            try:
                value = from_json(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                begun = number > 1 or line.lstrip().startswith(b"{")
                if begun and not line.endswith(b"\n"):
                    return
                raise RunError(f"{file}, line {number}: {explain(error)}") from None
            if not isinstance(value, dict):
                raise RunError(f"{file}, line {number}: not a JSON object")
            stamped, agrees = check_line(line)
            if stamped is not None and not agrees:
                raise RunError(f"{file}, line {number}: was changed: its digest does not agree")
            plain = cast("dict[str, Any]", value)
            plain.pop("digest", None)  # also where another program wrote the line anew
            yield Line(number, start, len(line), plain)
