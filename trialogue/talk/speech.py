# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A model's folder also says how it speaks: the tokenizer, and the renderer's name in `renderer.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trialogue.config import Limits, Speaker
from trialogue.errors import ConfigError
from trialogue.reading import explain
from trialogue.talk.brief import BriefRenderer
from trialogue.talk.local import LocalSource, Sampling
from trialogue.talk.render import Renderer, find_renderer
from trialogue.talk.vocabulary import Vocabulary

if TYPE_CHECKING:
    from trialogue.talk.model import ModelSource


def load_renderer(folder: str, name: str | None = None) -> tuple[Any, Renderer]:
    """The tokenizer and renderer of a model's folder; `name` overrides what the folder says."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:  # none there, or a hub without such a model or out of reach
        raise ConfigError(f"cannot load the model '{folder}': {explain(error)}") from error
    return tokenizer, make_renderer(tokenizer, folder, name)


def make_renderer(tokenizer: Any, folder: str, name: str | None = None) -> Renderer:
    """The renderer of a model's folder over a tokenizer at hand."""
    note = Path(folder) / "renderer.json"
    if name is None and note.is_file():
        name = json.loads(note.read_text(encoding="utf-8"))["renderer"]
    if name == "brief":
        return BriefRenderer(Vocabulary(tokenizer))
    return find_renderer(tokenizer, name)


def count_ids(tokenizer: Any) -> int:
    """How many ids the tokenizer has: a model's matrices may be padded beyond them."""
    return max(tokenizer.get_vocab().values()) + 1


def save_renderer(folder: Path, tokenizer: Any, renderer: Renderer) -> None:
    """Put tokenizer and renderer beside the weights."""
    tokenizer.save_pretrained(folder)
    (folder / "renderer.json").write_text(json.dumps({"renderer": renderer.name}) + "\n", encoding="utf-8")


def load_local(path: str, speaker: Speaker, limits: Limits, seed: int) -> ModelSource:
    """A checkpoint that speaks in this process. Greedy unless the speaker has a temperature."""
    from trialogue.engine.api import EngineSettings
    from trialogue.engine.models import find_folder
    from trialogue.engine.torch_engine import TorchEngine

    folder = find_folder(path)
    tokenizer, renderer = load_renderer(folder)
    settings = EngineSettings(seed=seed, vocabulary=count_ids(tokenizer))
    engine = TorchEngine.load(folder, settings)
    sampling = Sampling(
        temperature=speaker.temperature or 0.0,
        top_p=speaker.top_p or 1.0,
        reply_tokens=limits.reply_tokens,
        context_tokens=min(limits.context_tokens, engine.capabilities.max_length),
    )
    return LocalSource(engine, renderer, sampling, name=path)
