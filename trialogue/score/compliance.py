"""Policy compliance: the rules of a domain's policy, checked over the turns of a conversation.

No model and no database is needed, so any recorded conversation can be checked. A conversation that breaks a
required rule earns nothing, whatever its outcome.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from trialogue.seams import raise_bug
from trialogue.trajectory import Breach, Reward, Trajectory, Turn
from trialogue.world.domain import Domain
from trialogue.world.events import Events
from trialogue.world.policy_rules import Looked, Rule


def find_breaches(rules: Iterable[Rule], turns: Sequence[Turn], policy: str = "") -> list[Breach]:
    """Every rule that a conversation breaks, with the first turn that shows it, in the order of the turns."""
    events = Events(turns, policy)
    found: list[Breach] = []
    for rule in rules:
        looked = _look(rule, events)
        for event, wrong in looked if looked is not events.faultless else ():
            if wrong:
                found.append(
                    Breach(
                        rule=rule.name,
                        turn=event.turn,
                        evidence=wrong,
                        policy=rule.policy,
                        required=rule.required,
                    )
                )
                break
    return sorted(found, key=lambda breach: breach.turn)


def _look(rule: Rule, events: Events) -> list[Looked]:
    """What a rule looks at. A mistake in its code is raised as one: it is no failure of the conversation."""
    try:
        looked = rule.check(events)
        return looked if isinstance(looked, list) else list(looked)
    except Exception as error:
        raise_bug(error, f"policy rule {rule.name!r}")
        raise


def hold_to_rules(reward: Reward, domain: Domain, breaches: Sequence[Breach]) -> Reward:
    """A reward with the breaches of the policy. It is paid only where no required rule is broken."""
    forbidden = [item for item in breaches if item.required] if domain.rule_use == "required" else []
    update: dict[str, Any] = {
        "outcome": reward.value,
        "compliance": 1 - len(breaches) / len(domain.policy_rules),
        "breaches": tuple(breaches),
    }
    if forbidden:
        update["value"] = min(reward.value, 0.0)
        update["success"] = None if reward.success is None else False
        update["why"] = (*(f"policy: {tell_breach(item)}" for item in forbidden), *reward.why)
    return reward.model_copy(update=update)


def tell_breach(breach: Breach) -> str:
    """A breach in one line; turns are counted from 1."""
    return f"turn {breach.turn + 1} breaks {breach.rule}: {breach.evidence}"


def to_compliance_figures(trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """What broken rules change: the mean outcome, the share of rules kept, the share of conversations that
    keep them all, and how many break each. Empty where no rules were checked."""
    held = [item.reward for item in trajectories if item.reward is not None]
    checked = [reward for reward in held if reward.compliance is not None]
    if not checked:
        return {}
    broken = Counter(breach.rule for reward in checked for breach in reward.breaches)
    return {
        "outcome": fmean(reward.value if reward.outcome is None else reward.outcome for reward in checked),
        "compliance": fmean(reward.compliance or 0.0 for reward in checked),
        "compliant": fmean(not reward.breaches for reward in checked),
        "breaches": dict(broken.most_common()),
    }


# -- what rules do over many conversations -----------------------------------------------------------------


@dataclass(slots=True)
class RuleUsage:
    """In how many conversations each rule had something to look at, and in how many it was broken."""

    conversations: int = 0
    exercised: Counter[str] = field(default_factory=Counter[str])
    broken: Counter[str] = field(default_factory=Counter[str])

    def add(self, rules: Iterable[Rule], turns: Sequence[Turn], policy: str = "") -> None:
        """Count one conversation."""
        events = Events(turns, policy)
        self.conversations += 1
        for rule in rules:
            looked = [wrong for _, wrong in _look(rule, events)]
            self.exercised[rule.name] += bool(looked)
            self.broken[rule.name] += any(looked)


def find_uncovered(policy: str, rules: Iterable[Rule]) -> list[str]:
    """The sentences of a policy that no rule stands for."""
    quotes = [_squeeze(quote) for rule in rules for quote in rule.policy.split("\n") if quote.strip()]
    sentences = list(split_policy(policy))
    return [text for text in sentences if not any(_overlap(_squeeze(text), quote) for quote in quotes)]


def find_misquoted(policy: str, rules: Iterable[Rule]) -> Iterator[str]:
    """Rules that quote words which the policy does not have."""
    whole = _squeeze(policy)
    for rule in rules:
        for quote in rule.policy.split("\n"):
            if _squeeze(quote) not in whole:
                yield f"rule {rule.name} quotes what the policy does not say: {quote!r}"


def split_policy(policy: str) -> Iterator[str]:
    """The sentences of a policy, without headings and list marks."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)|\n(?=#)", policy):
        if paragraph.lstrip().startswith("#"):
            continue
        text = re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "", " ".join(paragraph.split())).replace("**", "")
        yield from (part.strip() for part in re.split(r"(?<=[.!?])\s+", text) if len(part.split()) > 3)


def _squeeze(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text.lower()).strip()


def _overlap(sentence: str, quote: str) -> bool:
    return bool(quote) and (quote in sentence or sentence in quote)
