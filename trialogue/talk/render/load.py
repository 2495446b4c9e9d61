# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Load and save the tokenizer and the renderer of a model folder. `renderer.json` names the renderer, or
`config.json` where another program wrote the folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trialogue.config import Limits, Speaker
from trialogue.engine.model_folder import check_counts, read_object
from trialogue.errors import ConfigError
from trialogue.foreign import show_line
from trialogue.reading import explain
from trialogue.seams import Seam
from trialogue.talk.local import LocalSource, Sampling
from trialogue.talk.render.api import Renderer, find_renderer
from trialogue.talk.render.tiny import COMPACT_TOKENS
from trialogue.talk.render.vocabulary import Vocabulary

if TYPE_CHECKING:
    from trialogue.talk.model import ModelSource


RENDERER = "trialogue_renderer"
"""In a model's config.json: other programs keep this file when they copy a model, and no file of ours."""
TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def load_renderer(
    folder: str, name: str | None = None, setting: str = "learner.renderer"
) -> tuple[Any, Renderer]:
    """Load the tokenizer and the renderer of a model folder; `name`, from this setting, overrides the
    folder's renderer."""
    from transformers import AutoTokenizer

    for text in TEXTS:
        if (file := Path(folder) / text).is_file():
            read_object(file, ConfigError)
    if (file := Path(folder) / "config.json").is_file():
        check_counts(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # missing files, an unreachable hub, or unexpected contents
        raise ConfigError(
            f"cannot load the model '{folder}': {explain(error)}; config.json, tokenizer.json and "
            "tokenizer_config.json must be as save_pretrained wrote them"
        ) from error
    return tokenizer, make_renderer(tokenizer, folder, name, setting)


def read_renderer_name(folder: str) -> tuple[str, Path] | None:
    """The renderer that a model folder names, and the file that names it."""
    for file, key in ((Path(folder) / "renderer.json", "renderer"), (Path(folder) / "config.json", RENDERER)):
        known = read_object(file, ConfigError) if file.is_file() else {}
        if isinstance(name := known.get(key), str):
            return name, file
        if name is not None or (key == "renderer" and file.is_file()):
            raise ConfigError(f"{file}: {key} must be a name; delete it to choose by the tokenizer")
    return None


def make_renderer(
    tokenizer: Any, folder: str, name: str | None = None, setting: str = "learner.renderer"
) -> Renderer:
    """The renderer of a model folder for a loaded tokenizer. A folder is data: code that it names runs only
    where the caller names it too. Where a folder names none and its tokenizer suits two, none is guessed."""
    if name is None and (known := read_renderer_name(folder)) is not None:
        name, note = known
        if (code := Seam().find_code(name)) is not None:
            word = shlex.quote(f"{setting}={show_line(name)}")
            raise ConfigError(f"{note} would run {code}: add {word} to allow it")
    if name is None and Vocabulary(tokenizer).controls.keys() >= set(COMPACT_TOKENS):
        raise ConfigError(
            f"the tokenizer of {folder} suits the renderers brief and compact, and the folder does not say "
            f"which it was trained with: set {setting}=brief or {setting}=compact"
        )
    return find_renderer(tokenizer, name)


def count_ids(tokenizer: Any) -> int:
    """Number of ids of the tokenizer. The matrices of a model may be padded to more."""
    return max(tokenizer.get_vocab().values()) + 1


def save_renderer(folder: Path, tokenizer: Any, renderer: Renderer) -> None:
    """Save tokenizer and renderer beside the weights."""
    tokenizer.save_pretrained(folder)
    (folder / "renderer.json").write_text(json.dumps({"renderer": renderer.name}) + "\n", encoding="utf-8")


def load_local(path: str, speaker: Speaker, limits: Limits, seed: int, role: str = "agent") -> ModelSource:
    """A checkpoint that is sampled in this process. Greedy unless the speaker has a temperature."""
    from trialogue.engine.api import EngineSettings
    from trialogue.engine.models import find_model_folder
    from trialogue.engine.torch_engine import TorchEngine

    folder = find_model_folder(path)
    tokenizer, renderer = load_renderer(folder, speaker.renderer, f"{role}.renderer")
    settings = EngineSettings(seed=seed, vocabulary=count_ids(tokenizer))
    engine = TorchEngine.load(folder, settings)
    sampling = Sampling(
        temperature=speaker.temperature or 0.0,
        top_p=speaker.top_p or 1.0,
        reply_tokens=limits.reply_tokens,
        context_tokens=min(limits.context_tokens, engine.capabilities.max_length),
    )
    return LocalSource(engine, renderer, sampling, name=path)
