"""Every fenced block of the documents is run, in the order a reader meets it.

Blocks of one file share a folder that starts empty, and its python blocks share a namespace. `python` is
executed; `bash` and `sh` are run as scripts that stop at the first failure; in `console` the lines after `$ `
are commands (continued by a trailing backslash) and the rest is what they print, which is not compared;
`toml`, `json` and `jsonl` are parsed. Other languages are left alone. A comment right before a block,
`<!-- not run: REASON -->`, exempts it.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tomllib
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECONDS_PER_BLOCK = 300

FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,}) *(?P<language>[^\s`]*)[^`]*$")
EXEMPTION = re.compile(r"^\s*<!--\s*not run\b:?(?P<reason>.*?)-->\s*$")


class DocumentError(Exception):
    pass


@dataclass(frozen=True)
class Block:
    path: Path
    line: int  # of the opening fence
    language: str
    text: str
    exemption: str | None

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line} ({self.language})"


def read_blocks(path: Path) -> Iterator[Block]:
    exemption: str | None = None
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    for number, line in lines:
        where = f"{path.name}:{number}"
        if comment := EXEMPTION.match(line):
            exemption = comment["reason"].strip()
            if not exemption:
                raise DocumentError(f"{where}: say why the block is not run: <!-- not run: REASON -->")
        elif opening := FENCE.match(line):
            if not opening["language"]:
                raise DocumentError(f"{where}: name the language of the block (`text` if it is none)")
            closing = re.compile(rf"^ *{opening['marks']}{opening['marks'][0]}* *$")
            inside: list[str] = []
            for _, text in lines:
                if closing.match(text):
                    break
                inside.append(re.sub(f"^ {{0,{len(opening['indent'])}}}", "", text))
            else:
                raise DocumentError(f"{where}: the block is never closed")
            content = "".join(f"{text}\n" for text in inside)
            yield Block(path, number, opening["language"].lower(), content, exemption)
            exemption = None
        elif exemption is not None and line.strip():
            raise DocumentError(f"{where}: the `not run` comment above stands before no block")
    if exemption is not None:
        raise DocumentError(f"{path.name}: the last `not run` comment stands before no block")


def run_document(path: Path, folder: Path) -> list[str]:
    """Run all blocks of a document in `folder`; gives the exempt blocks with their reasons."""
    module = types.ModuleType("__main__")
    exempt: list[str] = []
    for block in list(read_blocks(path)):
        if block.exemption is not None:
            exempt.append(f"{block} not run: {block.exemption}")
            continue
        match block.language:
            case "python":
                run_python(block, folder, module)
            case "bash" | "sh":
                run_shell(block, folder, block.text)
            case "console":
                run_shell(block, folder, to_commands(block.text))
            case "toml" | "json" | "jsonl":
                parse(block)
            case _:
                pass
    return exempt


def run_python(block: Block, folder: Path, module: types.ModuleType) -> None:
    """Run as if the file were the document itself, so that a traceback names the document's own lines."""
    printed = io.StringIO()
    before, path_before, names_before = Path.cwd(), list(sys.path), set(sys.modules)
    main_before = sys.modules["__main__"]
    try:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        sys.modules["__main__"] = module
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + block.text, str(block.path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise DocumentError(f"{block} failed\n{printed.getvalue()}{traceback.format_exc()}") from error
    finally:
        sys.modules["__main__"] = main_before
        sys.path[:] = path_before
        os.chdir(before)
        for name in set(sys.modules) - names_before:  # modules the document wrote must not reach the next
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                del sys.modules[name]


def to_commands(text: str) -> str:
    commands: list[str] = []
    continued = False
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append(line.removeprefix("$ "))
        elif continued:
            commands.append(line.removeprefix("> "))
        else:
            continue
        continued = line.endswith("\\")
    return "".join(f"{command}\n" for command in commands)


def run_shell(block: Block, folder: Path, script: str) -> None:
    if not script.strip():
        raise DocumentError(f"{block} holds no command")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    trap = "trap 'echo \"failed: $BASH_COMMAND\" >&2' ERR\n"
    try:
        done = subprocess.run(
            ["bash", "-Eeuo", "pipefail", "-c", trap + script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS_PER_BLOCK,
        )
    except subprocess.TimeoutExpired as error:
        raise DocumentError(f"{block} took over {SECONDS_PER_BLOCK} s\n{error.output}") from error
    if done.returncode:
        raise DocumentError(f"{block} ended with status {done.returncode}\n{done.stdout}")


def parse(block: Block) -> None:
    try:
        match block.language:
            case "toml":
                tomllib.loads(block.text)
            case "json":
                json.loads(block.text)
            case _:
                for line in block.text.splitlines():
                    json.loads(line)
    except ValueError as error:
        raise DocumentError(f"{block} is not {block.language}: {error}") from error


@pytest.mark.documents
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_runs(path: Path, tmp_path: Path) -> None:
    try:
        for line in run_document(path, tmp_path):
            print(line)
    except DocumentError as error:
        pytest.fail(str(error), pytrace=False)


SOUND = """
# Made up

```python
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Note:
    text: str

with open("note.txt", "w") as file:
    print(Note("hello").text, file=file)
```

- in a list:

  ```console
  $ cat note.txt \\
  >   | tr a-z A-Z > loud.txt
  HELLO
  $ echo 'word = 7' > written.py
  ```

~~~python
import written
from pathlib import Path
assert Path("loud.txt").read_text() == "HELLO\\n" and Note("x").text == "x"
assert written.word == 7 and __name__ == "__main__"
~~~

```bash
here=$(cat <<END
hello
END
)
test "$here" = hello && command -v python
```

```toml
a = 1
```

```jsonl
{"a": 1}
{"a": 2}
```

```text
not code at all ]
```

<!-- not run: it would delete the moon -->

```bash
exit 1
```
"""


def write_document(folder: Path, text: str) -> tuple[Path, Path]:
    path = folder / "made-up.md"
    path.write_text(text, encoding="utf-8")
    inside = folder / "inside"
    inside.mkdir()
    return path, inside


def test_a_sound_document_runs(tmp_path: Path) -> None:
    path, folder = write_document(tmp_path, SOUND)
    here, modules = Path.cwd(), set(sys.modules)
    (exempt,) = run_document(path, folder)
    assert exempt.endswith("(bash) not run: it would delete the moon")
    assert here == Path.cwd()
    assert "written" not in set(sys.modules) - modules


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n```python\n1 / 0\n```\n", 'made-up.md", line 3'),
        ("```python\nraise SystemExit(0)\n```\n", "made-up.md:1 (python) failed"),
        ("```python\na = 1\n```\n\n```python\nassert a == 2\n```\n", "made-up.md:5 (python) failed"),
        ("```console\n$ true\n$ false\n$ true\n```\n", "failed: false"),
        ("```sh\nfalse\ntrue\n```\n", "made-up.md:1 (sh) ended with status 1"),
        ("```bash\ncd /no/such/folder\n```\n", "made-up.md:1 (bash) ended with status 1"),
        ("```bash\nfalse | cat\n```\n", "status 1"),
        ("```console\nno command\n```\n", "holds no command"),
        ("```toml\na = \n```\n", "is not toml"),
        ("```json\n{'a': 1}\n```\n", "is not json"),
        ('```jsonl\n{"a": 1}\n{"a"\n```\n', "is not jsonl"),
        ("```\nwhat\n```\n", "name the language"),
        ("```python\npass\n", "never closed"),
        ("<!-- not run: -->\n```bash\nfalse\n```\n", "say why"),
        ("<!-- not run -->\n```bash\nfalse\n```\n", "say why"),
        ("<!-- not run: later -->\ntext\n```bash\nfalse\n```\n", "stands before no block"),
        ("<!-- not run: later -->\n", "stands before no block"),
        ("<!-- not run: once -->\n```sh\nfalse\n```\n```sh\nfalse\n```\n", "made-up.md:5 (sh)"),
    ],
)
def test_a_failing_block_fails_the_document(tmp_path: Path, text: str, expected: str) -> None:
    path, folder = write_document(tmp_path, text)
    with pytest.raises(DocumentError, match=re.escape(expected)):
        run_document(path, folder)
