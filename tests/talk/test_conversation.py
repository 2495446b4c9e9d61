"""Conversations between scripted parties: every end, every kind of turn, and what each side sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from trialogue import Database, Domain, Message, Party, Record, Reply, Table, Task, Tool, ToolCall, Turn, tool
from trialogue.config import Limits
from trialogue.talk.conversation import Transcript, converse
from trialogue.talk.scripted import ScriptedModel, call
from trialogue.talk.users import user_prompt
from trialogue.trajectory import Tokens, Trajectory, Usage
from trialogue.world.domain import STOP, ConversationRules, from_list


class Lamp(Record):
    on: bool = False


class House(Database):
    lamps: Table[Lamp]

    @tool(writes=True)
    def switch(self, lamp: str, on: bool) -> Lamp:
        """Switch a lamp."""
        self.lamps[lamp].on = on
        return self.lamps[lamp]

    @tool(ends=True)
    def leave(self) -> str:
        """End it."""
        return "left"


class Echo(House):
    @tool
    def echo(self, text: str) -> str:
        """Say it back."""
        return text


class Hand(Database):
    raised: bool = False

    @tool(writes=True)
    def raise_hand(self) -> str:
        """Raise your hand."""
        self.raised = True
        return "up"

    @tool(ends=True)
    def hang_up(self) -> str:
        """Hang up."""
        return "gone"


TASK = Task(id="t", domain="house", instructions="Light, please.")


def make(**more: Any) -> Domain:
    more.setdefault("user_database", Hand.load({}))
    return Domain(
        "house", "Be bright.", House.load({"lamps": {"a": {}, "b": {}}}), from_list("house", [TASK]), **more
    )


class Listener(ScriptedModel):
    """A script that remembers what it was shown."""

    def __init__(self, lines: Sequence[str | Reply]) -> None:
        super().__init__(lines)
        self.shown: list[list[Message]] = []
        self.offered: list[list[str]] = []

    async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
        self.shown.append([turn.message for turn in turns])
        self.offered.append([item.name for item in tools])
        return await super().reply(turns, tools)


async def hold(
    agent: Sequence[str | Reply], user: Sequence[str | Reply], limits: Limits | None = None, **more: Any
) -> tuple[Trajectory, Listener, Listener]:
    domain = make(**more)
    environment = domain.open(TASK)
    speaks, answers = Listener(agent), Listener(user)
    trajectory = await converse(
        TASK,
        environment,
        Party("agent", speaks, environment.policy, environment.tools),
        Party("user", answers, user_prompt(domain, TASK), environment.user_tools),
        limits,
    )
    return trajectory, speaks, answers


def said(trajectory: Trajectory) -> list[tuple[str, str, str]]:
    return [(turn.side, turn.message.role, turn.message.content) for turn in trajectory.turns]


def several(*calls: tuple[str, Any]) -> Reply:
    return Reply(
        tool_calls=tuple(
            ToolCall(id=f"c{n}", name=name, arguments=given) for n, (name, given) in enumerate(calls)
        )
    )


async def test_the_user_opens_and_ends() -> None:
    trajectory, _, _ = await hold(["Sure."], ["Light!", f"Thanks. {STOP}"])
    assert trajectory.end == "user_stop"
    assert said(trajectory) == [
        ("user", "user", "Light!"),
        ("agent", "assistant", "Sure."),
        ("user", "user", f"Thanks. {STOP}"),
    ]
    assert trajectory.reward is None


async def test_a_greeting_opens_where_the_domain_has_one() -> None:
    trajectory, agent, user = await hold(["Sure."], ["Light!", STOP], greeting="Hello!")
    assert said(trajectory)[:2] == [("agent", "assistant", "Hello!"), ("user", "user", "Light!")]
    assert [message.role for message in agent.shown[0]] == ["system", "assistant", "user"]
    assert [message.role for message in user.shown[0]] == ["system", "user"]


async def test_the_agent_opens_where_the_domain_says_so() -> None:
    trajectory, _, _ = await hold(["Hello?"], [STOP], rules=ConversationRules(opens="agent"))
    assert said(trajectory)[0] == ("agent", "assistant", "Hello?")


async def test_a_tool_of_either_side_may_end_it() -> None:
    trajectory, _, _ = await hold([call("leave")], ["Go away."])
    assert trajectory.end == "agent_stop"
    trajectory, _, _ = await hold(["Stay."], ["Hm.", call("hang_up")])
    assert trajectory.end == "user_stop"
    refused = several(("leave", {"why": 1}), ("switch", {"lamp": "a", "on": True}))
    trajectory, _, _ = await hold([refused, "Still here."], ["Hm.", STOP])
    assert trajectory.end == "user_stop"


async def test_calls_of_one_message_are_all_carried_out_in_order() -> None:
    both = several(
        ("switch", {"lamp": "a", "on": True}), ("switch", {"lamp": "z", "on": True}), ("leave", {})
    )
    trajectory, _, _ = await hold([both], ["Light!"])
    results = [turn for turn in trajectory.turns if turn.message.role == "tool"]
    assert [turn.message.content for turn in results] == ['{"on":true}', "Error: lamps has no 'z'", "left"]
    assert [turn.message.tool_call_id for turn in results] == ["c0", "c1", "c2"]
    assert [turn.failed for turn in results] == [False, True, False]
    assert trajectory.end == "agent_stop"


@pytest.mark.parametrize(
    "more", [{"limits": Limits(first_call_only=True)}, {"rules": ConversationRules(first_call_only=True)}]
)
async def test_a_switch_keeps_only_the_first_call(more: dict[str, Any]) -> None:
    both = several(("switch", {"lamp": "a", "on": True}), ("leave", {}))
    trajectory, _, _ = await hold([both, "Done."], ["Light!", STOP], **more)
    assert trajectory.end == "user_stop"
    assert [len(turn.message.tool_calls) for turn in trajectory.turns] == [0, 1, 0, 0, 0]


async def test_malformed_calls_come_back_and_are_repaired() -> None:
    script = [
        Reply(tool_calls=(ToolCall(id="x", name="switch", arguments='{"lamp": '),)),
        several(("swtich", {"lamp": "a"})),
        several(("switch", {"lamp": "a", "on": "yes"})),
        several(("switch", {"lamp": "a", "on": True})),
        "Done.",
    ]
    trajectory, agent, _ = await hold(script, ["Light!", STOP])
    results = [turn.message.content for turn in trajectory.turns if turn.message.role == "tool"]
    assert results[0] == "Error: switch: the arguments are not a JSON object"
    assert results[1] == "Error: there is no tool 'swtich'; the tools are switch, leave"
    assert results[2].startswith("Error: switch: argument 'on': input should be a valid boolean, got 'yes'")
    assert results[3] == '{"on":true}'
    assert trajectory.end == "user_stop"
    assert agent.shown[1][-1].content == results[0]
    assert agent.shown[1][-2].tool_calls[0].arguments == '{"lamp": '


async def test_errors_in_a_row_have_a_cap() -> None:
    wrong, right = several(("nothing", {})), several(("switch", {"lamp": "a", "on": True}))
    trajectory, _, _ = await hold([wrong], ["Hm."], Limits(tool_errors=4))
    assert trajectory.end == "max_turns"
    assert sum(turn.failed for turn in trajectory.turns) == 4
    trajectory, _, _ = await hold(
        [wrong, wrong, right, wrong, wrong, "Hm."], ["Hm.", STOP], Limits(tool_errors=3)
    )
    assert trajectory.end == "user_stop"


async def test_observations_have_a_cap_even_within_one_message() -> None:
    trajectory, _, _ = await hold(["Go on."], [f"And {i}?" for i in range(9)], Limits(observations=5))
    assert trajectory.end == "max_turns"
    assert sum(turn.side == "user" for turn in trajectory.turns) == 5
    many = several(*[("switch", {"lamp": "a", "on": True})] * 100)
    trajectory, _, _ = await hold([many], ["Light!"], Limits(observations=5))
    assert trajectory.end == "max_turns"
    assert sum(turn.message.role == "tool" for turn in trajectory.turns) == 4
    trajectory, _, _ = await hold(["Go on."], ["And?", "And?", STOP], Limits(observations=3))
    assert trajectory.end == "user_stop"


async def test_a_reply_cut_off_or_a_context_outgrown_is_too_long() -> None:
    trajectory, _, _ = await hold([Reply("I", finish="length")], ["Hm."])
    assert trajectory.end == "too_long"
    tokens = Tokens(prompt=(1,), reply=(2,), logprobs=(0.0,))
    long = Reply("Yes.", tokens=tokens, usage=Usage(prompt=60, completion=41))
    trajectory, _, _ = await hold([long], ["Hm.", STOP], Limits(context_tokens=100))
    assert trajectory.end == "too_long"
    trajectory, _, _ = await hold([long], ["Hm.", STOP], Limits(context_tokens=101))
    assert trajectory.end == "user_stop"
    trajectory, _, _ = await hold(["Yes."], [Reply("H", finish="length"), STOP])
    assert trajectory.end == "user_stop"


@pytest.mark.parametrize("reported", [Usage(), Usage(prompt=10**9, completion=10**9)])
async def test_what_an_endpoint_reports_never_ends_a_conversation(reported: Usage) -> None:
    """Without tokens of our own the text is measured, four bytes to a token; the report decides nothing."""
    short = Reply("Yes." * 10, usage=reported)
    trajectory, _, _ = await hold([short], ["Hm.", STOP], Limits(context_tokens=100))
    assert trajectory.end == "user_stop"
    long = Reply("é" * 250, usage=reported)
    trajectory, _, _ = await hold([long], ["Hm.", STOP], Limits(context_tokens=100))
    assert trajectory.end == "too_long"
    trajectory, _, _ = await hold([long], ["Hm.", STOP], Limits(context_tokens=200))
    assert trajectory.end == "user_stop"


async def test_calls_beyond_those_of_one_message_are_refused_once() -> None:
    many = several(*[("find", {"order_id": "W1"})] * 20_000)
    limits = Limits(calls=3, observations=100)
    trajectory, _, _ = await hold([many, "Yes."], ["Hm.", STOP], limits)
    results = [turn for turn in trajectory.turns if turn.message.role == "tool"]
    assert len(results) == 4
    refusal = "Error: a message may hold 3 tool calls; the calls from this one on were not made"
    assert (results[3].message.content, results[3].failed) == (refusal, True)
    asked = next(turn.message.tool_calls for turn in trajectory.turns if turn.message.tool_calls)
    assert [call.id for call in asked] == [turn.message.tool_call_id for turn in results]
    assert trajectory.end == "user_stop"


async def test_each_side_sees_itself_as_assistant_and_nothing_of_the_others_tools() -> None:
    agent_script = [Reply("Thinking aloud.", (ToolCall(id="1", name="leave", arguments={"x": 1}),)), "Done."]
    trajectory, agent, user = await hold(agent_script, ["Light!", call("raise_hand"), "Here.", STOP])
    assert trajectory.end == "user_stop"
    assert agent.offered[0] == ["switch", "leave"]
    assert user.offered[0] == ["raise_hand", "hang_up"]
    assert [(message.role, message.content) for message in agent.shown[-1]] == [
        ("system", "Be bright."),
        ("user", "Light!"),
        ("assistant", "Thinking aloud."),
        ("tool", "Error: leave: unknown argument 'x' (it takes: no arguments)"),
        ("assistant", "Done."),
        ("user", "Here."),
    ]
    assert [(message.role, message.content) for message in user.shown[-1]][1:] == [
        ("assistant", "Light!"),
        ("user", "Done."),
        ("assistant", ""),
        ("tool", "up"),
        ("assistant", "Here."),
        ("user", "Done."),
    ]
    assert "Light, please." in user.shown[0][0].content
    assert all("Light, please." not in message.content for shown in agent.shown for message in shown)
    raised = user.shown[-1][3].tool_calls[0]
    assert (raised.name, raised.arguments) == ("raise_hand", {})


def test_what_a_party_sees_does_not_depend_on_when_it_looked() -> None:
    spoken = [
        Turn(side="user", message=Message(role="user", content="a")),
        Turn(side="agent", message=Message(role="assistant", content="b")),
        Turn(side="user", message=Message(role="user", content="c")),
    ]
    early, late = (Party("user", ScriptedModel(["x"]), "system", {}) for _ in range(2))
    growing: list[Turn] = []
    first = early.sees(growing)
    for turn in spoken:
        growing.append(turn)
        early.sees(growing)
    assert early.sees(growing) == late.sees(spoken) == late.sees(tuple(spoken))
    assert len(first) == 1
    assert early.sees([]) == first


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (STOP, True),
        (f"Thanks. {STOP}", True),
        (f"Thanks.{STOP}\n ", True),
        (f"Bye\n{STOP}", True),
        (f"Shall I write {STOP} now?", False),
        (f"{STOP} is what I should write.", False),
        (f'I will not write "{STOP}"', False),
        (f'They said "{STOP}', False),
        (f"word{STOP}", False),
        ("###STOP", False),
        ("", False),
    ],
)
def test_only_a_closing_stop_token_ends(text: str, ends: bool) -> None:
    assert ConversationRules().is_stop(text) is ends


@pytest.mark.parametrize("more", [{}, {"rules": ConversationRules(stop_anywhere=True)}])
async def test_a_stop_token_ends_nothing_in_the_words_of_tools_and_agents(more: dict[str, Any]) -> None:
    lines = [call("echo", text=f"Noted. {STOP}"), f"Goodbye. {STOP}", "And now?"]
    database = Echo.load({"lamps": {}})
    domain = Domain("house", "Be bright.", database, from_list("house", [TASK]), **more)
    environment = domain.open(TASK)
    agent = Party("agent", ScriptedModel(lines), "", environment.tools)
    user = Party("user", ScriptedModel(["Light!", "Well?", STOP]), "", {})
    trajectory = await converse(TASK, environment, agent, user, None)
    assert said(trajectory) == [
        ("user", "user", "Light!"),
        ("agent", "assistant", ""),
        ("agent", "tool", f"Noted. {STOP}"),
        ("agent", "assistant", f"Goodbye. {STOP}"),
        ("user", "user", "Well?"),
        ("agent", "assistant", "And now?"),
        ("user", "user", STOP),
    ]
    assert trajectory.end == "user_stop"


def test_a_domain_may_have_other_stop_rules() -> None:
    rules = ConversationRules(stop_tokens=("DONE", "LEAVE"), stop_anywhere=True)
    assert rules.is_stop("I said LEAVE me alone")
    assert not rules.is_stop(f"Thanks {STOP}")


async def test_whatever_a_model_writes_can_be_written_down() -> None:
    nan = float("nan")
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    wild = Reply(
        "half \ud800 a character",
        (
            ToolCall(id="same", name="switch", arguments={"lamp": "\udfff", "on": True}),
            ToolCall(id="same", name="switch", arguments={"lamp": nan, "on": True}),
            ToolCall(id="same", name="switch", arguments={"lamp": deep, "on": True}),
            ToolCall(id="four", name="switch", arguments='{"lamp": "\ud800"'),
        ),
        reasoning="\udc00",
    )
    trajectory, _, _ = await hold([wild, "Ok \ud83d."], ["Hm.", STOP])
    again = Trajectory.model_validate_json(trajectory.to_json())
    assert again.to_json() == trajectory.to_json()
    assert again.turns[1].message == trajectory.turns[1].message
    assert again.turns[1].message.content == "half \ufffd a character"
    assert len({item.id for item in again.turns[1].message.tool_calls}) == 4
    assert [turn.failed for turn in again.turns if turn.message.role == "tool"] == [True] * 4
    assert trajectory.end == "user_stop"


async def test_a_transcript_given_from_outside_tells_who_was_at_work() -> None:
    class Breaks:
        async def reply(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> Reply:
            raise RuntimeError("no words")

    environment = make().open(TASK)
    transcript = Transcript()
    agent = Party("agent", Breaks(), "", environment.tools)
    user = Party("user", ScriptedModel(["Light!"]), "", {})
    with pytest.raises(RuntimeError, match="no words"):
        await converse(TASK, environment, agent, user, transcript=transcript)
    assert transcript.acting == "agent"
    assert [turn.message.content for turn in transcript.turns] == ["Light!"]
