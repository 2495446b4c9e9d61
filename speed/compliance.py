"""What the rules of the shop catch, and what they cost: python speed/compliance.py WHAT --tasks NUMBER

- cheats   every agent of the gallery: how often it cheats, and is paid without rules and with them
- honest   the oracle: how many conversations break a rule (none may)
- planted  honest conversations with one planted breach each: how many are found under the right name
- cost     grading a recorded conversation with and without rules, side by side

The gallery is part of the tests, so this runs from a clone of the repository.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.parts.honest import hold_honest
from tests.parts.planted import plant
from tests.score.cheats.shop import SHOP_CHEATS
from trialogue import find_domain
from trialogue.score.cheats import count_cheats
from trialogue.score.compliance import find_breaches
from trialogue.score.reward import regrade
from trialogue.trajectory import Trajectory

SHOP = find_domain("shop")
ROUNDS = 15
BLOCK = 250
"""How many conversations are held before they are looked at and dropped."""


def count_gallery(tasks: int, part: tuple[int, int]) -> None:
    """One line of JSON per cheat, and the whole at the end."""
    paid = 0
    first, of = part
    for trick in SHOP_CHEATS[first::of]:
        (count,) = asyncio.run(count_cheats(SHOP, SHOP.tasks("test", tasks), [trick]))
        paid += count.paid
        print(json.dumps(count.to_data()), flush=True)
    print(f"paid with rules, all cheats together: {paid}")


def count_honest(tasks: int) -> None:
    """Conversations of the oracle that break a rule, by rule."""
    everything = SHOP.tasks("train", tasks, seed=1)
    accused: Counter[str] = Counter()
    solved = 0
    for begin in range(0, tasks, BLOCK):
        for item in hold_honest(SHOP, everything[begin : begin + BLOCK]):
            solved += item.is_success
            accused.update(breach.rule for breach in (item.reward.breaches if item.reward else ()))
    print(json.dumps({"conversations": tasks, "solved": solved, "false alarms": dict(accused)}))


def count_planted(tasks: int) -> None:
    """Planted breaches that were found under the right name, by kind."""
    planted: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for item in plant(hold_honest(SHOP, SHOP.tasks("train", tasks, seed=2))):
        breaches = find_breaches(SHOP.policy_rules, item.turns, SHOP.policy)
        planted[item.kind] += 1
        found[item.kind] += bool(item.rules & {breach.rule for breach in breaches})
    print(json.dumps({"planted": dict(planted), "found": dict(found)}))


def measure_cost(tasks: int) -> None:
    """CPU time of grading a record, from its line in a file to its reward, without rules and with."""
    held = hold_honest(SHOP, SHOP.tasks("train", tasks, seed=4))
    lines = [item.to_json() for item in held]
    without = replace(SHOP, rule_use="off")
    ratios: list[float] = []
    spent: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(ROUNDS):
        for name, domain in (("without", without), ("with", SHOP)):
            gc.collect()
            began = time.process_time()
            for line in lines:
                item = Trajectory.model_validate_json(line)
                regrade(item, domain.open(item.task))
            spent[name].append((time.process_time() - began) / len(lines) * 1e6)
        ratios.append(spent["with"][-1] / spent["without"][-1])
    figures = {f"{name} rules, µs": round(median(values), 1) for name, values in spent.items()}
    print(json.dumps({**figures, "times as long": round(median(ratios), 3)}, ensure_ascii=False))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cheats", "honest", "planted", "cost"))
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--part", default="0/1", help="of the cheats only every so many, from this one on")
    options = parser.parse_args()
    first, _, of = options.part.partition("/")
    match options.what:
        case "cheats":
            count_gallery(options.tasks, (int(first), int(of)))
        case "honest":
            count_honest(options.tasks)
        case "planted":
            count_planted(options.tasks)
        case _:
            measure_cost(options.tasks)


if __name__ == "__main__":
    main()
