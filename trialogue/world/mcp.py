"""Domains whose tools come from an MCP server. Every conversation has its own server.

Such a domain is a folder with `server.toml`, `policy.md` and `tasks.jsonl`. The server runs in a temporary
working directory, with few of our environment variables. If it refuses, hangs, dies or answers endlessly, the
agent gets an error as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
import tomllib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from trialogue.errors import ConfigError, DomainError, ToolError
from trialogue.messages import Frozen
from trialogue.reading import reading
from trialogue.task import Side, Task
from trialogue.world.database import Database
from trialogue.world.domain import Domain, Environment, Prepared, from_file, read_file
from trialogue.world.policy_speech import GENERIC
from trialogue.world.tools import Tool, ToolResult, clean_schema, shorten
from trialogue.world.values import clean_text

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

FILE = "server.toml"
FOLDER = "{folder}"
"""Placeholder for the working directory in a command."""


class Server(Frozen):
    """How a server is reached and what it may do: the contents of `server.toml`."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server on standard input and output; {folder} is its working directory."""
    url: str | None = None
    """Alternatively, the address of a server that uses streamable HTTP."""
    token_env: str | None = None
    """Environment variable that holds a bearer token for the address."""
    environment: dict[str, str] = {}
    """Environment variables of the program, in addition to PATH and a few harmless ones."""
    pass_environment: tuple[str, ...] = ()
    """Names of our environment variables that the program gets too."""
    files: str | None = None
    """A folder whose contents are copied into each working directory."""
    isolation: Literal["conversation", "shared"] = "conversation"
    """One process or session per conversation, or a shared one if the server keeps no state."""
    start_seconds: float = Field(default=30.0, gt=0)
    call_seconds: float = Field(default=30.0, gt=0)
    result_characters: int = Field(default=20_000, ge=100)
    """Longer results are cut off, with a note to the agent."""
    tools: tuple[str, ...] = ()
    """The tools of the server to offer. Default: all."""
    ends: tuple[str, ...] = ()
    """Tools whose successful call ends the conversation."""

    @model_validator(mode="after")
    def _one_way(self) -> Server:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either a command or a url")
        return self


# -- one server, running -----------------------------------------------------------------------------------


class Session:
    """A connection to a server. An asyncio task of its own keeps it open, so that an error inside the client
    ends that task and not the conversation."""

    def __init__(
        self, server: Server, beside: Path, setup: Sequence[tuple[str, dict[str, Any]]] = ()
    ) -> None:
        self.server = server
        self._beside = beside
        self._setup = setup
        self._closing = asyncio.Event()
        self._lost = False
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._live())

    async def _live(self) -> None:
        try:
            async with self._connect() as client:
                for name, arguments in self._setup:
                    result = to_tool_result(
                        await client.call_tool(name, arguments), self.server.result_characters
                    )
                    if result.failed:
                        raise DomainError(f"set-up call {name}: {result.text}")
                self._client.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - raised to the caller of a tool; it must not end the loop
            if not self._client.done():
                told = isinstance(error, DomainError | ImportError)
                self._client.set_exception(error if told else DomainError(f"no server: {_tell(error)}"))
                self._client.exception()  # mark it as retrieved, in case no tool is called again
        finally:
            if not self._client.done():
                self._client.cancel()

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncGenerator[Client]:
        from mcp import Client
        from mcp.client.stdio import get_default_environment
        from mcp.client.streamable_http import streamable_http_client

        from trialogue.world.pipes import run_program

        server = self.server
        if server.url is not None:
            from httpx2 import AsyncClient, Timeout

            token = os.environ.get(server.token_env) if server.token_env else None
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            timeout = Timeout(server.start_seconds, read=server.call_seconds + server.start_seconds)
            async with (
                AsyncClient(headers=headers, timeout=timeout) as connection,
                Client(streamable_http_client(server.url, http_client=connection)) as client,
            ):
                yield client
            return
        with tempfile.TemporaryDirectory(prefix="trialogue-mcp-", ignore_cleanup_errors=True) as above:
            folder = Path(above) / "folder"
            if server.files is not None:
                shutil.copytree(self._beside / server.files, folder)
            else:
                folder.mkdir()
            command = [part.replace(FOLDER, str(folder)) for part in server.command]
            handed = {name: os.environ[name] for name in server.pass_environment if name in os.environ}
            given = {name: value.replace(FOLDER, str(folder)) for name, value in server.environment.items()}
            environment = {**get_default_environment(), "HOME": str(folder), **handed, **given}
            with (Path(above) / "errors.txt").open("w+", encoding="utf-8", errors="replace") as told:
                try:
                    async with Client(run_program(command, environment, folder, told)) as client:
                        yield client
                except OSError as error:
                    raise DomainError(f"{command[0]} cannot be started: {error}") from error
                except Exception as error:
                    told.seek(0)
                    last = told.read().strip().rsplit("\n", 1)[-1]
                    raise DomainError(f"{_tell(error)}{f' ({shorten(last)})' if last else ''}") from error

    async def client(self) -> Client:
        """The client, once the server has started."""
        try:
            async with asyncio.timeout(self.server.start_seconds):
                return await asyncio.shield(self._client)
        except TimeoutError:
            raise DomainError(f"the server did not start within {self.server.start_seconds:g} s") from None
        except asyncio.CancelledError:
            if self._client.cancelled():
                raise DomainError("the server was stopped") from None
            raise

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool of the server. A failure is returned as text for the agent; a failed start is
        raised."""
        client = await self.client()
        seconds = self.server.call_seconds
        try:
            async with asyncio.timeout(seconds + 1):  # in case the client itself hangs
                result = await client.call_tool(name, arguments, read_timeout_seconds=seconds)
        except TimeoutError:
            return ToolResult(f"Error: {name} did not answer within {seconds:g} s", True)
        except Exception as error:  # a server may fail in any way; the agent gets the error
            self._lost = self._lost or _is_lost(error)
            if self._lost and self.server.isolation == "shared":  # perhaps caused by another conversation
                raise DomainError(f"the shared server is gone: {_tell(error)}") from error
            return ToolResult(clean_text(f"Error: {name}: {_tell(error)}"), True)
        return to_tool_result(result, self.server.result_characters)

    @property
    def is_lost(self) -> bool:
        """Whether the server has died or never started."""
        return self._lost or self._keeper.done()

    def leave(self) -> None:
        """Stop the server without waiting for it."""
        self._closing.set()
        _leaving.add(self._keeper)
        self._keeper.add_done_callback(_leaving.discard)

    async def close(self) -> None:
        """Stop the server and wait for it, so that no process is left behind."""
        self._closing.set()
        await asyncio.gather(self._keeper, return_exceptions=True)


_leaving: set[asyncio.Task[None]] = set()
"""Closing connections: a reference keeps their tasks alive."""


def _is_lost(error: Exception) -> bool:
    """Whether an error means that the connection is closed or unknown to the server."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

    return not isinstance(error, MCPError) or error.code in (CONNECTION_CLOSED, INVALID_REQUEST)


def _tell(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):  # errors of the client's own tasks
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return shorten(str(error) or type(error).__name__)


def to_tool_result(result: CallToolResult, limit: int) -> ToolResult:
    """Convert a server's answer to text, up to the limit."""
    parts: list[str] = []
    for block in result.content:
        text = getattr(block, "text", None)
        if text is None:
            text = getattr(getattr(block, "resource", None), "text", None)
        parts.append(text if isinstance(text, str) else f"({block.type}, which cannot be shown)")
    text = "\n".join(parts)
    if len(text) > limit:
        text = f"{text[:limit]}\n(cut off here: the result has {len(text)} characters, {limit} are shown)"
    prefix = "Error: " if result.is_error and not text.startswith("Error") else ""
    return ToolResult(clean_text(prefix + text), result.is_error)


# -- the domain --------------------------------------------------------------------------------------------


class Remote(Database):
    """An empty database: the server has the state."""


def _call_outside(database: Any, arguments: dict[str, Any]) -> Any:
    raise ToolError("a tool of an MCP server is called through its environment")


@dataclass(frozen=True, eq=False)
class McpDomain(Domain):
    """A domain whose tools are those of an MCP server."""

    server: Server = field(kw_only=True)
    beside: Path = field(kw_only=True)
    _shared: dict[int, tuple[asyncio.AbstractEventLoop, Session]] = field(
        default_factory=lambda: {}, init=False, repr=False
    )

    def open(self, task: Task) -> McpEnvironment:
        return McpEnvironment(self, Prepared(task, self.database, None))

    def connect(self, task: Task) -> Session:
        """A session for a conversation: its own, or the shared one of this event loop, which is replaced if
        it was lost."""
        if self.server.isolation == "conversation":
            return Session(
                self.server, self.beside, [(call.name, call.arguments) for call in task.setup.calls]
            )
        loop = asyncio.get_running_loop()
        known = self._shared.get(id(loop))
        if known is not None and known[0] is loop and known[1].is_lost:
            known[1].leave()
            known = None
        if known is None or known[0] is not loop:
            known = self._shared[id(loop)] = loop, Session(self.server, self.beside)
        return known[1]


class McpEnvironment(Environment):
    """The environment of one conversation. Its server is started by the first call of a tool."""

    __slots__ = ("_session",)

    remote: ClassVar[bool] = True

    def __init__(self, domain: McpDomain, prepared: Prepared) -> None:
        super().__init__(domain, prepared)
        self._session: Session | None = None

    def call(self, name: str, arguments: dict[str, Any] | str, side: Side = "agent") -> Any:
        tools = self.tools if side == "agent" else self.user_tools
        if name not in tools or isinstance(arguments, str):
            return super().call(name, arguments, side)
        return self._ask(tools[name], arguments)

    async def _ask(self, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        session = self._session
        if session is None or (session.is_lost and session.server.isolation == "shared"):
            self._session = session = cast("McpDomain", self.domain).connect(self.task)
        result = await session.call(tool.name, arguments)
        return result._replace(ends=tool.ends and not result.failed)

    def reopen(self) -> McpEnvironment:
        return McpEnvironment(cast("McpDomain", self.domain), self.prepared)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and session.server.isolation == "conversation":
            await session.close()


def load_server(beside: str | Path, **more: Any) -> McpDomain:
    """The domain of a folder with `server.toml`, `policy.md` and `tasks.jsonl`.

    The server is started once to learn its tools. `more` are further fields of the domain, such as a
    `reward`.
    """
    folder = Path(beside).resolve()
    folder = folder if folder.is_dir() else folder.parent
    name = str(more.pop("name", folder.name))
    server = read_server(folder / FILE)
    tools = run_aside(list_tools(server, folder))
    database = type("Remote", (Remote,), {"__slots__": ()})
    database.tools = tools
    more.setdefault("reference", str(Path(beside).resolve()))
    more.setdefault("policy_rules", GENERIC)
    return McpDomain(
        name=name,
        policy=read_file(folder / "policy.md"),
        database=database.load({}),
        tasks=from_file(folder, name),
        source="mcp",
        server=server,
        beside=folder,
        **more,
    )


def read_server(path: Path) -> Server:
    with reading(path, DomainError):
        return Server.model_validate(tomllib.loads(read_file(path)))


async def list_tools(server: Server, beside: Path) -> dict[str, Tool]:
    """The tools of a server. Tools that it does not declare read-only count as writing."""
    try:
        session = Session(server, beside)
        try:
            client = await session.client()
            found: list[Any] = []
            cursor: str | None = None
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if not cursor:
                    break
        finally:
            await session.close()
    except ImportError:
        raise ConfigError("MCP servers need the package mcp: pip install 'trialogue[mcp]'") from None
    except DomainError as error:
        raise DomainError(f"{beside / FILE}: {error}") from None
    tools: dict[str, Tool] = {}
    for item in found:
        reads = item.annotations is not None and item.annotations.read_only_hint is True
        parameters = {"type": "object", **clean_schema(item.input_schema)}
        tools[item.name] = Tool(
            item.name,
            item.description or item.name,
            {"properties": {}, **parameters},
            _call_outside,
            writes=not reads,
            ends=item.name in server.ends,
        )
    unknown = sorted({*server.tools, *server.ends} - set(tools))
    if unknown:
        raise DomainError(
            f"{beside / FILE}: the server has no {unknown[0]}; it has {', '.join(sorted(tools))}"
        )
    return {name: tool for name, tool in tools.items() if not server.tools or name in server.tools}


def run_aside(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread until it ends, whether or not an event loop is running here."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((asyncio.run(work), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
