"""What a command shows in the terminal: live progress, then a table. Without a terminal: plain lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from rich.panel import Panel
from rich.text import Text

from trialogue.activity import ACTIVITY, silence
from trialogue.screen import Row, Screen, block, one_line
from trialogue.trajectory import SUCCESS, Trajectory, differs, tell_near_calls, tell_no_success, tell_stuck


@contextmanager
def show_progress(quiet: bool = False) -> Generator[None]:
    """Show a live line of progress on a terminal; elsewhere `heartbeat` writes plain lines."""
    console = Screen(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    with silence(), console.status("starting …") as status:
        over = Event()

        def follow() -> None:
            while not over.wait(0.25):
                status.update(one_line(ACTIVITY.describe() or "…"))

        thread = Thread(target=follow, daemon=True, name="progress")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def show_result(result: dict[str, Any], console: Screen | None = None) -> None:
    """Show an evaluation as a table: overall, by family, by level, and how conversations ended."""
    console = console or Screen()
    title = f"{result['domain']} · {result['split']} · agent {result['agent']} · user {result['user']}"
    hats = [key for key in result if key.startswith("pass^") and "_" not in key]
    shown = hats[:3]  # these fit into eighty columns; the others come below
    headings = ("", "tasks", *(shown[:1] or ["pass^1"]), "95 %", *shown[1:], "turns", "calls")
    rows: list[Row | None] = [_to_row("all", result, shown)]
    for part in ("families", "levels"):
        if result[part]:
            rows.append(None)
        for name, figures in result[part].items():
            rows.append(_to_row(name if part == "families" else f"level {name}", figures, shown))
    console.print_table(title, headings, rows)
    if len(hats) > len(shown):
        more = ", ".join(f"{hat} {result[hat]:.3f}" for hat in hats[len(shown) :])
        console.print(f"{more} (all tasks)")
    if result["family_mean"] is not None:
        number = sum("pass^1" in figures for figures in result["families"].values())
        console.print(f"mean of {number} families: {result['family_mean']:.3f}")
    if differs(result.get("reward"), result.get("pass^1")):
        console.print(f"mean reward: {result['reward']:.3f}")
    if policy := tell_compliance(result):
        console.print(policy, soft_wrap=True)
    ends = ", ".join(f"{end} {count}" for end, count in result["ends"].items())
    console.print(f"ends: {ends}")
    if failed := tell_failed(result):
        console.print(failed, soft_wrap=True)
        for error, count in result.get("errors", {}).items():
            console.print(f"  {count} × {error}")
    if result.get("near_calls"):
        console.print(tell_near_calls(result["near_calls"]), style="yellow", soft_wrap=True)
    if result.get("no_success"):
        console.print(tell_no_success(*result["no_success"]), style="yellow", soft_wrap=True)
    if faults := tell_user_faults(result):
        console.print(faults, style="yellow", soft_wrap=True)
    if wordings := tell_wordings(result):
        console.print(wordings, soft_wrap=True)
    for text in spending(result):
        console.print(text)
    for name, note in result.get("notes", {}).items():
        console.print(f"{name}: {note}")
    console.print(f"run: {result['run']}", soft_wrap=True)


def tell_user_faults(result: dict[str, Any]) -> str:
    """What the user did wrong, and the agent's success with and without it; empty if nothing was found."""
    audit, stuck = result.get("audit"), result.get("stuck", {})
    if audit is None or not (audit["conversations"] or stuck):
        return ""
    found = ", ".join(f"{kind} {count}" for kind, count in audit["findings"].items())
    lines = [tell_stuck(stuck)] * bool(stuck)
    if audit["conversations"]:
        left_out = f"; {audit['excluded']} left out" if audit["excluded"] else ""
        lines.append(f"user: findings in {audit['conversations']} conversations ({found}){left_out}")
    kinds = {"all": "in all conversations", "clean": "in those without a fault of the user"}
    rates = {kind: audit["success"][kind].get("pass^1") for kind in kinds}
    shown = [f"{kinds[kind]} {rate:.3f}" for kind, rate in rates.items() if rate is not None]
    lines += [f"success {', '.join(shown)}"] * bool(shown)
    return "\n".join(lines)


def tell_wordings(result: dict[str, Any]) -> str:
    """How many of a guided user's sentences are the model's own; empty without a guided user."""
    if not (guided := result.get("guided")):
        return ""
    number = guided["sentences"]
    faults = ", ".join(f"{fault} {count}" for fault, count in guided["faults"].items())
    why = f" (faults: {faults})" if faults else ""
    return (
        f"guided user: {number} sentences, {guided['again'] / number:.1%} from a second try, "
        f"{guided['replaced'] / number:.1%} replaced by the rule's own{why}"
    )


def tell_compliance(result: dict[str, Any]) -> str:
    """How far the policy was kept; empty where it has no rules."""
    if "compliant" not in result:
        return ""
    broken = ", ".join(f"{rule} {count}" for rule, count in result["breaches"].items())
    kept = f"policy: {result['compliant']:.1%} of conversations keep every rule"
    return f"{kept}; outcome without rules {result['outcome']:.3f}; broken: {broken}" if broken else kept


def tell_failed(result: dict[str, Any]) -> str:
    """How many conversations are in no figure, and how many attempts failed; empty if nothing failed."""
    missing, attempts = result["asked"] - result["conversations"], result["failed"]
    blame = ", ".join(f"{who} {count}" for who, count in result["blame"].items())
    tried = f"{attempts} attempt{'s' * (attempts != 1)}; blame: {blame}"
    if missing:
        verb = "is" if missing == 1 else "are"
        why = f" ({tried})" if attempts else " (left out because of the user)"
        return f"{missing} of {result['asked']} conversations failed and {verb} in no figure{why}"
    return f"every conversation was held, after some had failed at first ({tried})" if attempts else ""


def spending(result: dict[str, Any]) -> list[str]:
    """Tokens, money and time of an evaluation, one line per side."""
    lines: list[str] = []
    for side, used in result["sides"].items():
        if used["calls"]:
            money = f", cost {used['cost']:.4f}" if used["cost"] is not None else ""
            time = f", {used['seconds']:.1f} s" if used["seconds"] is not None else ""
            lines.append(
                f"{side}: {used['calls']} calls, {used['prompt']} prompt and {used['completion']} completion "
                f"tokens{money}{time}"
            )
    lines.append(f"wall clock: {result['wall_seconds']:.1f} s")
    return lines


def _to_row(name: str, figures: dict[str, Any], hats: list[str]) -> Row:
    if "pass^1" not in figures:
        return name, str(figures["tasks"])
    return (
        name,
        str(figures["tasks"]),
        f"{figures['pass^1']:.3f}",
        f"{figures['pass^1_low']:.3f}–{figures['pass^1_high']:.3f}",
        *(f"{figures[hat]:.3f}" if hat in figures else "–" for hat in hats[1:]),
        f"{figures['turns']:.1f}",
        f"{figures['tool_calls']:.1f}",
    )


def show_why(
    trajectory: Trajectory, ended: str, changes: Sequence[tuple[str, Any, Any]], console: Screen
) -> None:
    """Show why a conversation ended and got its reward: parts, evidence, changes of the database."""
    reward = trajectory.reward
    lines: list[tuple[str, str]] = []
    if reward is None:
        lines.append((f"no reward: {trajectory.error or 'not graded'} (blame: {trajectory.blame})", "red"))
    else:
        for name, value in reward.parts.items():
            lines.append(
                (f"{'✓' if value >= SUCCESS else '✗'} {name}", "green" if value >= SUCCESS else "red")
            )
        lines += [(f"  {text}", "default") for text in reward.why]
    if changes:
        lines.append(("changed:", "bold"))
    for path, before, after in changes:
        lines.append((f"  {path}", "default"))
        lines += [(f"    - {_value(before)}", "red"), (f"    + {_value(after)}", "green")]
    if not changes:
        lines.append(("changed: nothing", "bold"))
    why = f": {ended}" if ended else ""
    lines.append((f"ended by {trajectory.end} after {len(trajectory.turns)} turns{why}", "bright_black"))
    text = Text("\n").join(one_line(told, style) for told, style in lines)
    title = "no reward" if reward is None else f"reward {reward.value:.2f}"
    console.print(Panel(text, title=one_line(title), title_align="left", expand=False))


def _value(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)


def to_kind(problem: str) -> str:
    """A problem without the values of its task, so that many of one kind are shown once."""
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "…", problem)
    return " ".join("…" if any(sign.isdigit() for sign in word) else word for word in unquoted.split())


def show_check(checked: dict[str, Any], played: int, console: Screen | None = None) -> None:
    """Show the outcome of a check, with equal problems grouped."""
    console = console or Screen()
    by_text: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for problem in checked["problems"]:
        kind = to_kind(problem["problem"])
        by_text.setdefault(kind, []).append(problem["task"])
        first.setdefault(kind, problem["problem"])
    for kind, tasks in list(by_text.items())[:50]:
        text = first[kind]
        named = [task for task in tasks if task]
        where = ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")
        told = one_line(f"{where}: {text}" if where else text)
        console.print(Text.assemble(("✗ ", "bold red"), told), soft_wrap=True)
    hidden = sum(len(tasks) for tasks in list(by_text.values())[50:])
    if hidden:
        console.print(f"… and {hidden} more problems; --json lists all")
    if checked.get("policy"):
        for text in tell_policy(checked["policy"]):
            console.print(one_line(text), soft_wrap=True)
    number, lines = len(checked["problems"]), len(by_text)
    verdict = "ok" if checked["ok"] else f"{number} problem{'s' if number > 1 else ''}"
    if lines < number:
        verdict += f" of {lines} kind{'s' if lines > 1 else ''}"
    text = (
        f"{checked['domain']}: {checked['tasks']} tasks checked, {played} played by the rule-based parties: "
    )
    ending = one_line(verdict, "bold green" if checked["ok"] else "bold red")
    console.print(Text.assemble(one_line(text), ending), soft_wrap=True)


def tell_policy(policy: dict[str, Any]) -> list[str]:
    """What the rules of a policy leave out, one line each."""
    lines = [f"policy: not checked by a rule, which is allowed: {text}" for text in policy["without_rule"]]
    if policy["never_exercised"]:
        lines.append(f"policy: never exercised: {', '.join(policy['never_exercised'])}")
    covered = policy["sentences"] - len(policy["without_rule"])
    lines.append(f"policy: {policy['rules']} rules stand for {covered} of {policy['sentences']} sentences")
    return lines


def show_cheats(counts: Sequence[dict[str, Any]], console: Screen | None = None) -> None:
    """Show how often each cheat was paid, without rules and with them."""
    console = console or Screen()
    headings = ("cheat", "cheated", "paid without rules", "with", "what forbids it")
    rows: list[Row | None] = [
        (
            one["cheat"],
            str(one["cheated"]),
            str(one["paid_without_rules"]),
            str(one["paid_with_rules"]),
            next(iter(one["rules"]), ""),
        )
        for one in counts
    ]
    console.print_table("cheats", headings, rows)


def show_corpus(result: dict[str, Any], console: Screen | None = None) -> None:
    """Show the result of a synthesis: how many conversations were accepted and why others were rejected."""
    console = console or Screen()
    title = f"{result['domain']} · agent {result['agent']} · user {result['user']}"
    rows = [("held", result["held"]), ("accepted", result["accepted"])]
    rows += [(f"  {part}", result[part]) for part in ("train", "validation")]
    rows += [
        ("rejected", result["rejected"]),
        *((f"  {why}", number) for why, number in result["reasons"].items()),
    ]
    console.print_table(title, ("", "conversations"), ((name, str(number)) for name, number in rows))
    if result["cost"] is not None:
        console.print(f"cost: {result['cost']:.4f}")
    console.print(f"wall clock: {result['wall_seconds']:.1f} s")
    for file in ("accepted.jsonl", "rejected.jsonl", "train.parquet", "validation.parquet"):
        console.print(f"{result['run']}/{file}", soft_wrap=True)


def show_conversation(trajectory: Trajectory, place: str, console: Screen) -> None:
    """Show one conversation for review: the user's scenario, the turns, the verdicts so far."""
    console.rule(one_line(f"{place} · {trajectory.id} · {trajectory.end}"))
    console.print(block("  ", trajectory.task.instructions, "italic"), soft_wrap=True)
    for turn in trajectory.turns:
        message = turn.message
        if message.role == "tool":
            style = "red" if turn.failed else "bright_black"
            console.print(block("  = ", message.content, style), soft_wrap=True)
        elif message.content:
            style = "bold" if turn.side == "agent" else "cyan"
            console.print(block(f"{turn.side}: ", message.content, style), soft_wrap=True)
        for call in message.tool_calls:
            console.print(one_line(f"  > {call.name} {_value(call.arguments)}", "yellow"), soft_wrap=True)
    for verdict in trajectory.meta.get("verdicts", ()):
        word = "accepted" if verdict["accepted"] else f"rejected: {', '.join(verdict.get('reasons', ()))}"
        by = f" by {verdict['by']}" if verdict.get("by") else ""
        console.print(one_line(f"{verdict['stage']}{by}: {word} {verdict.get('note', '')}", "magenta"))


def show_users(result: dict[str, Any], console: Screen | None = None) -> None:
    """Show several simulated users side by side, and how often their conversations end alike."""
    console = console or Screen()
    lines: dict[str, Callable[[dict[str, Any]], str]] = {
        "success %": lambda row: _percent(row["pass^1"]),
        "  95 % interval": lambda row: f"{_percent(row['pass^1_low'])} to {_percent(row['pass^1_high'])}",
        "conversations": lambda row: f"{row['conversations']} ({row['failed']} failed)",
        "user turns": lambda row: _number(row["user_turns"]),
        "words per turn": lambda row: _number(row["words_per_turn"]),
        "findings per 100": lambda row: _number(row["findings_per_100"]),
        "distinct openings %": lambda row: _percent(row["distinct_openings"]),
        "facts told per turn": lambda row: _number(row["revealed_per_turn"]),
        "facts told at once %": lambda row: _percent(row["revealed_at_once"]),
        "cost": lambda row: _number(row["cost"]),
    }
    users: dict[str, dict[str, Any]] = result["users"]
    rows = ((name, *(show(row) for row in users.values())) for name, show in lines.items())
    console.print_table("", ("", *users), rows)
    for pair, found in result["agreement"].items():
        if found["conversations"]:
            console.print(
                f"{pair}: same outcome in {_percent(found['same'])} % of {found['conversations']} "
                f"conversations (kappa {found['kappa']:.2f})",
                highlight=False,
            )
    for user, row in result["users"].items():
        for kind, count in row["findings"].items():
            console.print(f"{user}: {kind} {count}")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
