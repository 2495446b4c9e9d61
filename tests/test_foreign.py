"""Text from others shows every character that would act on a terminal or in Markdown."""

from __future__ import annotations

import doctest
import json
import sys
import unicodedata

import pytest

from trialogue import foreign
from trialogue.foreign import show_cell, show_code, show_json, show_line, show_markdown, show_text

NASTY = (
    "\x1b]52;c;cm0gLXJm\x07 \x1b[2J\x9b31m a\nforged\r\n"
    "\u202eevil\u2066\u200e\u2028\u2029\ufeff\u061c\U000e0041\x00"
)


def test_no_character_acts_on_a_terminal() -> None:
    """Every code point: what is left is visible, or joins visible letters."""
    for number in range(sys.maxunicode + 1):
        shown = show_line(f"a{chr(number)}b")
        for letter in shown:
            kind = unicodedata.category(letter)
            visible_format = (
                letter in "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd"
            )
            assert kind not in {"Cc", "Zl", "Zp", "Cs"}, hex(number)
            assert kind != "Cf" or visible_format or ord(letter) in range(0x110BD, 0x13440), hex(number)


def test_the_escapes_are_visible_and_lines_stay_one_line() -> None:
    assert show_line(NASTY) == (
        r"\x1b]52;c;cm0gLXJm\x07 \x1b[2J\x9b31m a\nforged\r\n\u202eevil\u2066\u200e\u2028\u2029\ufeff\u061c"
        r"\U000e0041\x00"
    )
    assert show_line("Grüße, 日本語, 🙂, می\u200cخواهم") == "Grüße, 日本語, 🙂, می\u200cخواهم"
    assert show_line("pay\u200dpal") == "pay\\u200dpal"
    assert show_line("half \ud83d") == "half \\ud83d"


def test_a_text_keeps_its_lines_behind_a_margin() -> None:
    assert show_text("one\r\n\ttwo\x1b[2J\nagent> three", "      ") == (
        "one\n      \ttwo\\x1b[2J\n      agent> three"
    )


@pytest.mark.parametrize("show", [show_line, show_text, show_markdown, show_code, show_cell])
def test_the_length_is_bounded_and_says_so(show: object) -> None:
    assert callable(show)
    shown = show("\x1b" * 1_000_000, most=50)
    assert len(shown) < 100
    assert "… [1,000,000 characters]" in shown
    assert "…" not in show("x" * 50, most=50)


def test_json_reads_back_the_same() -> None:
    value = {NASTY: [NASTY, "Grüße \ud83d"], "n": 1}
    for plain in (False, True):
        shown = show_json(value, plain)
        assert json.loads(shown) == value
        assert show_line(shown, 10_000) == shown
    assert "Grüße" in show_json(value)
    assert show_json(value, plain=True).isascii()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("get_order", "get_order"),
        ("openai:gpt-4.1", "openai:gpt-4.1"),
        ("user, agent", "user, agent"),
        ("status should be 'a', is 'b' (1)", "status should be 'a', is 'b' (1)"),
        ("see (www.evil.example)", "`see (www.evil.example)`"),
        ("", "`(empty)`"),
        ("_x_", "`_x_`"),
        ("a|b", "`a|b`"),
        ("<img src=x>", "`<img src=x>`"),
        ("https://evil.example", "`https://evil.example`"),
        ("www.evil.example", "`www.evil.example`"),
        ("1. list", "`1. list`"),
        ("`tick", "`` `tick ``"),
        ("a``b", "```a``b```"),
        ("# head\n\n# more", "`# head\\n\\n# more`"),
    ],
)
def test_markdown_is_words_or_code(text: str, shown: str) -> None:
    assert show_markdown(text) == shown
    assert show_cell(text) == shown.replace("|", "\\|")


def test_the_examples_in_docstrings() -> None:
    assert doctest.testmod(foreign).failed == 0
