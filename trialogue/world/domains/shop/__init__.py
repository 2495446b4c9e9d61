"""The built-in domain: the service desk of an online shop, with tasks generated from a seed."""

from pathlib import Path

from trialogue.world.domain import Domain
from trialogue.world.domains.shop.catalogue import make_database
from trialogue.world.domains.shop.generate import make_tasks
from trialogue.world.domains.shop.oracle import make_oracle
from trialogue.world.domains.shop.policy import RULES

domain = Domain(
    name="shop",
    policy=(Path(__file__).parent / "policy.md").read_text(encoding="utf-8"),
    database=make_database(),
    tasks=make_tasks,
    policy_rules=RULES,
    oracle=make_oracle,
    endless=True,
)
