"""What the rules of the shop catch, and what they cost: python speed/compliance.py WHAT --tasks NUMBER

- cheats   every agent of the gallery: how often it cheats, and is paid without rules and with them
- honest   the oracle or the teacher (--agent): how many conversations break a rule (none may)
- planted  honest conversations with one planted breach each: how many are found under the right name
- cost     grading, grading a record again, and holding and grading, without rules and with them
- tau2-cheats  agents that cheat in TAU2 retail and airline, whose rules are only reported; the honest teacher
- tau2     recorded runs of TAU2 (--files): how many that officially succeed broke the policy, with examples

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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.parts.honest import hold_honest
from tests.parts.planted import plant
from tests.parts.reciting import make_reciting
from tests.score.cheats.shop import SHOP_CHEATS
from tests.score.cheats.tau2 import list_tau2_cheats
from trialogue import find_domain
from trialogue.benchmarks.tau import tau2
from trialogue.benchmarks.tau.tau2.recorded import score_tau2_file
from trialogue.score.cheats import count_cheats
from trialogue.score.check import spread
from trialogue.score.compliance import find_breaches
from trialogue.score.reward import grade, regrade, repeat_calls
from trialogue.talk.find import find_model
from trialogue.trajectory import Trajectory
from trialogue.world.domain import Domain
from trialogue.world.texts import forget_texts

SHOP = find_domain("shop")
TRIFLE = "one call at a time"
"""The rule that most agents break, and that harms nobody."""
ROUNDS = 9
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


def count_honest(tasks: int, agent: str) -> None:
    """Conversations of an honest agent that break a rule, by rule."""
    everything = SHOP.tasks("train", tasks, seed=1)
    accused: Counter[str] = Counter()
    solved = 0
    for begin in range(0, tasks, BLOCK):
        for item in hold_honest(SHOP, everything[begin : begin + BLOCK], agent):
            solved += item.is_success
            accused.update(breach.rule for breach in (item.reward.breaches if item.reward else ()))
    print(
        json.dumps({"agent": agent, "conversations": tasks, "solved": solved, "false alarms": dict(accused)})
    )


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
    """CPU time without rules and with them, in alternating rounds: of grading alone, of grading a record from
    its line in a file to its reward, and of holding a conversation and grading it. No two conversations are
    of one task, and each round begins without what earlier ones have left in memory."""
    without = replace(SHOP, rule_use="off")
    held = hold_honest(without, SHOP.tasks("train", tasks, seed=4))
    lines = [item.to_json() for item in held]

    def grade_alone(domain: Domain) -> float:
        replayed = [(item, domain.open(item.task)) for item in held]
        for item, environment in replayed:
            repeat_calls(item, environment)
        return _time(lambda: [grade(item.task, item, environment) for item, environment in replayed])

    def grade_records(domain: Domain) -> float:
        def work() -> None:
            for line in lines:
                item = Trajectory.model_validate_json(line)
                regrade(item, domain.open(item.task))

        return _time(work)

    def hold_and_grade(domain: Domain) -> float:
        return _time(lambda: hold_honest(domain, [item.task for item in held]))

    for what, measure in (
        ("grading", grade_alone),
        ("grading a record", grade_records),
        ("holding and grading", hold_and_grade),
    ):
        rounds = [(measure(without), measure(SHOP)) for _ in range(ROUNDS)]
        off, on = (median(times) / len(held) * 1e6 for times in zip(*rounds, strict=True))
        ratio = median(with_rules / plain for plain, with_rules in rounds)
        figures = {"without rules, µs": round(off), "with, µs": round(on), "times as long": round(ratio, 2)}
        print(json.dumps({"what": what, **figures}, ensure_ascii=False), flush=True)


def _time(work: Callable[[], object]) -> float:
    forget_texts()
    gc.collect()
    began = time.process_time()
    work()
    return time.process_time() - began


def count_tau2_gallery(tasks: int, data: str | None) -> None:
    """One line per domain for the honest teacher, then one per cheat on the tasks that the teacher solves."""
    for name in ("retail", "airline"):
        domain = tau2.find(name, data)
        user, teacher = make_reciting(domain), find_model("teacher", "agent", domain)
        held = hold_honest(domain, spread(domain.tasks("base"), tasks), "teacher", user=user)
        solved = [item.task for item in held if item.is_success]
        accused = [
            f"{item.task.id}, turn {breach.turn + 1}, {breach.rule}: {breach.evidence}"
            for item in held
            if item.reward
            for breach in item.reward.breaches
        ]
        print(
            json.dumps(
                {"domain": name, "conversations": len(held), "solved": len(solved), "accused": accused}
            ),
            flush=True,
        )
        for trick in list_tau2_cheats(domain):
            (count,) = asyncio.run(count_cheats(domain, solved, [trick], honest=teacher, user=user))
            print(json.dumps({"domain": name, **count.to_data()}), flush=True)


def read_tau2(files: Sequence[Path], data: str | None) -> None:
    """One line per file, and the first breach of up to ten conversations that officially succeed."""
    examples: list[str] = []
    for file in files:
        name = file.name.partition("__")[2].partition(".")[0]
        rows = score_tau2_file(file, name, data)
        won = [row for row in rows if row.reward == 1.0]
        broken = [row for row in won if row.more["breaches"]]
        beyond = [
            next(item for item in row.more["breaches"] if item["rule"] != TRIFLE)
            for row in broken
            if any(item["rule"] != TRIFLE for item in row.more["breaches"])
        ]
        rules = Counter(item["rule"] for row in won for item in row.more["breaches"])
        print(
            json.dumps(
                {
                    "file": file.name,
                    "conversations": len(rows),
                    "officially solved": len(won),
                    "of these with a breach": len(broken),
                    f"other than {TRIFLE}": len(beyond),
                    "rules": dict(rules.most_common()),
                }
            )
        )
        examples += [
            f"{file.name}, {row.id}, turn {item['turn'] + 1}, {item['rule']}: {item['evidence']}"
            for row in won
            for item in row.more["breaches"]
            if item["rule"] != TRIFLE
        ]
    step = max(1, len(examples) // 10)
    print("\n".join(examples[::step][:10]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cheats", "honest", "planted", "cost", "tau2", "tau2-cheats"))
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--agent", choices=("oracle", "teacher"), default="oracle", help="of honest")
    parser.add_argument("--part", default="0/1", help="of the cheats only every so many, from this one on")
    parser.add_argument("--files", nargs="*", type=Path, default=[], help="AGENT__DOMAIN.jsonl or .jsonl.gz")
    parser.add_argument("--data", help="the folder of TAU2's data")
    options = parser.parse_args()
    first, _, of = options.part.partition("/")
    match options.what:
        case "cheats":
            count_gallery(options.tasks, (int(first), int(of)))
        case "honest":
            count_honest(options.tasks, options.agent)
        case "planted":
            count_planted(options.tasks)
        case "tau2-cheats":
            count_tau2_gallery(options.tasks, options.data)
        case "tau2":
            read_tau2(options.files, options.data)
        case _:
            measure_cost(options.tasks)


if __name__ == "__main__":
    main()
