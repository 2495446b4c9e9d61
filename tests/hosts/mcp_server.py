"""A small MCP server for the tests: it keeps things in memory and on disk, and misbehaves when asked to."""

import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("notes")
notes: dict[str, str] = {}


@server.tool()
def remember(name: str, text: str) -> str:
    """Write a note down."""
    notes[name] = text
    Path(f"{name}.txt").write_text(text)
    return f"noted {name}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def recall(name: str) -> str:
    """Read a note."""
    if name not in notes:
        raise ValueError(f"there is no note {name}")
    return notes[name]


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def look_around() -> dict[str, object]:
    """Tell what this process can see."""
    return {
        "pid": os.getpid(),
        "folder": str(Path.cwd()),
        "files": sorted(item.name for item in Path.cwd().iterdir()),
        "environment": dict(os.environ),
    }


@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(3600)
    return "too late"


@server.tool()
def flood(megabytes: int) -> str:
    """Answer at length."""
    return "x" * (megabytes << 20)


@server.tool()
def die() -> str:
    """End this process at once."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
