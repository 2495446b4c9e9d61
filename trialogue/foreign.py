"""Text from others (models, endpoints, records, files) made safe to show.

A terminal obeys control sequences: text may redraw the screen, write the clipboard or forge whole lines.
Direction marks reorder what a reader sees. Markdown turns text into links, images and HTML. The functions
here return text that does none of this: every character with such an effect becomes a visible escape such as
`\\x1b`, and the length is bounded. `output` and `screen` apply them to all that goes to the terminal.
"""

from __future__ import annotations

import json
import re
from typing import Any

LINE = 4_000
"""Longest text that is shown on one line."""
TEXT = 20_000
"""Longest text that is shown with its line breaks."""
PHRASE = 300
"""Longest text inside a sentence, a list or a table cell."""

_JOINERS = "\u200c\u200d"
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # controls
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction
    "\u2028\u2029"  # line and paragraph separators
    # invisible characters
    "\xad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u2060-\u2065\u206a-\u206f\u3164"
    "\ufeff\uffa0\ufe00-\ufe0d\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff"
    "\ud800-\udfff]"  # half of a surrogate pair cannot be written
    # Joiners belong to emoji and to scripts such as Persian. Beside ASCII they only hide.
    f"|(?<![^\x00-\x7f])[{_JOINERS}]|[{_JOINERS}](?![^\x00-\x7f])"
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN = re.compile(
    r"""\A(?!\d+[.)])(?!.*(?:\b_|_\b|://|www\.))['"]?[^\W_][\w .,:;'"/%=()+^-]*""", re.IGNORECASE
)
"""Words and punctuation that Markdown leaves alone: no list number, no emphasis, no address."""
_BACKTICKS = re.compile(r"`+")


def show_line(text: str, most: int = LINE) -> str:
    """The text on one line: line breaks and everything else that is not a visible character as escapes.

    >>> show_line("done\\x1b[2J\\nok")
    'done\\\\x1b[2J\\\\nok'
    """
    return _cut(_HIDDEN.sub(_escape, text[: most + 1]), len(text), most)


def show_text(text: str, margin: str = "", most: int = TEXT) -> str:
    """The text with its line breaks and tabs, and everything else as in `show_line`. `margin` stands before
    each line but the first, so that no line can pass for one of ours."""
    kept = text[: most + 1].replace("\r\n", "\n").split("\n")
    lines = ["\t".join(_HIDDEN.sub(_escape, part) for part in line.split("\t")) for line in kept]
    return _cut("\n".join(lines), len(text), most).replace("\n", f"\n{margin}")


def show_json(value: Any, plain: bool = False) -> str:
    """JSON on one line, with hidden characters as its own escapes: the value read back is the same. `plain`
    writes ASCII only."""
    return _HIDDEN.sub(lambda found: json.dumps(found[0])[1:-1], json.dumps(value, ensure_ascii=plain))


def show_markdown(text: str, most: int = PHRASE) -> str:
    """The text inside a line of Markdown: plain words as they are, anything else as a code span, in which
    nothing is markup.

    >>> show_markdown("get_order"), show_markdown("![x](http://a.b)")
    ('get_order', '`![x](http://a.b)`')
    """
    line = show_line(text, most)
    return line if _PLAIN.fullmatch(line) else show_code(text, most)


def show_code(text: str, most: int = PHRASE) -> str:
    """The text as a code span of Markdown.

    >>> show_code("a`b")
    '``a`b``'
    """
    line = show_line(text, most) or "(empty)"
    fence = "`" * (1 + max((len(run) for run in _BACKTICKS.findall(line)), default=0))
    padding = " " if line[0] in "` " or line[-1] in "` " else ""
    return f"{fence}{padding}{line}{padding}{fence}"


def show_cell(text: str, most: int = PHRASE) -> str:
    """The text inside a cell of a Markdown table."""
    return show_markdown(text, most).replace("|", "\\|")


def _escape(found: re.Match[str]) -> str:
    letter = found[0]
    number = ord(letter)
    if number < 0x100:
        return _SHORT.get(letter) or f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _cut(shown: str, length: int, most: int) -> str:
    """The text up to its bound, with a mark where something is left out. `length` is that of the original."""
    if len(shown) <= most and length <= most:
        return shown
    return f"{shown[:most]}… [{length:,} characters]"
