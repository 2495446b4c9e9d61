"""Time to open the page of a large run: 10,000 conversations of 50 turns, generated first.

python speed/view.py              make the run, serve it, measure, print
python speed/view.py --make DIR   only make it
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from urllib.request import urlopen

from trialogue.config import EvalConfig, RunSettings
from trialogue.messages import Message, ToolCall
from trialogue.records import to_entry
from trialogue.run import Run
from trialogue.task import Task
from trialogue.trajectory import Reward, Tokens, Trajectory, Turn

FAMILIES = ("cancel", "refund", "change_address", "question")


def make_run(folder: Path, conversations: int = 10_000, turns: int = 50, steps: int = 40) -> Path:
    """A training run with realistic sizes: some conversations are complete, the others are variants of
    them."""
    run = Run.create(RunSettings(directory=str(folder), name="large"), "train", "shop", EvalConfig(), 0)
    chance = random.Random(0)
    patterns = [make_conversation(chance, turns) for _ in range(24)]
    texts = [item.to_json() for item in patterns]
    per_step = conversations // steps
    for step in range(1, steps + 1):
        file = f"step-{step:06d}"
        lines: list[str] = []
        entries: list[str] = []
        timings: list[str] = []
        at = 0
        for number in range(per_step):
            place = chance.randrange(len(patterns))
            task = f"shop-train-{step}-{number // 8}"
            identity = f"{step}/{task}/{number % 8}"
            won = chance.random() < 0.3 + 0.4 * step / steps
            line = texts[place].replace("TASK", task).replace("IDENTITY", identity)
            line = line.replace('"value":0.5', f'"value":{float(won)}')
            size = len(line.encode()) + 1
            known = to_entry(patterns[place], file, at, size)
            changes = {"id": identity, "task": task, "trial": number % 8, "reward": float(won)}
            entries.append(known.model_copy(update=changes).model_dump_json(exclude_defaults=True))
            seconds = [round(chance.random(), 4) for _ in range(turns)]
            parts = {"agent": sum(seconds), "user": 1.0, "tools": 0.01}
            timings.append(json.dumps({"id": identity, "seconds": parts, "turns": seconds}))
            lines.append(line)
            at += size
        run.append(f"trajectories/{file}.jsonl", *lines)
        run.append("index.jsonl", *entries)
        run.append("timings.jsonl", *timings)
        tools = {"get_order": 100 + step, "cancel_order": 40}
        reward = 0.3 + 0.4 * step / steps
        figures = {"reward": reward, "reward_spread": 0.3, "turns": float(turns), "tools": tools}
        run.add_metrics({"step": step, **figures, "no_signal": 0.2, "entropy": 0.3, "failed": 0})
        run.add_timings(step, rollout=9.0, update=4.0)
    run.close("finished")
    return run.path


def make_conversation(chance: random.Random, turns: int) -> Trajectory:
    words = "order refund please thank you number street item status card check gift late parcel happy"

    def say(count: int) -> str:
        return " ".join(chance.choices(words.split(), k=count)).capitalize() + "."

    held: list[Turn] = []
    while len(held) < turns:
        held.append(Turn(side="user", message=Message(role="user", content=say(12))))
        call = ToolCall(id=f"call_{len(held)}", name="get_order", arguments={"order_id": say(1)})
        ids = tuple(chance.randrange(1000) for _ in range(16))
        tokens = Tokens(start=len(held) == 1, prompt=ids, reply=ids, logprobs=(-0.125,) * 16)
        held.append(Turn(side="agent", message=Message(role="assistant", tool_calls=(call,)), tokens=tokens))
        result = Message(role="tool", content=json.dumps({"status": say(30)}), tool_call_id=call.id)
        held.append(Turn(side="agent", message=result))
        held.append(Turn(side="agent", message=Message(role="assistant", content=say(20)), tokens=tokens))
    family = chance.choice(FAMILIES)
    task = Task(id="TASK", domain="shop", instructions=say(80), meta={"family": family, "level": 1})
    return Trajectory(
        id="IDENTITY",
        task=task,
        turns=tuple(held[:turns]),
        end="user_stop",
        reward=Reward(value=0.5, parts={"database": 0.5}, why=("made on the spot",)),
    )


def measure(folder: Path) -> dict[str, float]:
    """Seconds of the requests for opening the page, the first and the second time, processor seconds of the
    server for the first, and its memory."""
    command = [sys.executable, "-m", "trialogue", "view", str(folder), "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        address = json.loads(server.stdout.readline())["address"]
        seconds: dict[str, float] = {}

        def ask(name: str, question: str) -> None:
            started = perf_counter()
            with urlopen(f"{address}{question}") as answer:
                answer.read()
            seconds[name] = round(perf_counter() - started, 3)

        started, used = perf_counter(), read_processor(server.pid)
        ask("runs", "api/runs")
        ask("run", "api/run?run=large")
        ask("list", "api/conversations?run=large&limit=100")
        seconds["open"] = round(perf_counter() - started, 3)
        seconds["open, processor"] = round(read_processor(server.pid) - used, 3)
        ask("run again", "api/run?run=large")
        ask("filter", "api/conversations?run=large&reward=lost&family=refund&sort=-turns")
        ask("deep in the list", "api/conversations?run=large&offset=9900")
        ask("conversation", "api/conversation?run=large&id=20/shop-train-20-3/4")
        ask("first of a search", "api/conversations?run=large&text=parcel%20late%20happy")
        pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
        seconds["megabytes"] = round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
        return seconds
    finally:
        server.terminate()
        server.wait()


def read_processor(process: int) -> float:
    """Processor seconds of a process. On busy cores they are more accurate than the clock."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", metavar="DIR", help="Only make the run, in this folder")
    parser.add_argument("--conversations", type=int, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(given.make or place)
        started = perf_counter()
        path = make_run(folder, given.conversations)
        size = sum(file.stat().st_size for file in path.rglob("*.jsonl"))
        print(
            f"made {given.conversations} conversations, {size / 1e6:.0f} MB, {perf_counter() - started:.1f} s"
        )
        if not given.make:
            for name, value in measure(folder).items():
                print(f"{name:<18}{value:>8} {'MB' if name == 'megabytes' else 's'}")


if __name__ == "__main__":
    main()
