"""Find who speaks for a side: `oracle`, `agenda`, `openai:NAME`, a script, a recording, a checkpoint, or code
of your own as `module:name`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from trialogue.config import Limits, Speaker
from trialogue.errors import ConfigError, suggest
from trialogue.seams import split_reference
from trialogue.settings import MODELS
from trialogue.talk.budget import Account
from trialogue.talk.model import Model, ModelSource
from trialogue.talk.own import find_own, to_source
from trialogue.task import Side, Task
from trialogue.world.domain import Domain

KNOWN = (
    *(
        "oracle",
        "teacher",
        "naive",
        "gold",
        "agenda",
        "guided:MODEL",
        "human",
        "scripted:FILE",
        "replay:FILE",
        "openai:NAME",
    ),
    *(*MODELS, "local:FOLDER", "local:FILE.gguf"),
)


SECTIONS = {"auditor": "audit.judge", "tools": "simulator"}
"""The settings of a role, where they are not named like it."""


def find_model(
    speaker: Speaker | str,
    side: Side,
    domain: Domain,
    limits: Limits | None = None,
    seed: int = 0,
    account: Account | None = None,
    role: str = "",
) -> ModelSource:
    """The source of models that a name such as `agenda` or `openai:NAME`, or a `Speaker` setting, stands for.
    What an endpoint costs goes to the `account`, under the role. Default role: the side."""
    speaker = Speaker(model=speaker) if isinstance(speaker, str) else speaker
    limits = limits or Limits()
    if speaker.mix:
        from trialogue.talk.mix import Mix

        sources = [
            (item.model, item.weight, find_model(item, side, domain, limits, seed, account, role))
            for item in speaker.mix
        ]
        return Mix(sources, speaker.mix_by, seed)
    kind, _, rest = speaker.model.partition(":")
    if kind == "oracle" and not rest:
        return _polite_gold(side, domain) if domain.oracle is None else to_source(domain.oracle, side)
    if kind == "teacher" and not rest:
        if side == "user":
            raise ConfigError("user: teacher plays the agent; the rule-based user is agenda")
        from trialogue.talk.teacher.teacher import make_teacher

        return make_teacher(domain)
    if kind == "gold" and not rest:
        return _gold(side, domain)
    if kind == "naive" and not rest:
        return _naive
    if kind == "agenda" and not rest:
        if side == "agent":
            raise ConfigError("agent: agenda plays the user; the agent that knows each task is oracle")
        from trialogue.talk.agenda import make_agenda_user

        if domain.user is not None:
            return to_source(domain.user, side)
        return partial(make_agenda_user, stop=domain.rules.stop_tokens[0])
    if kind == "guided" and rest:
        if side == "agent":
            raise ConfigError("agent: guided plays the user, by the rules of its agenda")
        from trialogue.talk.guided import REPLY_TOKENS, GuidedSource

        inner = speaker.model_copy(update={"model": rest})
        short = limits.model_copy(update={"reply_tokens": min(REPLY_TOKENS, limits.reply_tokens)})
        return GuidedSource(find_model(inner, side, domain, short, seed, account, role), domain)
    if kind == "human" and not rest:
        from trialogue.talk.human import HumanModel

        return lambda task, _: HumanModel(side, domain, task)
    if kind == "scripted" and rest:
        from trialogue.talk.scripted import ScriptedModel, read_script

        lines = read_script(Path(rest))
        return lambda task, _: ScriptedModel(lines)
    if kind == "replay" and rest:
        from trialogue.talk.replay import Replay

        live = None
        if speaker.otherwise is not None:
            spare = speaker.model_copy(update={"model": speaker.otherwise, "otherwise": None})
            live = find_model(spare, side, domain, limits, seed, account, role)
        return Replay(Path(rest), live)
    if kind == "openai" and rest:
        from trialogue.talk.openai import OpenAIModel

        books = account or Account()
        return OpenAIModel(rest, side, speaker, limits.reply_tokens, seed, books, role or side)
    path = rest if kind == "local" else speaker.model
    if kind == "local" or path in MODELS or path.endswith(".gguf") or Path(path).is_dir():
        from trialogue.talk.render.load import load_local

        return load_local(path, speaker, limits, seed, SECTIONS.get(role, role or side))
    words = [word.partition(":")[0] for word in KNOWN]
    if split_reference(speaker.model) is not None or speaker.model.endswith(".py"):
        return find_own(speaker.model, side, words)
    allowed = f"{', '.join(KNOWN)}, a checkpoint's folder, module:name or path/to/file.py:name"
    near = suggest(kind, words)
    raise ConfigError(f"{side}: there is no model '{speaker.model}'; allowed are {allowed}{near}")


def add_tool_model(
    domain: Domain, simulator: Speaker, limits: Limits, seed: int = 0, account: Account | None = None
) -> Domain:
    """The domain with the model that simulates its tools, if they are simulated."""
    if domain.source != "simulated":
        return domain
    if not simulator.model:
        raise ConfigError(
            f"the tools of {domain.name} are simulated; name the model: simulator.model=openai:NAME"
        )
    return replace(domain, tool_model=find_model(simulator, "user", domain, limits, seed, account, "tools"))


def _gold(side: Side, domain: Domain) -> ModelSource:
    from trialogue.talk.scripted import GoldParty

    ending = {tool.name for tool in domain.database.tools.values() if tool.ends}
    # A benchmark that grades by its own rule may count on calls that are refused.
    strict = domain.reward is None
    return lambda task, _: GoldParty(task, side, ending, domain.rules.stop_tokens[0], strict)


def _polite_gold(side: Side, domain: Domain) -> ModelSource:
    """The gold agent, with manners where the policy has rules and the user an agenda."""
    gold = _gold(side, domain)
    if side == "user" or not any(rule.required for rule in domain.policy_rules):
        return gold
    from trialogue.talk.polite_gold import PoliteGold

    return lambda task, seed: PoliteGold(task) if "agenda" in task.meta else gold(task, seed)


def _naive(task: Task, seed: int) -> Model:
    from trialogue.talk.scripted import ScriptedModel

    return ScriptedModel(["It is done. Anything else?"])
