"""A rule-based user with tools: what is taken for a request to use one, and what the user tells of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest

from trialogue import Database, Message, Turn, tool
from trialogue.talk.agenda import Agenda, AgendaUser
from trialogue.talk.user_tools import find_requests


class Phone(Database):
    on: bool = True

    @tool
    def read_status_bar(self) -> str:
        """Read what the phone shows in its top line."""
        return "no signal"

    @tool(writes=True)
    def set_mobile_data(self, on: bool) -> str:
        """Switch mobile data on or off."""
        return "on" if on else "off"

    @tool(writes=True)
    def set_mobile_data_roaming(self, on: bool) -> str:
        """Switch data roaming on or off."""
        return "on" if on else "off"

    @tool(writes=True)
    def choose_network(self, kind: Literal["4G", "5G"], tries: int = 1) -> str:
        """Choose the kind of network."""
        return kind

    @tool(writes=True)
    def enter_pin(self, pin: str) -> str:
        """Type the PIN."""
        return "unlocked"


TOOLS = list(Phone.load({}).tools.values())


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("Please read your status bar.", [("read_status_bar", {})]),
        ("Could you tell me what the phone shows in its top line?", [("read_status_bar", {})]),
        ("Could you read what the phone shows in the top line?", [("read_status_bar", {})]),
        ("Now turn mobile data off.", [("set_mobile_data", {"on": False})]),
        ("You need to switch on mobile data roaming.", [("set_mobile_data_roaming", {"on": True})]),
        ("Please check whether mobile data is on.", []),
        ("Please switch mobile data on or off.", []),
        ("Shall I switch mobile data on?", []),
        ("I have switched mobile data on, please wait.", []),
        ("Mobile data off.", []),
        ("Please choose the network: 5G, 2 tries.", [("choose_network", {"kind": "5G", "tries": 2})]),
        ("Please choose the network: 5G, -2 tries.", [("choose_network", {"kind": "5G", "tries": -2})]),
        ("Please choose the network: 5G, 2.5 tries.", [("choose_network", {"kind": "5G"})]),
        (f"Please choose the network: 5G, {'9' * 400} tries.", [("choose_network", {"kind": "5G"})]),
        ("Please choose a network.", []),
        ("Please enter your PIN.", [("enter_pin", {"pin": "1234"})]),
        ('Please enter the PIN "9876".', [("enter_pin", {"pin": "9876"})]),
        (
            "Thanks. Please read the status bar. Then switch mobile data on.",
            [("read_status_bar", {}), ("set_mobile_data", {"on": True})],
        ),
    ],
)
def test_what_is_taken_for_a_request(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert find_requests(text, TOOLS, {}, {"pin": "1234"}) == calls


def test_the_examples_of_the_document_are_understood_as_it_says() -> None:
    """The table in docs/users.md."""
    text = (Path(__file__).parents[2] / "docs" / "users.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| a request to use a tool")]
    understood, other = (re.findall('"([^"]+)"', cell) for cell in row.split("|")[3:5])
    assert len(understood) >= 4
    assert len(other) >= 3
    for words in understood + other:
        calls = find_requests(words, TOOLS, {}, {})
        assert (calls != []) == (words in understood), words
        assert all(name == "set_mobile_data" for name, _ in calls)


def test_a_pattern_of_the_agenda_names_a_tool_in_other_words() -> None:
    assert find_requests("Please reboot.", TOOLS, {}, {}) == []
    assert find_requests("Please reboot.", TOOLS, {"read_status_bar": "reboot"}, {}) == [
        ("read_status_bar", {})
    ]


async def test_the_user_uses_the_tool_and_tells_what_it_shows() -> None:
    agenda = Agenda.model_validate({"patience": 1, "wishes": [{"says": ["No signal."], "done": "signal"}]})
    user = AgendaUser(agenda)
    turns: list[Turn] = []

    async def hear(text: str, role: Literal["user", "tool"] = "user", failed: bool = False) -> Turn:
        turns.append(Turn(side="agent", message=Message(role=role, content=text), failed=failed))
        reply = await user.reply(turns, TOOLS)
        turns.append(
            Turn(
                side="user",
                message=Message(role="assistant", content=reply.content, tool_calls=reply.tool_calls),
            )
        )
        return turns[-1]

    assert "No signal." in (await user.reply([], TOOLS)).content
    turns.append(Turn(side="user", message=Message(role="assistant", content="No signal.")))
    asked = await hear("Please read the status bar.")
    assert [call.name for call in asked.message.tool_calls] == ["read_status_bar"]
    assert "no signal" in (await hear("no signal", "tool")).message.content
    await hear("Please switch mobile data on.")
    told = await hear("Error: the SIM is locked.", "tool", failed=True)
    assert told.message.content == "That does not work: the SIM is locked."
    for _ in range(2):  # the same once more, and once more: the patience ends
        await hear("Please switch mobile data on.")
        told = await hear("Error: the SIM is locked.", "tool", failed=True)
    assert told.message.content.endswith("###STOP###")
