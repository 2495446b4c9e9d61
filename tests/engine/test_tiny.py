"""The tokenizer of the tiny models: common words whole, everything else in pairs."""

from __future__ import annotations

from typing import Any

import pytest

from trialogue.engine.tiny import train_tokenizer

DOCUMENTS = [f" My name is {name} and order_id: W{number}" for name in ("Mira", "Tolen") for number in "1234"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pairs = "".join(f" {a}{b} {a.upper()}{b}" for a in "mtrnzk" for b in "aeio") + "-na-ta"
    return train_tokenizer([*DOCUMENTS, *[pairs] * 4], ["<|pad|>", "<|end|>"], size=600)


def pieces(tokenizer: Any, text: str) -> list[str]:
    return [tokenizer.decode([number]) for number in tokenizer.encode(text)]


def test_a_common_word_is_one_token_with_its_space(tokenizer: Any):
    assert pieces(tokenizer, " name is order_id:") == [" name", " is", " order_id:"]


def test_a_name_falls_into_pairs_whether_it_was_seen_or_not(tokenizer: Any):
    assert pieces(tokenizer, " Zina Keta") == [" Zi", "na", " Ke", "ta"]


def test_a_word_inside_another_is_not_taken_for_it(tokenizer: Any):
    assert "".join(pieces(tokenizer, " isle")) == " isle"
    assert pieces(tokenizer, " names")[0] != " name"


@pytest.mark.parametrize("text", [" Ünïcode 漢字 🙂", "\n\t  two  spaces ", " W0099 83.95 a_b=c*", ""])
def test_every_text_comes_back(tokenizer: Any, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text
