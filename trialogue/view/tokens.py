# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The texts of a conversation's token ids, by the tokenizer in its run directory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trialogue.run import list_checkpoints
from trialogue.view.run_reader import find_run_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def to_shown_tokens(turns: Sequence[dict[str, Any]], run: Path) -> list[dict[str, Any]]:
    """The tokens of each sampled turn: ids, texts (None without a tokenizer), log-probabilities."""
    tokenizer = _load(find_tokenizer(run))
    shown: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        tokens = turn.get("tokens")
        if tokens is None:
            continue
        prompt, reply = tokens["prompt"], tokens["reply"]
        ids = [*prompt, *reply]
        texts = [None] * len(ids) if tokenizer is None else _to_texts(tokenizer, ids)
        shown.append(
            {
                "turn": number,
                "side": turn["side"],
                "start": bool(tokens.get("start")),
                "version": tokens.get("version", 0),
                "prompt": [[token, text] for token, text in zip(prompt, texts, strict=False)],
                "reply": [
                    [token, text, round(logprob, 5)]
                    for token, text, logprob in zip(
                        reply, texts[len(prompt) :], tokens["logprobs"], strict=True
                    )
                ],
            }
        )
    return shown


def find_tokenizer(run: Path) -> Path | None:
    """`tokenizer.json` of a run, of its model, or of its newest checkpoint."""
    steps = [f"checkpoints/{folder.name}/" for folder in reversed(list_checkpoints(run))]
    names = [f"{folder}tokenizer.json" for folder in ("", "model/", *steps)]
    return next((file for name in names if (file := find_run_file(run, name)) is not None), None)


@lru_cache(maxsize=2)
def _load(file: Path | None) -> Tokenizer | None:
    if file is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:  # installed without extras: ids are shown
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - the library raises plain exceptions; ids are shown
        return None


def _to_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each id. A letter that takes several ids is shown at the last of them."""
    texts: list[str] = []
    before: list[int] = []
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        known = tokenizer.decode(before, skip_special_tokens=False)
        text = tokenizer.decode([*before, *waiting], skip_special_tokens=False)[len(known) :]
        if text.endswith("\ufffd") and len(waiting) < 4:
            texts.append("")
            continue
        texts.append(text)
        before, waiting = [token], []
    return texts
