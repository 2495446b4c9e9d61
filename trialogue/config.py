"""The configuration: one typed tree, read from a TOML file and `key.sub=value` overrides.

The docstring under a field is its help text, which `trialogue config` prints. The sections about learning are
in `trialogue.settings`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

from pydantic import Field, ValidationError

from trialogue.assumptions import PlanSettings
from trialogue.errors import ConfigError, suggest
from trialogue.seams import Seam
from trialogue.settings import (
    AdvantageSettings,
    CheckSettings,
    EngineChoice,
    LearnerSettings,
    LossSettings,
    Optimizer,
    RendererName,
    RendererSettings,
    RewardSettings,
    Section,
    StragglerSettings,
    Training,
)


class InDomain(Section):
    """Settings of every verb that works in a domain."""

    domain: str = "shop"
    """A name, module:name, or path to a file or folder: DOMAIN on the command line."""
    data: str | None = None
    """Folder with a benchmark's data. Default: the environment variable TRIALOGUE_DATA."""
    seed: int = 0
    """Seed of every random choice."""
    reward: RewardSettings = RewardSettings()


class Limits(Section):
    """Limits at which a conversation is ended."""

    observations: int = Field(default=30, ge=1)
    """Tool results and user messages in one conversation. At the limit it ends as max_turns and scores 0."""
    reply_tokens: int = Field(default=1024, ge=1)
    """Tokens in one reply of the agent. A longer one ends the conversation as too_long with score 0."""
    context_tokens: int = Field(default=32768, ge=16)
    """Tokens of the whole conversation as the agent sees it. A longer one ends as too_long."""
    tool_errors: int = Field(default=10, ge=1)
    """Refused or malformed calls in a row. At the limit the conversation ends as max_turns and scores 0."""
    seconds: float = Field(default=600.0, gt=0)
    """Wall-clock seconds of one conversation. A longer one fails and gets no score."""
    calls: int = Field(default=64, ge=1, le=1000)
    """Tool calls in one message. The first call over the limit is refused, and the rest are dropped."""
    first_call_only: bool = False
    """Keep only the first tool call of a message, as TAU-bench does."""


Price = tuple[float, float] | tuple[float, float, float]
"""US dollars per million prompt tokens, completion tokens and, if they cost less, cached prompt tokens."""


SPEAKERS = Seam(frozenset({"local", "openai", "replay", "scripted"}), "guided:")


class Speaker(Section):
    """The model that plays one side."""

    model: Annotated[str, SPEAKERS] = ""
    """oracle, teacher, naive, agenda, guided:MODEL, human, scripted:FILE, replay:FILE, openai:NAME, a folder,
    or module:name of async def agent(messages, tools), or of a function (task, seed) that returns a Model."""
    otherwise: Annotated[str | None, SPEAKERS] = None
    """Model that answers if a replay: has no recorded reply. Default: the conversation fails."""
    renderer: RendererName = None
    """How messages become tokens if the model runs in this process, as in learner.renderer."""
    base_url: str | None = None
    """Endpoint of an openai: model. Default: OPENAI_BASE_URL."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key. The key itself is never written anywhere."""
    prompt: str = "domain"
    """Prompt of a simulated user: domain (the benchmark's own prompt if it has one, else guidelines and
    scenario), house (guidelines and scenario), scenario (alone), card (facts and wishes in one line, for
    small models), or a file in which {scenario} and {stop} are replaced."""
    dynamics: Literal["off", "light", "heavy"] = "off"
    """How much prompted users differ in manner. Each conversation's seed draws the traits."""
    personas: str | None = None
    """A TOML file of traits or a JSONL file of personas that replaces the built-in ones."""
    mix: tuple[Share, ...] = ()
    """Several models instead of one, each with its own settings and weight."""
    mix_by: Literal["conversation", "task"] = "conversation"
    """Draw a model for each conversation, or one for all conversations of a task."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature. Default: the endpoint's own."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling. Default: off."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds one request may take."""
    retries: int = Field(default=4, ge=0)
    """How often a request is retried after a temporary error, with growing delays. 0: never."""
    concurrency: int = Field(default=64, ge=1)
    """Requests under way at once."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Rate limit of the endpoint. Requests are delayed to stay below it. Default: none."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Rate limit of the endpoint. Requests are delayed to stay below it. Default: none."""
    outage: float = Field(default=900.0, ge=0)
    """Seconds to wait for an endpoint that is down before conversations fail."""
    answer_bytes: int = Field(default=16_000_000, ge=1024)
    """Largest answer that is read, in bytes after decompression. A larger one is an error of the endpoint."""
    price: Price | None = None
    """US dollars per million prompt, completion and (optional) cached tokens. Default: the price table."""

    def list_models(self) -> list[str]:
        """Every model that may speak."""
        return [self.model, *filter(None, [self.otherwise]), *(share.model for share in self.mix)]


class Share(Speaker):
    """One model of several."""

    weight: float = Field(default=1.0, gt=0)
    """How often it is drawn, relative to the other weights."""


Speaker.model_rebuild()


class Tasks(Section):
    """The tasks that are used."""

    split: str = "test"
    """Name of the split, such as train, dev or test."""
    count: int | None = Field(default=None, ge=1)
    """Number of tasks. Default: all of a finite domain, 100 of an endless one."""
    trials: int = Field(default=1, ge=1)
    """Conversations per task."""
    levels: tuple[int, ...] = ()
    """Only these difficulty levels."""
    families: tuple[str, ...] = ()
    """Only these families of tasks."""
    vary: bool | None = None
    """Give the tasks that are learned from fresh names, numbers and addresses each time. Where empty: if the
    domain has a list of tasks. Tasks that are evaluated on keep theirs."""
    reword: bool = False
    """Let the rule-based user of tasks that are learned from speak in more ways than the author wrote."""
    allow_test_split: bool = False
    """Let train and sft learn from tasks of the test split. The run and all its results are marked."""


class Rollout(Section):
    """How conversations are held."""

    concurrency: int = Field(default=64, ge=1)
    """Conversations under way at once."""
    redraws: int = Field(default=2, ge=0)
    """How often a failed conversation is repeated before it is given up."""


class Budget(Section):
    """What the endpoints of a run may cost. The run saves everything and stops before it exceeds a limit."""

    usd: float | None = Field(default=None, gt=0)
    """US dollars. Default: no limit."""
    tokens: int | None = Field(default=None, gt=0)
    """Prompt and completion tokens. Default: no limit."""
    prices: dict[str, Price] = {}
    """Prices by model. They override the table that comes with the package."""


class AuditSettings(Section):
    """Whether the simulated user kept to its role."""

    policy: Literal["keep", "exclude", "report"] | None = None
    """keep: no audit. report: findings are recorded and counted, and nothing else changes. exclude: a
    conversation with findings is left out of figures and baselines and repeated, up to rollout.redraws.
    Default: exclude in training with a language model as user, else report."""
    judge: Speaker = Speaker()
    """A model that reads each conversation in addition to the rules. Default: none."""


class RunSettings(Section):
    """Where results go."""

    directory: str = "runs"
    """Folder that holds the run directories."""
    name: str | None = None
    """Name of the run directory. Default: kind, domain and time."""
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that also receive every figure, each through its own package."""


class TrainConfig(InDomain):
    """Settings of `train`."""

    learner: LearnerSettings = LearnerSettings()
    user: Speaker = Speaker(model="agenda")
    simulator: Speaker = Speaker()
    """Model that simulates the tools of a drafted scenario."""
    tasks: Tasks = Tasks(split="train")
    renderer: RendererSettings = RendererSettings()
    limits: Limits = Limits(reply_tokens=64, context_tokens=1024)
    rollout: Rollout = Rollout(concurrency=128)
    audit: AuditSettings = AuditSettings()
    budget: Budget = Budget()
    advantage: AdvantageSettings = AdvantageSettings()
    loss: LossSettings = LossSettings()
    optimizer: Optimizer = Optimizer(learning_rate=2.5e-4, warmup=3, schedule="linear")
    training: Training = Training()
    checks: CheckSettings = CheckSettings()
    stragglers: StragglerSettings = StragglerSettings()
    engine: EngineChoice = EngineChoice()
    run: RunSettings = RunSettings()


class PlanConfig(TrainConfig):
    """Settings of `plan`: those of `train`, and its assumptions."""

    plan: PlanSettings = PlanSettings()


class SftSettings(Section):
    """Supervised fine-tuning on recorded conversations."""

    examples: str = "oracle"
    """A run (of synthesize: its accepted conversations), a JSONL file of trajectories, a parquet file with
    messages and tools, or new conversations with the domain's user: oracle (the teacher, if the domain has no
    oracle) or teacher."""
    count: int = Field(default=6000, ge=1)
    """Conversations the oracle or teacher holds."""
    faults: float = Field(default=0.0, ge=0, le=1)
    """Probability of each kind of mistake that the oracle makes."""
    plain: bool = False
    """The teacher always takes its first wording: a model of a few million weights spends itself on the
    choice of words otherwise."""
    only_successes: bool = True
    """Leave out conversations whose reward does not count as a success."""
    side: Literal["agent", "user"] = "agent"
    """Whose turns are learned."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the examples."""
    batch: int = Field(default=12, ge=1)
    """Conversations in one optimizer step."""
    validation: float = Field(default=0.05, ge=0, lt=1)
    """Share of the examples held out to measure the loss, unless they have a validation part."""
    eval_tasks: int = Field(default=0, ge=0)
    """Tasks played before and after training, one greedy conversation each. 0: none."""
    eval_split: str = "dev"
    """Split of these tasks."""
    checkpoint_every: int = Field(default=200, ge=1)
    """Steps between checkpoints, and between measurements of the loss on held-out examples."""
    patience: int = Field(default=0, ge=0)
    """Measurements in a row without a lower loss on held-out examples after which training ends. The model of
    the run is then that of the lowest. 0: all steps, and the model of the last."""


class SftConfig(InDomain):
    """Settings of `sft`."""

    learner: LearnerSettings = LearnerSettings()
    user: Speaker = Speaker(model="agenda")
    simulator: Speaker = Speaker()
    """Model that simulates the tools of a drafted scenario, if its tasks are played."""
    sft: SftSettings = SftSettings()
    tasks: Tasks = Tasks(split="train")
    optimizer: Optimizer = Optimizer(learning_rate=2e-3, warmup=20, schedule="linear")
    renderer: RendererSettings = RendererSettings()
    limits: Limits = Limits()
    budget: Budget = Budget()
    run: RunSettings = RunSettings()


class EvalConfig(InDomain):
    """Settings of `eval` and `rollout`."""

    agent: Speaker = Speaker(model="oracle")
    user: Speaker = Speaker(model="agenda")
    judge: Speaker = Speaker()
    """Model that judges what no rule can, if a benchmark requires it. Default: such checks are left out."""
    simulator: Speaker = Speaker()
    """Model that simulates the tools of a drafted scenario."""
    tasks: Tasks = Tasks()
    renderer: RendererSettings = RendererSettings()
    limits: Limits = Limits()
    rollout: Rollout = Rollout()
    audit: AuditSettings = AuditSettings()
    budget: Budget = Budget()
    run: RunSettings = RunSettings()


class Synthesis(Section):
    """How a corpus of conversations is made."""

    count: int = Field(default=1000, ge=1)
    """Number of distinct, verified conversations to accept."""
    attempts: float = Field(default=3.0, ge=1)
    """Most conversations that are held, as a multiple of the count."""
    similar: float = Field(default=0.9, gt=0, le=1)
    """Share of common word triples from which two conversations count as equal. 1 drops only exact copies."""
    balance: float = Field(default=2.0, ge=0)
    """Most conversations of a family of tasks, as a multiple of its even share of the count. 0: off."""
    validation: float = Field(default=0.05, ge=0, lt=1)
    """Share of the scenarios held out for validation."""
    split_by: Literal["task", "family"] = "task"
    """What is split: all conversations of a task, or of a family of tasks, go to the same part."""
    against: tuple[str, ...] = ()
    """Sets of tasks that must not leak, each DOMAIN/SPLIT. Conversations that reveal one of these tasks are
    left out."""
    free_text: tuple[str, ...] = (
        "comment",
        "content",
        "description",
        "message",
        "note",
        "notes",
        "query",
        "reason",
        "subject",
        "summary",
        "text",
        "thought",
        "title",
    )
    """Parameters (name or tool.name) that may hold the agent's own words. Ids and numbers in them must still
    come from the conversation."""


class SynthesizeConfig(InDomain):
    """Settings of `synthesize`."""

    agent: Speaker = Speaker(model="oracle")
    user: Speaker = Speaker(model="agenda")
    judge: Speaker = Speaker()
    """Model that scores verified conversations by a rubric. Default: none."""
    simulator: Speaker = Speaker()
    """Model that simulates the tools of a drafted scenario."""
    tasks: Tasks = Tasks(split="train")
    renderer: RendererSettings = RendererSettings()
    limits: Limits = Limits()
    rollout: Rollout = Rollout()
    budget: Budget = Budget()
    synthesize: Synthesis = Synthesis()
    run: RunSettings = RunSettings()


class DraftConfig(Section):
    """Settings of `draft`."""

    folder: str = ""
    """Folder of the scenario."""
    brief: str | None = None
    """A file that describes a new scenario."""
    tasks: int = Field(default=10, ge=0)
    """Number of tasks to add."""
    repairs: int = Field(default=3, ge=0)
    """How often an unusable draft is requested again."""
    seed: int = 0
    """Seed of every random choice."""
    drafter: Speaker = Speaker(timeout=300.0)
    reply_tokens: int = Field(default=8192, ge=256)
    """Tokens in one draft."""


KINDS: dict[str, type[Section]] = {
    "draft": DraftConfig,
    "eval": EvalConfig,
    "synthesize": SynthesizeConfig,
    "sft": SftConfig,
    "train": TrainConfig,
    "plan": PlanConfig,
}
"""The configuration of each verb."""
C = TypeVar("C", bound=Section)
R = TypeVar("R", EvalConfig, PlanConfig, SftConfig, SynthesizeConfig, TrainConfig)


def load_config(
    kind: type[C],
    file: str | Path | None = None,
    overrides: Iterable[str] = (),
    known: C | None = None,
) -> C:
    """Override what is `known` with a file (if any), then with `key.sub=value`, and check the result.

    Values are TOML (`3`, `true`, `"text"`, `[1, 2]`). Anything that is not TOML is text.
    """
    data = known.model_dump(mode="json") if known is not None else {}
    if file is not None:
        data = _over(data, _read_file(Path(file)))
    for override in overrides:
        key, sign, value = override.partition("=")
        if not sign:
            raise ConfigError(f"'{override}' is no setting; write key=value, such as seed=3")
        _lay(data, key.strip().split("."), _read_value(value))
    return to_config(kind, data, str(file) if file is not None else "the settings")


def to_config(kind: type[C], data: Mapping[str, Any], where: str) -> C:
    """Check plain data against the tree. An error names every wrong key and what is allowed.

    Missing keys get the default of this kind: `TrainConfig` uses the train split even if its section `tasks`
    sets other keys.
    """
    try:
        return kind.model_validate(_over(kind().model_dump(mode="json"), data))
    except ValidationError as error:
        lines: list[str] = []
        for problem in error.errors(include_url=False):
            path = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                near = suggest(path, [*kind.model_fields, *(key.key for key in list_keys(kind))])
                lines.append(f"{path}: no such key; {_allowed(kind, path)}{near}")
            elif problem["type"] == "model_type" and (keys := _find_keys(kind, path)):
                lines.append(f"{path} is a section: {_tell_section(path, keys, problem['input'])}")
            else:
                lines.append(f"{path}: {problem['msg'].lower()}, got {problem['input']!r}")
        raise ConfigError(f"{where}: " + "; ".join(lines)) from None


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees, section by section. The second one wins."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(under, dict) and isinstance(value, dict)
        merged[key] = _over(cast("dict[str, Any]", under), cast("dict[str, Any]", value)) if both else value
    return merged


def _allowed(kind: type[Section], path: str) -> str:
    section: Any = kind
    for part in path.split(".")[:-1]:
        section = section.model_fields[part].annotation
    return "allowed here: " + ", ".join(section.model_fields)


def _find_keys(kind: type[Section], path: str) -> list[str]:
    """The keys of a section; none if the path names a value."""
    return [key.key for key in list_keys(kind) if key.key.startswith(f"{path}.")]


OPTIONS = {"reward.name": "--reward", "agent.model": "--agent", "user.model": "--user"}
"""Options for the key of a section that names what runs."""


def _tell_section(path: str, keys: Sequence[str], value: Any) -> str:
    """How to write what was probably meant by a value in place of a section."""
    named = next((key for key in (f"{path}.name", f"{path}.model") if key in keys), "")
    if not named:
        return f"write one of its keys, such as {keys[0]}=…, got {value!r}"
    option = f" or {OPTIONS[named]} …" if named in OPTIONS else ""
    return f"write {named}=…{option}, got {value!r}"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"there is no config file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _read_value(text: str) -> Any:
    """A TOML value or a text. Dates are texts, because no setting is a date."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return text if isinstance(value, date | time) else value


def _lay(data: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        inner = data.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"'{'.'.join(path)}': '{part}' is a value, not a section")
        data = cast("dict[str, Any]", inner)
    data[path[-1]] = value


class Key(NamedTuple):
    """One line of `trialogue config`."""

    key: str
    default: Any
    meaning: str


def list_keys(kind: type[Section], prefix: str = "", default: Section | None = None) -> Iterator[Key]:
    """Every key of the tree with its default and meaning."""
    default = default if default is not None else kind()
    for name, field in kind.model_fields.items():
        value = getattr(default, name)
        if isinstance(value, Section):
            yield from list_keys(type(value), f"{prefix}{name}.", value)
        else:
            yield Key(prefix + name, value, field.description or "")


def difference_from_defaults(config: Section) -> dict[str, Any]:
    """The keys whose value is not the default, for reports."""
    now = {key.key: key.default for key in list_keys(type(config), default=config)}
    usual = {key.key: key.default for key in list_keys(type(config))}
    return {key: value for key, value in now.items() if json.dumps(value) != json.dumps(usual.get(key))}
