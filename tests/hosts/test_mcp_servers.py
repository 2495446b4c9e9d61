"""Public MCP servers as worlds: time and git of today, sqlite of the SDK's first generation, memory and
filesystem on node. `make test-mcp` installs them and says where they are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trialogue import Reply, RolloutSettings, Trajectory, find_domain, rollout
from trialogue.config import Limits
from trialogue.score.check import check
from trialogue.score.reward import grade
from trialogue.talk.scripted import ScriptedModel, call
from trialogue.world.mcp import McpDomain

PLACE = os.environ.get("TRIALOGUE_MCP", "")
pytestmark = [
    pytest.mark.skipif(not PLACE, reason="TRIALOGUE_MCP names no folder with servers"),
    pytest.mark.timeout(600),
]
ROOT = Path(PLACE).resolve()
node = pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")


def make(
    folder: Path, command: list[str], check: dict[str, Any], files: str = "", **environment: str
) -> McpDomain:
    folder.mkdir(exist_ok=True)
    lines = [
        "start_seconds = 200",
        f"command = {json.dumps(command)}",
        *([f"files = '{files}'"] if files else []),
    ]
    lines.append(
        "environment = {" + ", ".join(f"{name} = '{value}'" for name, value in environment.items()) + "}"
    )
    (folder / "server.toml").write_text("\n".join(lines))
    (folder / "policy.md").write_text("Help the user with the tools.")
    task = {"id": "t", "instructions": "Try it out, please, as told.", "expected": {"checks": [check]}}
    (folder / "tasks.jsonl").write_text(json.dumps(task))
    domain = find_domain(str(folder))
    assert isinstance(domain, McpDomain)
    return domain


async def hold(domain: McpDomain, *lines: str | Reply, trials: int = 2) -> list[Trajectory]:
    """The same conversation several times at once, each with a server of its own."""
    groups = rollout(
        domain,
        domain.tasks("test"),
        lambda task, seed: ScriptedModel(lines),
        lambda task, seed: ScriptedModel(["Hello.", "Thank you. ###STOP###"]),
        RolloutSettings(group_size=trials, limits=Limits(seconds=400), redraws=0, grade=grade),
    )
    return [item async for group in groups for item in (*group.trajectories, *group.failed)]


def results(item: Trajectory) -> list[str]:
    assert item.error is None
    return [turn.message.content for turn in item.turns if turn.message.role == "tool"]


async def test_time(tmp_path: Path) -> None:
    domain = make(
        tmp_path / "clock",
        [str(ROOT / "new/bin/mcp-server-time"), "--local-timezone=UTC"],
        {"name": "get_current_time", "arguments": {"timezone": "UTC"}, "matches": "UTC"},
    )
    assert set(domain.database.tools) == {"get_current_time", "convert_time"}
    assert check(domain).ok
    noon = call("convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo")
    for item in await hold(domain, noon, call("get_current_time", timezone="Nowhere/At_All"), "It is 21:00."):
        converted, refused = results(item)
        assert "T21:00:00+09:00" in converted
        assert refused.startswith("Error")
        assert item.value == 1


async def test_sqlite_of_the_first_generation(tmp_path: Path) -> None:
    """Each conversation makes the same table: it could not if another had made it before."""
    domain = make(
        tmp_path / "database",
        [str(ROOT / "old/bin/mcp-server-sqlite"), "--db-path", "{folder}/data.db"],
        {"name": "read_query", "arguments": {"query": "SELECT count(*) AS n FROM pets"}, "matches": "'n': 1"},
    )
    assert {"read_query", "write_query", "create_table", "list_tables"} <= set(domain.database.tools)
    three = await hold(
        domain,
        call("create_table", query="CREATE TABLE pets (name TEXT)"),
        call("write_query", query="INSERT INTO pets VALUES ('Rex')"),
        call("read_query", query="SELECT name FROM pets"),
        "His name is Rex.",
        trials=3,
    )
    assert [results(item)[2] for item in three] == ["[{'name': 'Rex'}]"] * 3
    assert [item.value for item in three] == [1.0] * 3


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


async def test_git(tmp_path: Path) -> None:
    repository = tmp_path / "history" / "files"
    repository.mkdir(parents=True)
    (repository / "poem.txt").write_text("Roses are red\n")
    identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "A poem"]):
        git(repository, *words)
    domain = make(
        tmp_path / "history",
        [str(ROOT / "new/bin/mcp-server-git"), "--repository", "{folder}"],
        {"name": "git_log", "arguments": {"repo_path": "."}, "matches": "A poem"},
        files="files",
    )
    assert {"git_status", "git_log", "git_create_branch"} <= set(domain.database.tools)
    two = await hold(domain, call("git_create_branch", repo_path=".", branch_name="draft"), "Done.")
    for item in two:
        assert "draft" in results(item)[0]
        assert item.value == 1
    assert "draft" not in git(repository, "branch")  # the conversations worked on copies


@node
async def test_memory_on_node(tmp_path: Path) -> None:
    program = ROOT / "node/node_modules/@modelcontextprotocol/server-memory/dist/index.js"
    domain = make(
        tmp_path / "graph",
        ["node", str(program)],
        {"name": "read_graph", "arguments": {}, "matches": "Ada"},
        MEMORY_FILE_PATH="{folder}/memory.jsonl",
    )
    entity = {"name": "Ada", "entityType": "person", "observations": ["likes engines"]}
    two = await hold(domain, call("read_graph"), call("create_entities", entities=[entity]), "Noted.")
    for item in two:
        empty, _ = results(item)
        assert json.loads(empty) == {"entities": [], "relations": []}
        assert item.value == 1


@node
async def test_filesystem_on_node(tmp_path: Path) -> None:
    program = ROOT / "node/node_modules/@modelcontextprotocol/server-filesystem/dist/index.js"
    domain = make(
        tmp_path / "disk",
        ["node", str(program), "{folder}"],
        {"name": "list_allowed_directories", "arguments": {}, "matches": "folder"},
    )
    assert domain.database.tools["write_file"].writes
    assert not domain.database.tools["list_directory"].writes
    two = await hold(
        domain,
        call("list_directory", path="."),
        call("write_file", path="note.txt", content="hello"),
        call("read_text_file", path="/etc/passwd"),
        "Written.",
    )
    for item in two:
        before, _, refused = results(item)
        assert "note.txt" not in before
        assert refused.startswith("Error")
        assert "Access denied" in refused
