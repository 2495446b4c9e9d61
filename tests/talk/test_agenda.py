"""The rule-based user: what it understands of an agent's free language, what it tells, and when it ends."""

import asyncio
import re
from pathlib import Path

import pytest

from trialogue.errors import ConfigError, DomainError
from trialogue.messages import Message
from trialogue.talk.agenda import Agenda, AgendaUser, make_agenda_user
from trialogue.task import Task
from trialogue.trajectory import Turn
from trialogue.world.domain import STOP
from trialogue.world.domains.shop import domain

CANCEL = {
    "says": ["I'd like to cancel an order."],
    "done": "cancel",
    "about": "cancel",
    "facts": {
        "order_id": {
            "value": "W1234",
            "asked": r"order (?:number|id)|which order",
            "form": r"W\d{4}",
            "says": ["It's {value}."],
        },
        "reason": {
            "value": "found cheaper",
            "asked": r"reason|why",
            "form": "no longer needed|found cheaper",
            "says": ["I found it cheaper."],
        },
    },
}
QUESTION = {"says": ["What does the red lamp cost?"], "answer": r"\d+\.\d\d"}
AGENDA = {
    "patience": 3,
    "facts": {
        "email": {"value": "mira@mail.net", "asked": "e-?mail", "form": r"\w+@[\w.]+\w"},
        "name": {"value": "Mira Tolen", "asked": r"\bname\b"},
        "postcode": {"value": "3041", "asked": "postcode|zip"},
        "phone": {"asked": "phone"},
    },
    "actions": "cancel|return|refund",
    "phrases": {
        "opening": ["Hello. {wish}"],
        "yes": ["Yes."],
        "correct": ["No! {fact}"],
        "unknown": ["I don't remember."],
        "next": ["Next: {wish}"],
        "change": ["Wait. {wish}"],
        "accept": ["A pity."],
        "nudge": ["Well? {wish}"],
        "stop": ["Bye."],
        "give_up": ["I give up."],
    },
}


def make_user(*wishes: dict, **more) -> AgendaUser:
    return AgendaUser(Agenda.model_validate({**AGENDA, "wishes": list(wishes or (CANCEL,)), **more}))


def talk(user: AgendaUser, *texts: str) -> list[str]:
    """What the user says: first to nobody, then to each text of the agent."""
    turns = [Turn(side="user", message=Message(role="system"))]
    said: list[str] = []
    for text in (None, *texts):
        if text is not None:
            turns.append(Turn(side="agent", message=Message(role="user", content=text)))
        words = asyncio.run(user.reply(turns, [])).content
        turns.append(Turn(side="user", message=Message(role="assistant", content=words)))
        said.append(words)
    return said


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Happy to help! Could you please provide your email address?", "mira@mail.net."),
        ("I need to verify you first. Please share your full name and your zip code.", "Mira Tolen. 3041."),
        ("May I have your name along with your postcode or zip?", "Mira Tolen. 3041."),
        ("I've found you. Tell me the order ID and the reason, please.", "It's W1234. I found it cheaper."),
        ("Sure — which order would you like to cancel?", "It's W1234."),
        ("I can't do that without your order number.", "It's W1234."),
        ("I couldn't find that e-mail. Could you give me your name and postcode?", "Mira Tolen. 3041."),
        ("What is the reason: no longer needed or found cheaper?", "I found it cheaper."),
        ("What is your phone number?", "I don't remember."),
        ("Could you give me your date of birth?", "I don't remember."),
        ("It is pending, so it can be cancelled. Shall I?  This cannot be undone. Shall I proceed?", "Yes."),
        ("To confirm: you want to cancel order W1234. Is that correct?", "Yes."),
        ("Please confirm (yes/no) that I may cancel W1234.", "Yes."),
        ("Do you mean W1234?", "Yes."),
        ("Would you like me to go ahead, and what is your e-mail?", "Yes."),
        ("Thanks! Do you want me to cancel it? I also need your postcode.", "3041. Yes."),
        ("Shall I cancel order W9999?", "No! It's W1234."),
        ("Is it order W9999?", "No! It's W1234."),
        ('Should I cancel W1234 for the reason "no longer needed"?', "No! I found it cheaper."),
        ("Shall I return the items?", "No! I'd like to cancel an order."),
        ("Order W1234 has been cancelled. Anything else?", f"Bye. {STOP}"),
        ("I've successfully cancelled W1234, is there anything else I can do for you?", f"Bye. {STOP}"),
        ("Your order is cancelled. A refund will follow. Have a nice day!", f"Bye. {STOP}"),
        ("All done!", f"Bye. {STOP}"),
        ("Cancelled.", f"Bye. {STOP}"),
        ("Order W1234 cancelled! Have a nice day.", f"Bye. {STOP}"),
        ("Order not cancelled.", "Well? I'd like to cancel an order."),
        ("Nothing cancelled.", "Well? I'd like to cancel an order."),
        ("It wasn't cancelled.", "Well? I'd like to cancel an order."),
        ("Order will be cancelled.", "Well? I'd like to cancel an order."),
        ("If cancelled.", "Well? I'd like to cancel an order."),
        ("Cancellation failed.", "Well? I'd like to cancel an order."),
        ("Order W1234 shipped.", "Well? I'd like to cancel an order."),
        ("Unfortunately it has been shipped and can't be cancelled.", f"A pity. Bye. {STOP}"),
        ("That is not possible, it is shipped. Shall I refund it instead?", f"A pity. Bye. {STOP}"),
        ("I’m sorry, I can’t cancel it.", f"A pity. Bye. {STOP}"),
        ("Only pending orders can be cancelled and yours is delivered.", f"A pity. Bye. {STOP}"),
        ("How can I help you?", "I'd like to cancel an order."),
        ("Let me look that up for you. One moment please.", "Well? I'd like to cancel an order."),
        ("I have found your account. Your order is pending.", "Well? I'd like to cancel an order."),
        ("It could be cancelled if you wish.", "Well? I'd like to cancel an order."),
        ("I cannot see it until you verify who you are.", "Well? I'd like to cancel an order."),
        ("Is there anything else?", "Well? I'd like to cancel an order."),
        ("", "Well? I'd like to cancel an order."),
    ],
)
def test_free_language(text: str, answer: str):
    assert talk(make_user(), text) == ["Hello. I'd like to cancel an order.", answer]


SIGNS = {
    "a report": "Bye.",
    "a refusal": "A pity.",
    "a request for a yes": "Yes.",
    "a question for a fact": "555",
}


@pytest.mark.parametrize("kind", SIGNS)
def test_the_examples_of_the_document_are_understood_as_it_says(kind: str):
    """The table in docs/users.md."""
    facts = {"phone": {"value": "555-0101", "asked": "phone"}}
    wish = {"says": ["Please cancel order A101."], "done": "cancel"}
    text = (Path(__file__).parents[2] / "docs" / "users.md").read_text(encoding="utf-8")
    [row] = [line for line in text.splitlines() if line.startswith(f"| {kind} |")]
    understood, other = (re.findall('"([^"]+)"', cell) for cell in row.split("|")[3:5])
    assert len(understood) >= 4
    assert len(other) >= 3
    for words in understood + other:
        reply = make_user(wish, facts=facts, actions=None).respond(words)
        assert reply.startswith(SIGNS[kind]) == (words in understood), (words, reply)


def test_either_or_takes_one_side_and_a_known_one():
    question = "Could I have your e-mail, or your name and postcode?"
    sides = {talk(AgendaUser(make_user().agenda, seed), question)[1] for seed in range(20)}
    assert sides == {"mira@mail.net.", "Mira Tolen. 3041."}
    forgot = {**AGENDA["facts"], "email": {"asked": "e-?mail"}}
    assert {talk(make_user(facts=forgot), question)[1] for _ in range(5)} == {"Mira Tolen. 3041."}


def test_a_question_is_not_settled_by_done():
    said = talk(make_user(QUESTION), "Done.", "I've looked it up.", "The red lamp costs 1,012.50.")
    assert said[1:] == ["Well? What does the red lamp cost?"] * 2 + [f"Bye. {STOP}"]


def test_a_question_is_not_settled_by_a_question():
    said = talk(make_user(QUESTION), "Do you mean the one for 12.50 or the other?")
    assert STOP not in said[1]


def test_wishes_come_one_after_the_other_and_the_end_after_the_last():
    said = talk(
        make_user(CANCEL, QUESTION), "Shall I cancel W1234?", "It has been cancelled.", "It costs 9.99."
    )
    assert said[1:] == ["Yes.", "Next: What does the red lamp cost?", f"Bye. {STOP}"]
    said = talk(make_user(CANCEL, QUESTION), "That cannot be cancelled.", "I am unable to tell you that.")
    assert said[1:] == ["A pity. Next: What does the red lamp cost?", f"A pity. Bye. {STOP}"]


@pytest.mark.parametrize("text", ["Shall I cancel W1234?", "It is cancelled.", "It cannot be cancelled."])
def test_a_change_of_mind_comes_before_the_end(text: str):
    fickle = {**CANCEL, "instead": {"says": ["Keep it."], "done": "kept", "facts": CANCEL["facts"]}}
    said = talk(make_user(fickle), "What is the reason?", text, "Which order?", "It has been kept.")
    assert said[1:] == ["I found it cheaper.", "Wait. Keep it.", "It's W1234.", f"Bye. {STOP}"]


def test_patience_ends():
    useless = ["Hm."] * 4
    said = talk(make_user(), *useless)
    assert said[1:4] == ["Well? I'd like to cancel an order."] * 3
    assert said[4] == f"I give up. {STOP}"
    asked_again = talk(make_user(), *["What is your e-mail?"] * 5)
    assert asked_again[1:5] == ["mira@mail.net."] * 4
    assert asked_again[5] == f"I give up. {STOP}"
    confirmed_again = talk(make_user(), *["Shall I cancel W1234?"] * 5)
    assert confirmed_again[1:] == ["Yes."] * 4 + [f"I give up. {STOP}"]


def test_asked_again_for_the_same_turn_says_the_same():
    user, turns = make_user(), [Turn(side="user", message=Message(role="system"))]
    first, again = (asyncio.run(user.reply(turns, [])).content for _ in range(2))
    assert first == again
    turns.append(Turn(side="user", message=Message(role="assistant", content=first)))
    turns.append(Turn(side="agent", message=Message(role="user", content="Which order?")))
    assert asyncio.run(user.reply(turns, [])).content == asyncio.run(user.reply(turns, [])).content
    late = make_user()  # takes up a conversation that is under way
    assert asyncio.run(late.reply(turns, [])).content == "It's W1234."


def test_words_depend_on_task_and_seed_only():
    task = domain.tasks("test", 1, levels=(5,))[0]
    texts = ("Your name and postcode?", "Which order number?", "Shall I go ahead?", "Hm.", "Hm.")
    assert talk(make_agenda_user(task, 3), *texts) == talk(make_agenda_user(task, 3), *texts)
    several = {tuple(talk(make_agenda_user(task, seed), *texts)) for seed in range(20)}
    assert len(several) > 5


QUIET = (
    "Hello, welcome to our shop!",
    "One moment please, I am looking that up.",
    "I see an order here. It is pending.",
    "Shall I go ahead?",
    "I understand. Let me know if you need anything else.",
    "Thank you for your patience.",
    "How can I help you today?",
    "Could you tell me your date of birth and your phone number?",
)


def test_no_fact_is_told_unasked():
    for task in domain.tasks("test", 200, seed=5):
        agenda = task.meta["agenda"]
        wishes = [wish for first in agenda["wishes"] for wish in (first, first.get("instead")) if wish]
        volunteered = " ".join(text for wish in wishes for text in wish["says"])
        facts = [*agenda["facts"].values(), *(fact for wish in wishes for fact in wish["facts"].values())]
        secrets = [fact["value"] for fact in facts if fact["value"] and fact["value"] not in volunteered]
        said = " ".join(talk(make_agenda_user(task, 1), *QUIET))
        assert not [value for value in secrets if value in said], task.id


def test_what_was_forgotten_is_never_told():
    questions = (
        "What is your e-mail?",
        "What is the order number?",
        "Which order?",
        "Please give me your e-mail.",
    )
    for task in domain.tasks("train", 60, families=("forgetful",)):
        customer = next(iter(task.setup.data["customers"].values()))
        said = " ".join(talk(make_agenda_user(task, 0), *questions))
        assert not re.search(r"W\d{4}", said)
        if task.meta["agenda"]["facts"]["email"]["value"] is None:
            assert customer["email"] not in said
            assert "remember" in said


def test_wrong_agendas_are_explained():
    task = Task(id="a", domain="d", instructions="")
    with pytest.raises(ConfigError, match=r"task a has no meta\['agenda'\]"):
        make_agenda_user(task, 0)
    for agenda, complaint in [
        ({"wishes": []}, "agenda, wishes: "),
        ({"wishes": [{"says": ["x"], "answer": "("}]}, r"agenda, wishes.0.answer: .*no regular expression"),
        ({"wishes": [{"says": ["x"], "want": "y"}]}, "agenda, wishes.0.want: "),
    ]:
        with pytest.raises(DomainError, match=complaint):
            make_agenda_user(task.model_copy(update={"meta": {"agenda": agenda}}), 0)


def test_a_text_that_contradicts_itself_settles_nothing() -> None:
    doubtful = "Order W1234 has been cancelled. No, wait, nothing was cancelled."
    said = talk(make_user(), doubtful, *[doubtful] * 3)
    assert said[1] == "That contradicts itself. Which of it is true?"
    assert STOP not in said[1]
    assert said[-1] == f"I give up. {STOP}", "and at last the user leaves, politely"
    assert talk(make_user(), doubtful, "Order W1234 has been cancelled.")[-1] == f"Bye. {STOP}"


def test_a_text_that_never_ends_is_not_read() -> None:
    endless = "Order W1234 has been cancelled. " * 1000
    assert talk(make_user(), endless)[1] == f"That is too much to read. {CANCEL['says'][0]}"
    assert talk(make_user(), *[endless] * 4)[-1] == f"I give up. {STOP}"


def test_a_user_withdraws_at_the_last_moment() -> None:
    user = make_user(
        {**CANCEL, "withdrawn": True}, QUESTION, phrases={**AGENDA["phrases"], "withdraw": ["No. Leave it."]}
    )
    said = talk(user, "Shall I cancel order W1234?", "All right, it stays as it is.", "It costs 12.50.")
    assert said[1:] == ["No. Leave it.", "Next: What does the red lamp cost?", f"Bye. {STOP}"]


def test_a_user_claims_to_be_known_once() -> None:
    user = make_user(claims=True, phrases={**AGENDA["phrases"], "claim": ["You know me."]})
    assert talk(user, "What is your e-mail?", "What is your e-mail?")[1:] == [
        "You know me.",
        "mira@mail.net.",
    ]
