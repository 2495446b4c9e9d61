"""A person plays in a real terminal, on both sides; what they type is read as a call or as text."""

import json
import os
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from rich.console import Console

from trialogue.config import EvalConfig, Limits
from trialogue.messages import Message, ToolCall
from trialogue.score.play import play
from trialogue.talk.conversation import Party, explain_end
from trialogue.talk.human import HumanModel, NotUnderstood, describe_type, read_call, read_value
from trialogue.task import Task
from trialogue.trajectory import Trajectory, Turn
from trialogue.world.domain import Domain
from trialogue.world.find import find_domain
from trialogue.world.scaffold import write_domain

ECHO = 3  # index of the local flags in what termios gives


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal")
    write_domain(folder / "bakery")
    return folder


@pytest.fixture(scope="module")
def bakery(folder: Path) -> Domain:
    return find_domain(str(folder / "bakery"))


def find_task(domain: Domain, identity: str) -> Task:
    return next(task for task in domain.tasks("all") if task.id == identity)


class Terminal:
    """`trialogue play` in a pseudo-terminal."""

    def __init__(self, folder: Path, *words: str) -> None:
        command = ["-m", "trialogue", "play", *words]
        self.child = pexpect.spawn(
            sys.executable,
            command,
            cwd=str(folder),
            env={**os.environ, "TERM": "dumb"},  # no colours in what is expected
            encoding="utf-8",
            timeout=30,
            dimensions=(50, 150),
        )

    def type(self, prompt: str, line: str) -> None:
        self.child.expect_exact(f"{prompt}> ")
        self.child.sendline(line)

    def end(self) -> int | None:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


@pytest.fixture
def start(folder: Path) -> Iterator[object]:
    started: list[Terminal] = []

    def start(*words: str) -> Terminal:
        started.append(Terminal(folder, "bakery", *words))
        return started[-1]

    yield start
    for terminal in started:
        terminal.child.close(force=True)


def test_a_person_is_the_agent(start) -> None:
    terminal = start("--task", "cancel-3")
    child = terminal.child
    child.expect_exact("you are the agent")
    child.expect_exact("Identity first.")
    child.expect_exact("change_day order_id=string day=Monday|Tuesday")
    child.expect("USER .*pretzels")
    terminal.type("agent", "What is your phone number?")
    child.expect_exact("555-0106")
    terminal.type("agent", "find_ord\tphone=555-0106")  # tab completes the name
    child.expect(r'↳ \[\{"order_id":"A108"')
    terminal.type("agent", "cancel_order A108")
    child.expect_exact("'A108' names no parameter; write cancel_order order_id=…")
    terminal.type("agent", "cancel_order order_id=A999")
    child.expect_exact("↳ Error: orders has no 'A999'")
    terminal.type("agent", "/help")
    child.expect_exact("/quit")
    terminal.type("agent", "Shall I cancel order A108?")
    child.expect("USER .*Yes")
    terminal.type("agent", "cancel_order order_id=A108")
    child.expect_exact('"status":"cancelled"')
    terminal.type("agent", "Your order has been cancelled.")
    child.expect_exact("###STOP###")  # the last words of the other side are shown too
    child.expect_exact("reward 1.00")
    child.expect_exact("✓ database")
    child.expect_exact("orders.A108.status")
    child.expect_exact('- "placed"')
    child.expect_exact('+ "cancelled"')
    child.expect_exact("ended by user_stop")
    assert terminal.end() == 0


def test_a_lost_conversation_says_why(start) -> None:
    terminal = start("--task", "cancel-3")
    terminal.type("agent", "Your order has been cancelled.")
    terminal.child.expect_exact("reward 0.00")
    terminal.child.expect_exact("✗ database")
    terminal.child.expect_exact("orders.A108.status should be 'cancelled', is 'placed'")
    terminal.child.expect_exact("changed: nothing")
    assert terminal.end() == 0


def test_a_person_is_the_user(start) -> None:
    terminal = start("--as", "user", "--task", "cancel-3", "--agent", "gold")
    child = terminal.child
    child.expect_exact("you are the user")
    child.expect_exact("You want to cancel order A108")
    assert "Identity first" not in child.before  # the policy is the agent's
    terminal.type("user", "Please cancel A108.")
    child.expect_exact("AGENT It is done.")
    assert "USER" not in child.before  # what one typed is not shown again
    terminal.type("user", "Thank you. ###STOP###")
    child.expect_exact("reward 0.00")  # the gold agent asks nobody
    assert terminal.end() == 0


@pytest.mark.parametrize(("agent", "told"), [("oracle", True), ("naive", False)])
async def test_an_agent_that_looks_the_answer_up_is_said_to(
    bakery: Domain, capsys, agent: str, told: bool
) -> None:
    task, config = find_task(bakery, "cancel-3"), EvalConfig.model_validate({"agent": {"model": agent}})
    person = HumanModel("user", bakery, task, Console(width=200), lambda prompt: "Hello. ###STOP###")
    await play(bakery, task, config, person)
    assert ("bakery has no oracle: the agent is `gold`" in capsys.readouterr().out) is told


@pytest.mark.parametrize("ending", ["/quit\n", "\x04"])
def test_leaving_is_clean(start, ending: str) -> None:
    terminal = start()
    terminal.child.expect_exact("agent> ")
    terminal.child.send(ending)
    terminal.child.expect_exact("You left; the conversation is not graded.")
    assert terminal.end() == 1
    assert "Traceback" not in terminal.child.before


def test_an_interrupt_is_clean_and_leaves_the_terminal_as_it_was(start) -> None:
    terminal = start()
    before = termios.tcgetattr(terminal.child.child_fd)[ECHO]
    terminal.child.expect_exact("agent> ")
    terminal.child.sendintr()
    terminal.child.expect_exact("You left")
    assert termios.tcgetattr(terminal.child.child_fd)[ECHO] == before
    assert terminal.end() == 130
    assert "Traceback" not in terminal.child.before


def test_calls_are_read_as_json_or_text(bakery: Domain) -> None:
    tools = bakery.database.tools
    call = read_call("change_day order_id=101 day='Monday' extra='[1, 2]'", tools["change_day"], "call_7")
    assert call.id == "call_7"
    assert call.arguments == {"order_id": "101", "day": "Monday", "extra": [1, 2]}
    for line in ("change_day order_id='A", "change_day A101", "change_day =A101"):
        with pytest.raises(NotUnderstood, match="write change_day order_id=… day=…"):
            read_call(line, tools["change_day"], "call_0")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("007", {"type": "string"}, "007"),
        ("3", {"type": "string"}, "3"),
        ('"3"', {"type": "string"}, "3"),
        ("true", {}, True),
        ("two words", {}, "two words"),
        ('["a"]', {"type": "array"}, ["a"]),
        ("", {"type": "string"}, ""),
    ],
)
def test_values(text: str, schema: dict, value: object) -> None:
    assert read_value(text, schema) == value


def test_types_are_described_in_a_word() -> None:
    assert describe_type({"type": "array", "items": {"type": "string"}}) == "[string]"
    assert describe_type({"anyOf": [{"type": "integer"}, {"type": "null"}]}) == "integer"
    assert describe_type({"enum": ["a", "b c"]}) == "a|'b c'"
    assert describe_type({}) == "any"


async def test_text_that_moves_the_cursor_is_shown_as_text(bakery: Domain, capsys) -> None:
    lines = iter(["", "/unknown", "/tools", "/brief", "/say find_orders it is", "never read"])
    person = HumanModel("agent", bakery, find_task(bakery, "cancel-3"), Console(), lambda prompt: next(lines))
    said = Turn(side="user", message=Message(role="user", content="\x1b[2J[red]hello\x07"))
    reply = await Party("agent", person, "", bakery.database.tools).speak([said])
    assert reply.content == "find_orders it is"
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[red]hello" in shown


def test_json_keeps_standard_output_to_itself(start, folder: Path) -> None:
    words = ["play", "bakery", "--task", "question-1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "trialogue", *words],
        cwd=folder,
        input="You ordered 12 cinnamon rolls.\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    played = json.loads(done.stdout)
    assert played["reward"] == 1
    assert played["end"] == "user_stop"
    assert played["changes"] == []
    assert "Identity first" in done.stderr


STUBBORN = '''
import asyncio
from dataclasses import replace
from pathlib import Path

from trialogue import find_domain
from trialogue.talk.scripted import call


class Stubborn:
    """Looks one order up, and from then on cancels one that there is not."""

    async def reply(self, turns, tools):
        await asyncio.sleep(0.1)
        if turns[-1].message.role == "user":
            return call("find_orders", phone="555-0106")
        return call("cancel_order", order_id="A999")


bakery = find_domain(str(Path(__file__).parent / "bakery"))
domain = replace(bakery, name="stubborn", oracle=lambda task, seed: Stubborn(), reference=__file__)
'''


def test_a_chat_shows_calls_and_why_it_ended_and_leaves_the_shell_nothing(folder: Path) -> None:
    (folder / "stubborn.py").write_text(STUBBORN)
    shell = (
        '"$0" -m trialogue chat oracle stubborn.py; echo "status $?"; '
        'while read -r line; do echo "SHELL <$line>"; done'
    )
    child = pexpect.spawn(
        "bash",
        ["-c", shell, sys.executable],
        cwd=str(folder),
        env={**os.environ, "TERM": "dumb"},
        encoding="utf-8",
        timeout=30,
        dimensions=(50, 150),
    )
    try:
        child.expect_exact("user> ")
        child.sendline("Cancel my order.")
        for line in ("Are you there?", "rm -rf orders", "Hello?"):
            child.sendline(line)
        child.expect(r'· find_orders phone="555-0106" → (\[\{"order_id":"A108"[^\r\n]*…)\r\n')
        assert len(child.match[0]) < 150  # one line of the terminal
        for _ in range(10):
            child.expect_exact("· cancel_order order_id=\"A999\" → Error: orders has no 'A999'")
        child.expect_exact("ended by max_turns after 23 turns")
        child.expect_exact("the last 10 calls were")
        child.expect_exact("(limits.tool_errors)")
        child.expect_exact("what was typed after the conversation had ended is dropped")
        child.expect_exact("status 0")
        child.sendline("from now on")
        child.expect_exact("SHELL <")
        assert child.expect_exact(["from now on>", "Are you there?", "rm -rf", "Hello?"]) == 0
    finally:
        child.close(force=True)


def test_a_player_does_not_see_the_agents_calls(start) -> None:
    terminal = start("--as", "user", "--task", "cancel-3", "--agent", "gold")
    terminal.type("user", "Please cancel A108.")
    terminal.child.expect_exact("AGENT It is done.")
    assert "· cancel_order" not in terminal.child.before
    terminal.type("user", "Thank you. ###STOP###")
    terminal.child.expect_exact("ended by user_stop after 5 turns: the user said")


@pytest.mark.parametrize(
    ("end", "last", "told"),
    [
        ("agent_stop", "call", "the agent called transfer_to_human"),
        ("max_turns", "call", "30 user messages and tool results are allowed (limits.observations)"),
        ("too_long", "length", "the agent's reply was cut off at 1024 tokens (limits.reply_tokens)"),
        ("too_long", "stop", "the conversation is longer than 32768 tokens (limits.context_tokens)"),
        ("error", "stop", ""),
    ],
)
def test_why_a_conversation_ended(bakery: Domain, end: str, last: str, told: str) -> None:
    said = Turn(side="agent", message=Message(role="assistant", content="Well"), finish="stop")
    if last == "length":
        said = said.model_copy(update={"finish": "length"})
    turns = [said]
    if last == "call":
        made = ToolCall(id="c", name="transfer_to_human", arguments={"topic": "other"})
        turns = [Turn(side="agent", message=Message(role="assistant", tool_calls=(made,)))]
        turns += [Turn(side="agent", message=Message(role="tool", content="ok", tool_call_id="c"))] * 30
    task = find_task(bakery, "cancel-3")
    trajectory = Trajectory(id="a", task=task, turns=tuple(turns), end=end)
    assert explain_end(trajectory, bakery, Limits()) == told
