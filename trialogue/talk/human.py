"""A person at the terminal speaks for one side: text is said, `get_order order_id=W1` calls a tool.

The line is read in a thread of its own, so nothing else waits for the person. Leaving (`/quit`, end of input)
interrupts whatever the person was part of, as Ctrl-C does.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import re
import select
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

from trialogue.activity import phase, silence
from trialogue.messages import ToolCall
from trialogue.output import echo
from trialogue.screen import Screen, block, one_line
from trialogue.talk.model import Model, ModelSource
from trialogue.task import Side, Task
from trialogue.trajectory import Reply, Turn
from trialogue.world.domain import Domain
from trialogue.world.tools import Tool

COLOURS = {"agent": "dodger_blue1", "user": "deep_pink3"}
_WRITTEN = re.compile(r"^[\w.-]+=")


class NotUnderstood(Exception):
    """A line that is neither text nor a call; its text tells the person why."""


@dataclass
class HumanModel:
    """Shows what this side may see and asks for its next line."""

    side: Side
    domain: Domain
    task: Task
    console: Screen = field(default_factory=Screen)
    ask: Callable[[str], str] = input
    """Reads one line, showing a prompt; raises EOFError at the end of the input."""
    note: str = ""
    """What the person has to know of the other side before it begins."""
    shows_calls: bool = False
    """Whether the person sees the other side's tool calls, each on one line."""
    left: bool = False
    """Whether the person left of their own accord."""
    _shown: int = 0
    _calls: int = 0
    _answered: int = 0
    """How many of the other side's tool results have been shown."""

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        known = {tool.name: tool for tool in tools}
        if not self._shown:
            self._open(known)
        self.show(turns)
        with _completion(known):
            while True:
                reply = self._read(await self._next_line(), known)
                if reply is not None:
                    return reply

    def show(self, turns: Sequence[Turn]) -> None:
        """Print what has been said and answered since the last time."""
        other: Side = "user" if self.side == "agent" else "agent"
        for turn in turns[max(self._shown, 1) :]:
            message = turn.message
            if message.role == "tool":
                self._print("  ↳ ", message.content, "red" if turn.failed else "bright_black")
            elif message.role == "user":
                self._print(f"{other.upper():5} ", message.content, COLOURS[other])
            elif not self._shown and message.content and not message.tool_calls:  # said before we came
                self._print(f"{self.side.upper():5} ", message.content, COLOURS[self.side])
        self._shown = len(turns)

    def watch(self, source: ModelSource) -> ModelSource:
        """The other side's models, whose calls are shown here as they are answered."""
        return lambda task, seed: _Watched(source(task, seed), self)

    def show_calls(self, turns: Sequence[Turn]) -> None:
        """Print the other side's calls that have been answered since the last time, a line for each."""
        if not self.shows_calls:
            return
        theirs = [turn for turn in turns if turn.side != self.side]
        calls = {call.id: call for turn in theirs for call in turn.message.tool_calls}
        results = [turn for turn in theirs if turn.message.role == "tool"]
        for turn in results[self._answered :]:
            call = calls.get(turn.message.tool_call_id or "")
            given = "" if call is None else _to_words(call.arguments)
            made = f"{'?' if call is None else call.name} {given}".strip()
            line = f"{fold(made, self.console.width // 2)} → {turn.message.content}"
            self._print("· ", fold(line, self.console.width - 4), "red" if turn.failed else "bright_black")
        self._answered = len(results)

    async def _next_line(self) -> str:
        try:
            with silence():
                return await _in_thread(lambda: self.ask(f"{self.side}> "))
        except EOFError:
            self._leave()

    def _leave(self) -> NoReturn:
        self.left = True
        raise KeyboardInterrupt

    def _open(self, tools: Mapping[str, Tool]) -> None:
        what = self.domain.policy if self.side == "agent" else self.task.instructions
        title = "The policy you follow" if self.side == "agent" else "What you want"
        self.console.rule(f"{self.domain.name} · you are the {self.side}", align="left")
        self.console.print(one_line(title, "bold"))
        self._print("  ", what.strip(), "default")
        self.console.print()
        self._list_tools(tools)
        self._help(tools)
        if self.note:
            self.console.print(one_line(self.note, "yellow"), soft_wrap=True)
        self.console.rule()

    def _help(self, tools: Mapping[str, Tool]) -> None:
        example = next(iter(tools.values()), None)
        lines = ["Write what you say and press Enter."]
        if example is not None:
            words = [f"{name}=…" for name in example.parameters.get("properties", {})]
            lines.append(f"Call a tool: {' '.join([example.name, *words])}   (values are JSON or text)")
        if self.side == "user":
            lines.append(
                f"End the conversation with {self.domain.rules.stop_tokens[0]} after your last words."
            )
        lines.append("/help this · /tools · /brief · /say TEXT says a line that looks like a call · /quit")
        for text in lines:
            self.console.print(one_line(text, "bright_black"), soft_wrap=True)

    def _list_tools(self, tools: Mapping[str, Tool]) -> None:
        if not tools:
            return
        self.console.print(one_line("Tools", "bold"))
        for tool in tools.values():
            shown = one_line(f"  {tool.name}", "bold")
            for name in tool.parameters.get("properties", {}):
                optional = name not in tool.parameters.get("required", ())
                kind = describe_type(tool.parameters["properties"][name])
                shown.append_text(one_line(f" {name}{'?' if optional else ''}={kind}", "cyan"))
            shown.append_text(one_line(f"  {tool.description.splitlines()[0]}", "bright_black"))
            self.console.print(shown, soft_wrap=True)

    def _read(self, line: str, tools: Mapping[str, Tool]) -> Reply | None:
        """The reply a line stands for; None where it was a request to the terminal itself."""
        line = line.strip()
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            self._leave()
        if command == "/say" and rest.strip():
            return Reply(rest.strip(), has_patience=True)
        if command == "/tools":
            self._list_tools(tools)
        elif command == "/brief":
            text = self.domain.policy if self.side == "agent" else self.task.instructions
            self._print("  ", text.strip(), "default")
        elif line.startswith("/"):
            self._help(tools)
        elif command in tools:
            try:
                call = read_call(line, tools[command], f"call_{self._calls}")
            except NotUnderstood as problem:
                self.console.print(one_line(str(problem), "red"), soft_wrap=True)
                return None
            self._calls += 1
            return Reply(tool_calls=(call,))
        elif line:
            return Reply(line, has_patience=True)
        return None

    def _print(self, mark: str, text: str, style: str) -> None:
        self.console.print(block(mark, text, style), soft_wrap=True)


class _Watched:
    """A model whose tool calls a person is shown."""

    def __init__(self, model: Model, person: HumanModel) -> None:
        self._model, self._person = model, person

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        self._person.show_calls(turns)
        with phase("waiting for the other side"):
            return await self._model.reply(turns, tools)


def _to_words(arguments: dict[str, Any] | str) -> str:
    if isinstance(arguments, str):
        return arguments
    return " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())


def fold(text: str, width: int) -> str:
    """A text on one line of this width.

    >>> fold("two lines,\\nof which the second is long", 20)
    'two lines, of which…'
    """
    line = " ".join(text[: 4 * width].split())
    return line if len(line) <= width and len(text) <= 4 * width else f"{line[: max(width - 1, 0)]}…"


def ask_aside(prompt: str) -> str:
    """Read a line with the prompt on standard error, where standard output belongs to a result."""
    echo(prompt, err=True, nl=False)
    return input()


def read_call(line: str, tool: Tool, identity: str) -> ToolCall:
    """Read `name key=value …`: values are JSON where they can be, else text; quotes as in a shell."""
    fields: Mapping[str, Any] = tool.parameters.get("properties", {})
    allowed = " ".join([tool.name, *(f"{name}=…" for name in fields)])
    try:
        words = shlex.split(line)[1:]
    except ValueError as error:
        raise NotUnderstood(f"{error}; write {allowed}") from None
    arguments: dict[str, Any] = {}
    for word in words:
        if not _WRITTEN.match(word):
            raise NotUnderstood(f"'{word}' names no parameter; write {allowed}, or /say {line}")
        name, _, value = word.partition("=")
        arguments[name] = read_value(value, fields.get(name, {}))
    return ToolCall(id=identity, name=tool.name, arguments=arguments)


def read_value(text: str, schema: Mapping[str, Any]) -> Any:
    """A typed value: JSON where it can be. A text parameter keeps `007` and `true` as they are written."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text
    return text if schema.get("type") == "string" and not isinstance(value, str) else value


def describe_type(schema: Mapping[str, Any]) -> str:
    """A parameter's type in a word or two, such as `string` or `a|b`."""
    if "enum" in schema:
        return "|".join(shlex.quote(str(value)) for value in schema["enum"])
    if "anyOf" in schema:
        kinds = [describe_type(option) for option in schema["anyOf"] if option.get("type") != "null"]
        return "|".join(kinds)
    if schema.get("type") == "array":
        return f"[{describe_type(schema.get('items', {}))}]"
    return str(schema.get("type", schema.get("const", "any")))


async def _in_thread(read: Callable[[], str]) -> str:
    """Run a blocking read beside the event loop. The thread is a daemon: a person who never answers does
    not keep the program from ending, which the loop's own pool of threads would."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def settle(line: str | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(line or "")

    def work() -> None:
        line, error = None, None
        try:
            line = read()
        except (EOFError, OSError, ValueError, KeyboardInterrupt) as problem:
            error = EOFError(str(problem))
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, line, error)

    restore = _terminal_state()
    _drop_at_exit()
    threading.Thread(target=work, daemon=True).start()
    try:
        return await answer
    finally:
        restore()


def _terminal_state() -> Callable[[], None]:
    """What puts the terminal back as it is now: line editing changes it while a line is being read."""
    try:
        import termios

        state = termios.tcgetattr(sys.stdin)
    except (ImportError, OSError, ValueError):
        return lambda: None
    except Exception as error:  # termios.error is no OSError
        if type(error).__module__ != "termios":
            raise
        return lambda: None

    def restore() -> None:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, state)

    return restore


@cache
def _drop_at_exit() -> None:
    atexit.register(_drop_typed)


def _drop_typed() -> None:
    """Drop what was typed and not read: the shell would run it as commands."""
    if not sys.stdin.isatty():
        return
    with suppress(ImportError):
        import termios

        if select.select([sys.stdin], [], [], 0)[0]:
            echo("what was typed after the conversation had ended is dropped", err=True)
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


class _completion:  # noqa: N801 - reads as a verb phrase: with _completion(tools)
    """Tab completes tool names, then the names of their parameters, where the platform has readline."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools

    def __enter__(self) -> None:
        with suppress(ImportError):
            import readline

            libedit = "libedit" in (readline.__doc__ or "")
            readline.set_completer_delims(" ")
            readline.set_completer(self.complete)
            readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")

    def __exit__(self, *_: object) -> None:
        with suppress(ImportError):
            import readline

            readline.set_completer(None)

    def complete(self, text: str, number: int) -> str | None:
        import readline

        before = readline.get_line_buffer()[: readline.get_begidx()].split()
        if before:
            tool = self._tools.get(before[0])
            words = [f"{name}=" for name in tool.parameters.get("properties", {})] if tool else []
        else:
            words = [f"{name} " for name in self._tools]
        found = [word for word in words if word.startswith(text)]
        return found[number] if number < len(found) else None
