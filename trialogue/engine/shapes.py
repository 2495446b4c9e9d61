"""The shape of a model: parameters, bytes of cache for a token, operations for a token.

The shape is read from the config.json of a folder. For models that are not on this machine there is a table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from trialogue.errors import ConfigError, EngineError, suggest

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose parameters are counted from the configuration alone."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that memory and time depend on."""

    name: str
    layers: int
    width: int
    inner: int
    """Width of the MLP."""
    heads: int
    kv_heads: int
    head: int
    """Width of a head."""
    vocabulary: int
    tied: bool
    """Whether the embedding is the output matrix, too."""
    parameters: int
    attention_layers: int

    @property
    def matrices(self) -> int:
        """Parameters that a token is multiplied with: all but an embedding that is only looked up."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.width)

    @property
    def cache_numbers(self) -> int:
        """Keys and values of one token."""
        return 2 * self.attention_layers * self.kv_heads * self.head

    @property
    def output(self) -> int:
        """Parameters of the output matrix."""
        return self.vocabulary * self.width

    def count_lora(self, rank: int) -> int:
        """Parameters of adapters of all linear layers."""
        query, key = self.heads * self.head, self.kv_heads * self.head
        ins_and_outs = 2 * (self.width + query) + 2 * (self.width + key) + 3 * (self.width + self.inner)
        return self.layers * rank * ins_and_outs

    def count_operations(self, length: float) -> float:
        """Operations of the forward pass of one token that looks back on `length` others."""
        return 2.0 * self.matrices + self.count_attention(length)

    def count_attention(self, pairs: float) -> float:
        """Operations of attention, forward, between so many pairs of tokens."""
        return 4.0 * self.attention_layers * self.heads * self.head * pairs


QWEN3: dict[str, tuple[int, int, int, int, int, bool]] = {
    "Qwen3-0.6B": (28, 1024, 3072, 16, 8, True),
    "Qwen3-1.7B": (28, 2048, 6144, 16, 8, True),
    "Qwen3-4B": (36, 2560, 9728, 32, 8, True),
    "Qwen3-8B": (36, 4096, 12288, 32, 8, False),
    "Qwen3-14B": (40, 5120, 17408, 40, 8, False),
    "Qwen3-32B": (64, 5120, 25600, 64, 8, False),
}
"""Layers, width, width of the MLP, heads, KV heads, tied: the published config.json of each model; layers,
heads and tying are also in table 1 of the Qwen3 technical report (arXiv 2505.09388). Heads are 128 wide, the
vocabulary is 151,936."""


def find_shape(model: str) -> ModelShape:
    """The shape of a model by `learner.model`: a folder, a run, a name of `MODELS`, or one of the table."""
    from trialogue.engine.models import BASES
    from trialogue.run import find_weights

    if model in BASES:
        return read_shape(BASES[model])
    path = Path(model).expanduser()
    if path.is_dir():
        return read_shape(find_weights(path))
    if model == "smollm2":
        known = {"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "head_dim": 64}
        known |= {"intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
        return to_shape("smollm2", {**known, "vocab_size": 49152, "tie_word_embeddings": True})
    names = {name.lower(): name for name in QWEN3}
    name = names.get(model.rpartition("/")[2].lower())
    if name is None:
        raise ConfigError(
            f"the shape of '{model}' is not known: give a folder with its config.json, or one of "
            f"{', '.join(QWEN3)}{suggest(model, QWEN3)}"
        )
    layers, width, inner, heads, kv_heads, tied = QWEN3[name]
    known = {"model_type": "qwen3", "num_hidden_layers": layers, "hidden_size": width, "head_dim": 128}
    known |= {"intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return to_shape(name, {**known, "vocab_size": 151936, "tie_word_embeddings": tied})


def read_shape(folder: Path) -> ModelShape:
    """The shape in the config.json of a folder. Of other families, parameters are counted in the weights."""
    from trialogue.engine.model_folder import read_object

    config = read_object(folder / "config.json", ConfigError)
    if config.get("base_model_name_or_path"):
        return find_shape(str(config["base_model_name_or_path"]))
    text = config.get("text_config")
    inside: dict[str, Any] = cast("dict[str, Any]", text) if isinstance(text, dict) else config
    return to_shape(folder.name, inside, folder)


def to_shape(
    name: str, config: dict[str, Any], folder: Path | None = None, *, parameters: int | None = None
) -> ModelShape:
    """The shape that the values of a config.json describe. `parameters` is their number where it is known."""

    def read(key: str, usual: int | None = None) -> int:
        value = config.get(key, usual)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 32:
            raise ConfigError(f"{name}: config.json has no usable {key}: {value!r}")
        return value

    layers, width, inner = read("num_hidden_layers"), read("hidden_size"), read("intermediate_size")
    heads, vocabulary = read("num_attention_heads"), read("vocab_size")
    kv_heads, head = read("num_key_value_heads", heads), read("head_dim", max(1, width // heads))
    tied = bool(config.get("tie_word_embeddings", True))
    family = str(config.get("model_type"))
    kinds = cast("list[object]", config.get("layer_types") or [])
    shape = ModelShape(
        name=name,
        layers=layers,
        width=width,
        inner=inner,
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        vocabulary=vocabulary,
        tied=tied,
        parameters=0,
        attention_layers=sum("attention" in str(kind) for kind in kinds) or layers,
    )
    counted = parameters
    if counted is None and family in FAMILIES:
        counted = count_parameters(shape, config, family)
    if counted is None:
        counted = count_weights(folder) if folder is not None else None
    if counted is None:
        raise ConfigError(
            f"{name}: parameters of a {family!r} cannot be counted from config.json alone; "
            "give a folder that holds its weights"
        )
    return replace(shape, parameters=counted)


def count_parameters(shape: ModelShape, config: dict[str, Any], family: str) -> int:
    """Parameters of a model of the Llama and Qwen families."""
    query, key = shape.heads * shape.head, shape.kv_heads * shape.head
    attention = 2 * shape.width * query + 2 * shape.width * key
    bias = config.get("attention_bias", family == "qwen2")
    if bias:
        attention += query + 2 * key + (0 if family == "qwen2" else shape.width)
    if family == "qwen3":
        attention += 2 * shape.head  # norms of queries and keys
    layer = attention + 3 * shape.width * shape.inner + 2 * shape.width
    embeddings = shape.vocabulary * shape.width * (1 if shape.tied else 2)
    return shape.layers * layer + embeddings + shape.width


def count_weights(folder: Path) -> int | None:
    """Parameters in the headers of a folder's safetensors; None where there are none."""
    from math import prod

    from trialogue.engine.model_folder import find_weight_files, read_headers

    try:
        return sum(prod(size) for size in read_headers(find_weight_files(folder)).values())
    except (EngineError, ImportError):
        return None
