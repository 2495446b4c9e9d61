"""Targets that read files: one file of a good set is damaged, and everything that reads it is run on it, and
it is put back. What is refused is refused in one line that names the file."""

from __future__ import annotations

import json
import random
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from mutate import mutate, mutate_file, twist
from sample_files import BFCL_CODE, MESSAGES, SETS, TOOLS

from trialogue.benchmarks import ace, bfcl
from trialogue.benchmarks.ace.execute import UnreadableCalls, read_calls, write_calls
from trialogue.benchmarks.bfcl.execute import parse_call
from trialogue.benchmarks.bfcl.package import read_functions
from trialogue.benchmarks.recorded import score_recorded
from trialogue.benchmarks.tau import tau1, tau2
from trialogue.benchmarks.tau.tau2.judge import read_statements
from trialogue.corpus.review import Verdicts, read_judgement
from trialogue.errors import ConfigError, DomainError, GradeError, RunError, ToolError
from trialogue.messages import from_openai
from trialogue.run import is_listed, read_about, read_marks, read_seconds, read_usage
from trialogue.score.verdict import read_verdict
from trialogue.talk.personas import read_personas
from trialogue.talk.scripted import read_script
from trialogue.task import Task
from trialogue.trajectory import Trajectory, Turn
from trialogue.view.run_reader import RunRecords
from trialogue.world.domain import Domain, from_list, read_tasks
from trialogue.world.mcp import read_server
from trialogue.world.simulated import load_scenario, read_answer

LONGEST = 2000
"""Letters of a message."""


@cache
def find_folder(name: str) -> Path:
    """A folder of one set of files. It lies deep: a benchmark's version is looked for in what lies above."""
    folder = Path(tempfile.mkdtemp(prefix="trialogue-fuzz-")).joinpath(*"abcdef", name)
    code = {f"bfcl_eval/{place}": text for place, text in BFCL_CODE.items()} if name == "bfcl" else {}
    for place, text in {**SETS[name], **code}.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text, encoding="utf-8")
    return folder


def mutating(*names: str) -> Callable[[str, random.Random], None]:
    """A target that damages one file of a set and reads the folder."""

    def target(text: str, draw: random.Random) -> None:
        name = draw.choice(names)
        folder = find_folder(name)
        place = draw.choice(list(SETS[name]))
        try:
            (folder / place).write_bytes(mutate_file(SETS[name][place], place, draw))
            READERS[name](folder, place)
        except (ConfigError, DomainError, RunError) as error:
            told = str(error)
            assert "\n" not in told, told
            assert str(folder) in told, told
            assert len(told) < LONGEST, told
        finally:
            (folder / place).write_text(SETS[name][place], encoding="utf-8")

    return target


def use(domain: Domain) -> None:
    """What is read can be held, shown, graded and written down; a task that cannot be set up is told."""
    for task in domain.tasks("all"):
        Task.model_validate_json(task.model_dump_json())
        try:
            hold(domain, task)
        except DomainError as error:
            if f"task {task.id}" not in str(error):
                raise


def hold(domain: Domain, task: Task) -> None:
    environment = domain.open(task)
    json.dumps([tool.schema for tool in environment.tools.values()], ensure_ascii=False).encode()
    environment.policy.encode()
    environment.digest()
    if domain.user_prompt is not None:
        domain.user_prompt(task).encode()
    for party in (domain.oracle, domain.user):
        if party is not None:
            party(task, 0)
    said = Trajectory(id="x", task=task, turns=tuple(environment.history), end="user_stop")
    assert domain.reward is not None
    with suppress(GradeError):
        domain.reward(task, said, environment)


def read_tau1(folder: Path, place: str) -> None:
    if place == "episodes.jsonl":
        score_recorded(folder / place, "tau:retail", str(folder))
        return
    tau1._find.cache_clear()
    try:
        use(tau1.find("retail", str(folder)))
    finally:
        tau1._find.cache_clear()


def read_mock(folder: Path, place: str) -> None:
    if place == "results.json":
        score_recorded(folder / place, "tau2:mock", str(folder))
    else:
        read_tau2(folder, "mock")


def read_telecom(folder: Path, place: str) -> None:
    read_tau2(folder, "telecom")


def read_tau2(folder: Path, domain: str) -> None:
    for cached in (tau2._find, tau2._read_databases):
        cached.cache_clear()
    try:
        use(tau2.find(domain, str(folder)))
    finally:
        for cached in (tau2._find, tau2._read_databases):
            cached.cache_clear()


def read_bfcl(folder: Path, place: str) -> None:
    bfcl._find.cache_clear()
    read_functions.cache_clear()
    use(bfcl.find("miss_func", str(folder)))


def read_ace(folder: Path, place: str) -> None:
    if place == "episodes.jsonl":
        score_recorded(folder / place, "ace:multi_step", str(folder))
        return
    ace._find.cache_clear()
    try:
        use(ace.find("multi_step", str(folder)))
    finally:
        ace._find.cache_clear()


CALLS = [
    "[cancel_order(order_id='W1', items=[1, -2.5, None], more={'a': (True, 'b')}), look(q=word)]",
    "look('a', on=True)",
    "f(x=b'a', y={1, 2}, z=1+2j, w=..., v=a[0], u=-'a')",
]


def read_written_calls(text: str, draw: random.Random) -> None:
    """Calls written as Python, as ACEBench and BFCL have them."""
    parse_written(mutate(draw, draw.choice(CALLS)) if draw.random() < 0.8 else text)


def parse_written(text: str) -> None:
    for alone in (True, False):
        with suppress(UnreadableCalls):
            calls = read_calls(text, alone)
            write_calls(calls).encode("utf-8", "surrogatepass")
            for call in calls:
                call.model_dump_json()
    with suppress(ToolError):
        parse_call.__wrapped__(text)


def read_own(folder: Path, place: str) -> None:
    """Task files, scenarios, servers' descriptions, personas and scripts."""
    match place:
        case "server.toml":
            read_server(folder / place)
        case "personas.toml" | "personas.jsonl":
            personas = read_personas("mild", str(folder / place))
            for seed in range(5):
                personas.draw(seed)
        case "script.jsonl":
            read_script(folder / place)
        case "tasks.jsonl":
            tasks = read_tasks(folder / place, "own")
            for task in tasks:
                Task.model_validate_json(task.model_dump_json())
                assert isinstance(task.level, int)
            with suppress(DomainError):  # told of the domain, not of its file: an id that is there twice
                from_list("own", tasks)
        case _:
            domain = load_scenario(folder)
            json.dumps(domain.database.schemas(), ensure_ascii=False).encode()
            json.dumps([tool.schema for tool in domain.database.tools.values()]).encode()
            for task in domain.tasks("all"):
                with suppress(DomainError):
                    domain.open(task)


@cache
def find_scenario() -> tuple[Domain, Task]:
    domain = load_scenario(find_folder("own"))
    return domain, domain.tasks("all")[0]


VERDICTS: list[Any] = [
    {"faults": [{"kind": "dump", "message": 1, "evidence": "it tells all"}]},
    {"scores": {"faithful": 5, "policy": 4, "complete": 5, "user": 3, "natural": 1}, "reasons": ["rude"]},
    {"results": [{"expectedOutcome": "kind", "reasoning": "it is", "metExpectation": True}]},
    {"result": {"order": "W1"}, "changes": {"orders": {"W1": {"status": "gone"}, "*": None}}},
    {"error": "there is none"},
]


def read_judges(text: str, draw: random.Random) -> None:
    """What judges and a simulator of tools answer."""
    answer = json.dumps(twist(draw.choice(VERDICTS), draw), ensure_ascii=False)
    if draw.random() < 0.3:
        answer = f"Here:\n```json\n{answer}\n```\nI hope this helps."
    if draw.random() < 0.4:
        answer = mutate(draw, answer)
    judge(answer)


def judge(answer: str) -> None:
    domain, task = find_scenario()
    hello = Turn(side="user", message=from_openai({"role": "user", "content": "Hi"}))
    trajectory = Trajectory(id="x", task=task, turns=(hello, hello), end="user_stop")
    with suppress(GradeError):
        for finding in read_verdict(answer, trajectory):
            finding.model_dump_json()
    with suppress(GradeError):
        read_judgement("x", answer, "judge").model_dump_json()
    with suppress(GradeError):
        json.dumps(read_statements(answer, 1))
    environment = domain.open(task)
    before = environment.digest()
    try:
        result, changes = read_answer(answer, environment.tools["cancel"], environment.database)  # type: ignore[arg-type]
        result.text.encode()
        json.dumps(changes)
    except DomainError:
        assert environment.digest() == before


def read_corpus(text: str, draw: random.Random) -> None:
    """Conversations of the OpenAI shape in parquet, ours or anybody's, and the rows made of them."""
    import pyarrow
    from pyarrow import parquet

    from trialogue.learn.examples import read_parquet

    file = find_folder("own") / "corpus.parquet"
    row: dict[str, Any] = twist({"id": "a", "messages": MESSAGES, "tools": TOOLS}, draw)
    columns = row if isinstance(row, dict) else {"messages": row}
    if draw.random() < 0.9:
        written = {
            str(key).encode("utf-8", "replace").decode(): [
                json.dumps(value) if draw.random() < 0.7 else value
            ]
            for key, value in columns.items()
        }
        try:
            parquet.write_table(pyarrow.table(written), file)
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
            return  # nobody could have written it
    if draw.random() < 0.2:
        data = bytearray(file.read_bytes()) if file.exists() else bytearray(b"PAR1")
        data[draw.randrange(len(data))] = draw.randrange(256)
        file.write_bytes(bytes(data[: draw.randint(0, len(data))]) if draw.random() < 0.3 else bytes(data))
    if not file.exists():
        return
    try:
        for example in read_parquet(file):
            for turn in example.turns:
                turn.model_dump_json()
            json.dumps([tool.schema for tool in example.tools])
    except RunError as error:
        if str(file) not in str(error):
            raise AssertionError(error) from error


SHOWN = (
    "run.json",
    "metrics.jsonl",
    "timings.jsonl",
    "index.jsonl",
    "decisions.jsonl",
    "trajectories/eval.jsonl",
)


def read_records(folder: Path, place: str) -> None:
    """The small files of a run, as `--resume`, reports and the page read them."""
    for reader in (read_about, read_marks, read_seconds, is_listed):
        with suppress(RunError):
            reader(folder)
    with suppress(RunError):
        read_usage(folder / "recordings" / "user.jsonl")
    with suppress(RunError):
        Verdicts(folder).find("t/0")
    if place not in SHOWN:
        return
    records = RunRecords(folder)
    failed: list[Any] = []
    before, threading.excepthook = threading.excepthook, failed.append
    try:
        records.refresh()
        records.wait()
    finally:
        threading.excepthook = before
    assert not failed, failed
    for entry in records.entries():
        records.read(entry)
        records.read_seconds(entry.id)
    records.groups()


READERS: dict[str, Callable[[Path, str], None]] = {
    "tau1-json": read_tau1,
    "tau1-code": read_tau1,
    "tau2": read_mock,
    "tau2-code": read_telecom,
    "bfcl": read_bfcl,
    "ace": read_ace,
    "own": read_own,
    "run": read_records,
}
"""How the folder of each set is read, all of it or one place."""
FILE_TARGETS: dict[str, Callable[[str, random.Random], None]] = {
    "tau1": mutating("tau1-json", "tau1-code"),
    "tau2": mutating("tau2", "tau2-code"),
    "bfcl": mutating("bfcl"),
    "ace": mutating("ace"),
    "written": read_written_calls,
    "own": mutating("own"),
    "judges": read_judges,
    "corpora": read_corpus,
    "records": mutating("run"),
}
