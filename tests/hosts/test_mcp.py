"""An MCP server as a world, against a real server process that can be told to misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trialogue import (
    ConfigError,
    DomainError,
    Environment,
    Reply,
    RolloutSettings,
    Trajectory,
    find_domain,
    rollout,
)
from trialogue.config import DraftConfig, EvalConfig, Limits, SynthesizeConfig
from trialogue.corpus.draft import draft
from trialogue.corpus.synthesize import synthesize
from trialogue.score.check import check
from trialogue.score.evaluate import evaluate
from trialogue.score.reward import grade
from trialogue.talk.scripted import ScriptedModel, call
from trialogue.world.mcp import McpDomain

pytestmark = pytest.mark.timeout(600)  # servers take their time to start on a busy machine
PROGRAM = Path(__file__).with_name("mcp_server.py")
COMMAND = json.dumps([sys.executable, str(PROGRAM)])
TASKS = [
    {
        "id": "note",
        "instructions": "Have it noted that the code is 4711.",
        "expected": {"checks": [{"name": "recall", "arguments": {"name": "code"}, "matches": "^4711$"}]},
    },
    {"id": "wish", "instructions": "Ask what there is."},
]


def write(
    folder: Path, settings: str = f"command = {COMMAND}", tasks: list[dict[str, Any]] | None = None
) -> Path:
    folder.mkdir()
    (folder / "server.toml").write_text(f"start_seconds = 200\n{settings}" if settings else "")
    (folder / "policy.md").write_text("Take notes for the user.")
    lines = [json.dumps(task) for task in (TASKS if tasks is None else tasks)]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> McpDomain:
    settings = f"command = {COMMAND}\ncall_seconds = 60\nresult_characters = 200\nends = ['die']"
    domain = find_domain(str(write(tmp_path_factory.mktemp("domains") / "notes", settings)))
    assert isinstance(domain, McpDomain)
    return domain


async def hold(domain: McpDomain, *lines: str | Reply, number: int = 0, trials: int = 1) -> list[Trajectory]:
    groups = rollout(
        domain,
        [domain.tasks("test")[number]],
        lambda task, seed: ScriptedModel(lines),
        lambda task, seed: ScriptedModel(["Hello.", "Thank you. ###STOP###"]),
        RolloutSettings(
            group_size=trials, limits=Limits(seconds=400), redraws=0, grade=grade if number == 0 else None
        ),
    )
    return [item async for group in groups for item in (*group.trajectories, *group.failed)]


def results(trajectory: Trajectory) -> list[tuple[str, bool]]:
    return [(turn.message.content, turn.failed) for turn in trajectory.turns if turn.message.role == "tool"]


def test_the_tools_are_those_of_the_server(notes: McpDomain) -> None:
    tools = notes.database.tools
    assert set(tools) == {"remember", "recall", "look_around", "hang", "flood", "die"}
    assert tools["remember"].description == "Write a note down."
    assert tools["remember"].parameters["required"] == ["name", "text"]
    assert (tools["remember"].writes, tools["recall"].writes) == (True, False)
    assert notes.source == "mcp"
    checked = check(notes)
    assert checked.ok, checked.problems


async def test_a_conversation_is_graded_by_asking_the_server(notes: McpDomain) -> None:
    (won,) = await hold(notes, call("remember", name="code", text="4711"), "Noted.")
    assert (won.end, won.value, results(won)) == ("user_stop", 1.0, [("noted code", False)])
    (lost,) = await hold(notes, call("remember", name="code", text="17"), "Noted.")
    assert lost.value == 0
    assert lost.reward is not None
    assert lost.reward.why == ("check: recall should match '^4711$', is '17'",)
    (idle,) = await hold(notes, "I shall remember that.")
    assert idle.value == 0


async def test_two_conversations_at_once_see_nothing_of_each_other(
    notes: McpDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    two = await hold(
        notes,
        call("recall", name="code"),
        call("remember", name="code", text="1"),
        "Noted.",
        number=1,
        trials=2,
    )
    assert [results(item)[0] for item in two] == [("Error executing tool recall", True)] * 2
    wide = find_domain(str(write(notes.beside.parent / "wide")))
    seen = [
        json.loads(results(item)[0][0])
        for item in await hold(wide, call("look_around"), "So.", number=1, trials=2)
    ]
    assert seen[0]["pid"] != seen[1]["pid"]
    assert seen[0]["folder"] != seen[1]["folder"]
    for one in seen:
        assert one["files"] == []
        assert "MY_SECRET" not in one["environment"]
        assert one["environment"]["HOME"] == one["folder"]
        assert not os.path.exists(one["folder"])  # noqa: ASYNC240 - it is gone with the conversation
        with pytest.raises(ProcessLookupError):
            os.kill(one["pid"], 0)


async def test_a_server_that_dies_is_an_error_for_the_agent_and_a_clean_end(notes: McpDomain) -> None:
    began = time.monotonic()
    (item,) = await hold(notes, call("die"), call("recall", name="code"), "It is broken.", number=1)
    assert item.end == "user_stop"
    assert item.error is None
    (first, failed), (second, also) = results(item)
    assert failed
    assert also
    assert first.startswith("Error: die: ")
    assert second.startswith("Error: recall: ")
    assert time.monotonic() - began < 55


async def test_a_shared_server_that_dies_is_replaced(notes: McpDomain) -> None:
    """Whoever talks with it then has failed, unscored, and not by the agent's fault; the next are well."""
    shared = replace(notes, server=notes.server.model_copy(update={"isolation": "shared"}))
    [first] = await hold(shared, call("look_around"), call("die"), "Done.", number=1)
    assert (first.end, first.blame, first.reward) == ("error", "tool", None)
    assert "the shared server is gone" in (first.error or "")
    again = await hold(shared, call("remember", name="code", text="4711"), "Done.", trials=2)
    assert [(item.end, item.value) for item in again] == [("user_stop", 1.0)] * 2
    [(_, session)] = shared._shared.values()
    await session.close()
    [last] = await hold(shared, call("look_around"), "Done.", number=1)
    assert [failed for _, failed in results(last)] == [False]
    await next(iter(shared._shared.values()))[1].close()


async def test_a_hanging_tool_times_out(notes: McpDomain) -> None:
    hasty = replace(notes, server=notes.server.model_copy(update={"call_seconds": 2.0}))
    began = time.monotonic()
    (item,) = await hold(hasty, call("hang"), "It does not answer.", number=1)
    ((text, failed),) = results(item)
    assert failed
    assert "timed out" in text or "did not answer within 2 s" in text
    assert item.end == "user_stop"
    assert time.monotonic() - began < 100


async def test_wrong_calls_are_told_and_an_unknown_tool_starts_nothing(notes: McpDomain) -> None:
    (item,) = await hold(notes, call("forget"), call("remember", name="x"), "Hm.", number=1)
    (unknown, failed), (wrong, also) = results(item)
    assert failed
    assert also
    assert unknown.startswith("Error: there is no tool 'forget'")
    assert "text" in wrong


async def test_a_long_result_is_cut_off(notes: McpDomain) -> None:
    patient = replace(notes, server=notes.server.model_copy(update={"call_seconds": 200.0}))
    began = time.monotonic()
    (item,) = await hold(patient, call("flood", megabytes=50), "Long.", number=1)
    ((text, failed),) = results(item)
    print(f"\n50 MB: {time.monotonic() - began:.1f} s")
    assert not failed
    assert len(text) < 300
    assert text.endswith(f"(cut off here: the result has {50 << 20} characters, 200 are shown)")


def test_files_and_setup_calls_lay_the_world_in(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "laid",
        f"command = {COMMAND}\nfiles = 'files'\nenvironment = {{PLACE = '{{folder}}/here'}}\n"
        "tools = ['look_around', 'recall', 'remember']",
        [
            {
                "id": "t",
                "instructions": "x",
                "setup": {"calls": [{"name": "remember", "arguments": {"name": "a", "text": "b"}}]},
            }
        ],
    )
    (folder / "files").mkdir()
    (folder / "files" / "data.txt").write_text("hello")
    domain = find_domain(str(folder))

    async def look() -> tuple[Any, Any]:
        environment: Environment = domain.open(domain.tasks("test")[0])
        seen = await environment.call("look_around", {})  # type: ignore[misc]
        note = await environment.call("recall", {"name": "a"})  # type: ignore[misc]
        await environment.close()
        return json.loads(seen.text), note.text

    seen, note = asyncio.run(look())
    assert (seen["files"], note) == (["a.txt", "data.txt"], "b")
    assert seen["environment"]["PLACE"] == f"{seen['folder']}/here"
    assert set(domain.database.tools) == {"look_around", "recall", "remember"}


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The same server over streamable HTTP."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(PROGRAM), str(port)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


async def test_a_whole_evaluation_over_http(address: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "notes", f"url = '{address}'\nisolation = 'shared'")
    script = tmp_path / "script.jsonl"
    script.write_text(
        json.dumps({"tool_calls": [{"name": "remember", "arguments": {"name": "code", "text": "4711"}}]})
        + '\n"Noted."\n'
    )
    user = tmp_path / "user.jsonl"
    user.write_text('"Note the code 4711."\n"Thanks. ###STOP###"\n')
    config = EvalConfig.model_validate(
        {
            "domain": str(folder),
            "agent": {"model": f"scripted:{script}"},
            "user": {"model": f"scripted:{user}"},
            "tasks": {"count": 1, "trials": 3},
            "run": {"directory": str(tmp_path / "runs"), "name": "one"},
        }
    )
    result = await evaluate(config)
    assert (result["pass^1"], result["conversations"]) == (1.0, 3)


async def test_wishes_are_drafted_and_become_a_corpus(tmp_path: Path) -> None:
    """The third source of `synthesize`: a server's tools are real, only the wishes are made up."""
    folder = write(tmp_path / "notes", tasks=[])
    wishes = [
        {
            "wish": "You want it noted that the code of the gate is 4711.",
            "family": "note",
            "checks": [{"name": "no_such", "matches": "x"}],
        },
        {"wish": "You want it noted that the code of the gate is 4711.", "family": "note"},
        {"wish": "You want it noted that the code of the gate is 4711.", "family": "note"},
        {"wish": "You want it noted that the code of the barn is 1234.", "family": "note"},
    ]
    config = DraftConfig(folder=str(folder), tasks=2)
    told: list[str] = []
    result = await draft(config, ScriptedModel([json.dumps(wish) for wish in wishes]), told.append)
    assert (result["tasks"], result["repaired"]) == (2, 2)
    assert told == [
        "wish 1: checks: there is no tool no_such",
        "wish 1: ok after 1 repairs",
        "wish 2: that wish exists already",
        "wish 2: ok after 1 repairs",
    ]
    agent, user = tmp_path / "agent.jsonl", tmp_path / "user.jsonl"
    calls = [{"name": "remember", "arguments": {"name": "gate", "text": "4711"}}]
    agent.write_text(
        json.dumps({"tool_calls": calls}) + '\n"I have noted 4711 for the gate. Anything else?"\n'
    )
    user.write_text('"Please note: the code of the gate is 4711."\n"Thanks, bye. ###STOP###"\n')
    made = await synthesize(
        SynthesizeConfig.model_validate(
            {
                "domain": str(folder),
                "agent": {"model": f"scripted:{agent}"},
                "user": {"model": f"scripted:{user}"},
                "synthesize": {"count": 2, "balance": 0},
                "run": {"directory": str(tmp_path / "runs"), "name": "corpus"},
            }
        )
    )
    assert (made["source"], made["accepted"]) == ("mcp", 1)
    # The other conversation is about the wrong gate, as the audit of its user tells.
    assert set(made["reasons"]) & {"program: user", "sift: duplicate"}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("", "give either a command or a url"),
        ("command = ['/no/such/program']", "/no/such/program cannot be started"),
        (f"command = {COMMAND}\nends = ['leave']", "the server has no leave; it has die, flood"),
        (f"command = ['{sys.executable}', '-c', 'import sys; sys.exit(\"no licence\")']", "no licence"),
        ("command = 3", "server.toml: command"),
    ],
)
def test_a_server_that_cannot_be_used_is_told(settings: str, told: str, tmp_path: Path) -> None:
    with pytest.raises((DomainError, ConfigError), match=told):
        find_domain(str(write(tmp_path / "broken", settings)))
