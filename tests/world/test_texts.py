"""What rules read from a text is the same whether it was kept for its form or worked out for itself."""

from __future__ import annotations

import re
from random import Random

import pytest

from trialogue.messages import Message
from trialogue.score.compliance import find_breaches
from trialogue.trajectory import Turn
from trialogue.world.policy_rules import Rule, never
from trialogue.world.policy_speech import claims, recites
from trialogue.world.speech import REPORTS, is_proposal, is_yes, split_sentences
from trialogue.world.texts import Text, by_form, forget_texts, is_blind_to_digits, squash

TEXTS = (
    "Order W9449 has been cancelled. The total was 52.99!  Anything else?\nIt's done\n\n yes",
    "Shall I change the payment method of order W2547 to mastercard 6091?",
    "No, wait: it’s İ2 ſet, K9 and ٣٤, 5² of #A-17.\u2028All ſet. I have returned 3 items",
    "half a pair \ud800 12.50, (13.5) 'W1' and nothing",
    "",
)
SPLIT = re.compile(r"(?<=[.!?])\s+|\n+")


def change_digits(text: str, random: Random) -> str:
    return re.sub("[0-9]", lambda _: str(random.randrange(10)), text)


@pytest.mark.parametrize("text", [*TEXTS, " ".join(TEXTS), "x" * 700 + TEXTS[0] * 9])
def test_texts_of_one_form_are_read_alike(text: str) -> None:
    random = Random(len(text))
    for own in (text, *(change_digits(text, random) for _ in range(5))):
        for _ in range(2):  # the second time it is kept
            read = Text(own)
            statements = [part for part in split_sentences(read.lowered) if not part.endswith("?")]
            assert read.statements == statements
            assert read.reports == [part for part in statements if REPORTS.search(part)]
            assert read.vocabulary == set(re.findall("[a-z]+", read.lowered))
            assert read.squashed == squash(own) == re.sub(r"[\W_]+", "", own.lower())
            assert (read.is_proposal, read.is_yes) == (is_proposal(own), is_yes(own))
            tokens = re.findall(r"(?<!\S)[\w#@$€£('\"+.:/-]*\d[\w#@.,:/%-]*", own)
            values = [token.strip("#$€£('\"+.,:/-%") for token in tokens]
            assert read.values == [value for value in values if len(squash(value)) > 2]
    forget_texts()


def test_sentences_end_where_the_plain_pattern_says() -> None:
    random = Random(0)
    for _ in range(3_000):
        text = "".join(random.choices("aB.!? \n\t\u2028’", k=random.randrange(30)))
        plain = [part.strip() for part in SPLIT.split(text.replace("’", "'"))]
        assert split_sentences(text) == [part for part in plain if part]


def test_what_depends_on_digits_is_not_kept_for_others() -> None:
    assert is_blind_to_digits(r"\b\d+\.\d\d\b(?:\w+ ){0,2}")
    assert not any(map(is_blind_to_digits, (r"\b30 days", r"[3-5]", r"(\w)\1", r"(?P<a>\w)(?P=a)")))
    late = by_form(lambda text: "30 days" in text.text, r"\b30 days")
    assert [late(Text(f"after {days} days")) for days in (31, 30, 32)] == [False, True, False]


def test_the_same_amount_many_times_is_no_recital() -> None:
    rule = Rule("few", "", never(recites(2, r"\b\d+\.\d\d\b", "amounts")))

    def broken(text: str) -> list[str]:
        turn = Turn(side="agent", message=Message(role="assistant", content=text))
        return [breach.evidence for breach in find_breaches([rule], [turn])]

    assert broken("1.00 and 1.00 and 1.00") == []
    assert broken("1.00 and 2.00 and 3.00") == ["it recites 3 amounts"]


def test_a_claim_is_judged_by_its_own_digits() -> None:
    heard: list[str] = []

    def holds(_: object, words: str) -> bool:
        heard.append(words)
        return True

    rule = Rule("true", "", never(claims(r"costs \d+", holds, ("costs",))))
    for amount in (45, 67):
        turn = Turn(side="agent", message=Message(role="assistant", content=f"It costs {amount}."))
        assert find_breaches([rule], [turn]) == []
    assert heard == ["costs 45", "costs 67"]
