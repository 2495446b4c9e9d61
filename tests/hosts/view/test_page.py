"""Every screen in a real browser over a real run of the shop: what is shown, what keys and filters do, what
an address brings back, and what an exported file asks for (nothing)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from looking import Site, Watch, find_runs, go, new_page, serve
from playwright.sync_api import Browser, Page, expect


def test_the_runs(page: Page, site: Site) -> None:
    go(page, site.address)
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(4)
    agent = rows.filter(has_text="agent").filter(has_text="train")
    expect(agent.locator("svg.spark")).to_be_visible()
    expect(agent).to_contain_text("finished")
    expect(rows.filter(has_text="oracle").first).to_contain_text("100.0 %")
    page.keyboard.press("j")
    expect(rows.nth(1)).to_have_class("marked")
    page.keyboard.press("k")
    page.get_by_role("link", name="agent", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("agent")


def test_the_charts_have_data(page: Page, site: Site) -> None:
    go(page, site.to("agent"))
    steps = site.ask("run", run="agent")["steps_shown"]
    titles = ["Reward", "Held-out pass^1", "Turns and calls", "Reply length", "Seconds a step", "Tool use"]
    for title in [*titles, "Reward by family"]:
        chart = page.locator(f'figure[data-title="{title}"]')
        expect(chart).to_be_visible()
        shapes = chart.locator("path.line, .layer")
        assert shapes.count() > 0
        drawn = shapes.first.get_attribute("d") or shapes.first.get_attribute("height") or ""
        assert len(drawn) > 0
        expect(chart.locator(".key b").first).not_to_be_empty()
    signals = page.locator('figure[data-title="Learning signals"] tr')
    assert signals.count() >= 5
    reward = page.locator('figure[data-title="Reward"]')
    box = reward.locator("svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 4, box["y"] + 40)
    expect(reward.locator(".at")).to_have_text(f"step {steps[-1]}")
    expect(page.locator('figure[data-title="Tool use"] .at')).to_have_text(f"step {steps[-1]}")
    page.mouse.click(box["x"] + box["width"] - 4, box["y"] + 40)
    expect(page.locator(".list tbody tr.marked td.column-step")).to_have_text(str(steps[-1]))
    assert f"step={steps[-1]}" in page.url


def test_an_evaluation(page: Page, site: Site) -> None:
    go(page, site.to("oracle"))
    expect(page.locator('figure[data-title="All tasks"]')).to_contain_text("pass^2")
    page.locator('figure[data-title="By family, pass^1"] button').first.click()
    assert "family=" in page.url


def test_a_corpus(page: Page, site: Site) -> None:
    """What was taken, what was not and why, what a person said and what still waits for one."""
    told = site.ask("run", run="corpus")
    assert told["decisions"]["reviewed"] == 2
    assert told["decisions"]["to review"] == told["decisions"]["accepted"] - 1
    go(page, site.to("corpus"))
    expect(page.locator('figure[data-title="Left out, by reason"]')).to_contain_text("review: too terse")
    page.get_by_role("button", name="to review").click()
    expect(page.locator(".count")).to_contain_text(f"{told['decisions']['to review']:,} conversation")
    go(page, site.to("corpus", verdict="review: too terse to imitate"))
    expect(page.locator(".count")).to_have_text("1 conversation")
    page.locator(".list tbody a").first.click()
    decision = page.locator(".decision")
    expect(decision).to_contain_text("Rejected")
    expect(decision.locator(".part.good")).to_contain_text("program")
    expect(decision.locator(".part.bad")).to_contain_text("review Ada")
    expect(decision.locator(".part.bad")).to_contain_text("too terse to imitate")
    reasons = [name for name in told["decisions"] if name.startswith("program: ")]
    for reason in reasons:
        row = site.ask("conversations", run="corpus", verdict=reason)["rows"][0]
        go(page, site.to("corpus", row["id"]))
        (verdict,) = site.ask("conversation", run="corpus", id=row["id"])["decision"]["verdicts"]
        shown = decision.locator(".part.bad")
        expect(shown).to_contain_text(
            verdict["note"] if "note" in verdict else reason.removeprefix("program: ")
        )
        for flaw in verdict.get("flaws", ()):
            expect(shown).to_contain_text(f"turn {flaw['turn'] + 1} {flaw['text']}")
    assert reasons


def test_fine_tuning(page: Page, site: Site) -> None:
    go(page, site.to("cold"))
    expect(page.locator('figure[data-title="Loss"] path.line').first).to_be_visible()


@pytest.mark.parametrize(
    ("name", "value"), [("reward", "won"), ("reward", "lost"), ("family", "cancel"), ("part", "eval")]
)
def test_filters_filter(page: Page, site: Site, name: str, value: str) -> None:
    go(page, site.to("agent"))
    expected = site.ask("conversations", run="agent", **{name: value})["total"]
    everything = site.ask("conversations", run="agent")["total"]
    assert 0 < expected < everything
    page.locator(f"select[name={name}]").select_option(value)
    expect(page.locator(".count")).to_have_text(f"{expected:,} conversation{'s' if expected != 1 else ''}")
    address = page.url
    go(page, address)  # the address alone brings the same back
    expect(page.locator(f"select[name={name}]")).to_have_value(value)
    expect(page.locator(".count")).to_contain_text(f"{expected:,} ")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".count")).to_contain_text(f"{everything:,} ")


def test_search_finds_what_was_said(page: Page, site: Site) -> None:
    row = site.find_group()
    turns = site.ask("conversation", run="agent", id=row["id"])["trajectory"]["turns"]
    words = turns[0]["message"]["content"][:40]
    go(page, site.to("agent"))
    page.keyboard.press("/")
    page.keyboard.type(words.upper())
    expect(page.locator(".count")).to_contain_text("found, all of")
    expect(page.locator(".list tbody")).to_contain_text(words)
    page.locator("input[name=text]").fill("nobody would ever say this")
    expect(page.locator(".list tbody")).to_contain_text("No conversation matches")


def test_lost_by_all_siblings(page: Page, site: Site) -> None:
    expected = site.ask("conversations", run="agent", lost=1)["total"]
    go(page, site.to("agent"))
    page.get_by_label("lost by all siblings").check()
    expect(page.locator(".count")).to_contain_text(f"{expected:,} conversation")


def test_a_conversation_and_why(page: Page, site: Site) -> None:
    row = site.find_group()
    told = site.ask("conversation", run="agent", id=row["id"])
    go(page, site.to("agent", row["id"]))
    spoken = [turn for turn in told["trajectory"]["turns"] if turn["message"]["role"] != "tool"]
    expect(page.locator("article.turn")).to_have_count(len(spoken))
    calls = sum(len(turn["message"].get("tool_calls", ())) for turn in spoken)
    expect(page.locator(".transcript .call")).to_have_count(calls)
    expect(page.locator(".transcript .call .answered .result")).to_have_count(calls)
    expect(page.locator(".why")).to_contain_text("Instructions of the user")
    for part, value in told["trajectory"]["reward"]["parts"].items():
        expect(page.locator(f".part.{'good' if value else 'bad'}", has_text=part)).to_have_count(1)
    for difference in told["trajectory"]["reward"].get("differences", ()):
        expect(page.locator(".difference", has_text=difference["path"]).first).to_be_visible()
    page.get_by_text("Raw JSON").click()
    expect(page.locator("pre.raw").last).to_contain_text(row["task"])
    page.locator("summary", has_text="Policy").click()
    expect(page.locator(".document").nth(1)).to_be_visible()


def test_keys_move_among_siblings_and_neighbours(page: Page, site: Site) -> None:
    row = site.find_group()
    told = site.ask("conversation", run="agent", id=row["id"])
    ids = [item["id"] for item in told["siblings"]]
    at = ids.index(row["id"])
    go(page, site.to("agent", row["id"]))
    current = page.locator(".sibling[aria-current]")
    page.keyboard.press("l")
    expect(current).to_have_text(str((at + 1) % len(ids) + 1))
    page.keyboard.press("h")
    expect(current).to_have_text(str(at + 1))
    page.keyboard.press("j")
    page.wait_for_url(site.to("agent", told["next"]))
    page.keyboard.press("k")
    page.wait_for_url(site.to("agent", row["id"]))
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    expect(page.locator(".charts")).to_be_visible()


def test_tokens_show_what_was_learned_from(page: Page, site: Site) -> None:
    row = site.find_group()
    told = site.ask("tokens", run="agent", id=row["id"])
    assert told["advantage"] < 0
    sampled = sum(len(turn["reply"]) for turn in told["turns"])
    read = sum(len(turn["prompt"]) for turn in told["turns"])
    go(page, site.to("agent", row["id"]))
    page.keyboard.press("t")
    expect(page.locator(".tokens.down .stream .trained")).to_have_count(sampled)
    for fold in page.locator(".stream .fold").all():
        fold.click()
    expect(page.locator(".stream .token:not(.trained)")).to_have_count(read)
    trained = page.locator(".stream .trained").first
    assert trained.evaluate("node => getComputedStyle(node).backgroundColor") != "rgba(0, 0, 0, 0)"
    grey = page.locator(".stream .token:not(.trained)").first
    assert grey.evaluate("node => getComputedStyle(node).backgroundColor") == "rgba(0, 0, 0, 0)"
    trained.hover()
    first = told["turns"][0]["reply"][0]
    expect(page.locator(".told")).to_contain_text(f"id {first[0]} ")
    expect(page.locator(".told")).to_contain_text("mask 1")
    expect(page.locator(".told")).to_contain_text("logprob")
    text = "".join(piece for turn in told["turns"] for _, piece, *_ in turn["reply"])
    said = site.ask("conversation", run="agent", id=row["id"])["trajectory"]["turns"]
    for turn in said:
        if turn["side"] == "agent" and turn["message"]["role"] == "assistant":
            assert turn["message"].get("content", "") in text


def find_first_difference(site: Site, *ids: str) -> int:
    """The first turn in which two conversations differ; which id a call has does not matter."""

    def to_key(turn: dict[str, Any]) -> str:
        message = turn["message"]
        calls = [(call["name"], call.get("arguments")) for call in message.get("tool_calls", ())]
        return json.dumps([turn["side"], message["role"], message.get("content"), calls])

    told = [site.ask("conversation", run="agent", id=identity)["trajectory"]["turns"] for identity in ids]
    pairs = zip(*([to_key(turn) for turn in turns] for turns in told), strict=False)
    return next(number for number, pair in enumerate(pairs) if pair[0] != pair[1])


def test_compare_aligns_at_the_first_difference(page: Page, site: Site) -> None:
    row = site.find_group()
    go(page, site.to("agent", row["id"]))
    page.keyboard.press("c")
    expect(page.locator(".comparison")).to_be_visible()
    other = page.locator(".filters select").input_value()
    assert dict(row["group"])[other] == "won"  # the best against this one
    same = find_first_difference(site, row["id"], other)
    shown = page.locator(".split").text_content() or ""
    place = int(shown.rsplit(" ", 1)[1])
    assert place - 1 <= same <= place  # a tool's result belongs to the block of its call
    heads = page.locator(".heads h2")
    expect(heads.nth(0)).to_contain_text("✗")
    expect(heads.nth(1)).to_contain_text("✓")
    left, right = page.locator(".pair:not(.heads)").first.locator(".half").all()
    assert left.bounding_box()["y"] == right.bounding_box()["y"]  # pyright: ignore[reportOptionalSubscript]
    chosen = next(name for name, _ in row["group"] if name not in (row["id"], other))
    page.locator(".filters select").select_option(chosen)
    page.wait_for_url("**with=*")
    address = page.url
    go(page, address)
    expect(page.locator(".filters select")).to_have_value(chosen)


def test_a_run_in_progress_is_followed(browser: Browser, tmp_path: Path) -> None:
    source = find_runs() / "agent"
    copy = tmp_path / "runs" / "live"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("checkpoints", "model"))
    about = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**about, "state": "running"}))
    metrics = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    index = (copy / "index.jsonl").read_text().splitlines(keepends=True)
    last = max((copy / "trajectories").glob("step-*.jsonl"))
    held = last.read_bytes()
    last.unlink()
    left = [line for line in index if json.loads(line)["file"] != last.stem]
    (copy / "index.jsonl").write_text("".join(left))
    kept = [line for line in metrics if json.loads(line).get("step", 0) < int(last.stem[-6:])]
    (copy / "metrics.jsonl").write_text("".join(kept))
    with serve(tmp_path / "runs") as site:
        page = new_page(browser)
        watch = Watch(page, site.address)
        go(page, site.to("live"))
        expect(page.locator(".count")).to_contain_text(f"{len(left):,} ")
        expect(page.locator("#live")).to_have_text("following")
        last.write_bytes(held)
        place = max(number for number, line in enumerate(metrics) if "kind" not in json.loads(line))
        warned = {**json.loads(metrics[place]), "warnings": ["the entropy is 0.001"]}
        metrics[place] = json.dumps(warned) + "\n"
        for name, lines, before in (("index.jsonl", index, left), ("metrics.jsonl", metrics, kept)):
            with (copy / name).open("a") as file:
                file.writelines(line for line in lines if line not in before)
        expect(page.locator(".count")).to_contain_text(f"{len(index):,} ")
        expect(page.locator(".figures dd").first).to_contain_text(f"{int(last.stem[-6:])}/")
        expect(page.locator(".health .bad")).to_have_text(f"step {int(last.stem[-6:])}: the entropy is 0.001")
        page.context.close()
        assert not watch.problems, watch.problems


@pytest.mark.parametrize("of_conversation", [False, True], ids=["run", "conversation"])
def test_an_exported_file_asks_for_nothing(
    browser: Browser, site: Site, tmp_path: Path, of_conversation: bool
) -> None:
    row = site.find_group()
    target = tmp_path / "export.html"
    command = [sys.executable, "-m", "trialogue", "view", str(find_runs() / "agent"), "--export", str(target)]
    more = ["--id", row["id"]] if of_conversation else ["--most", "60"]
    subprocess.run([*command, *more], check=True, capture_output=True)
    page = new_page(browser, offline=True)
    watch = Watch(page, target.as_uri())
    page.goto(target.as_uri())
    page.wait_for_selector("body[data-ready]")
    if of_conversation:
        expect(page.locator(".sibling")).to_have_count(len(row["group"]))
        page.keyboard.press("t")
        expect(page.locator(".tokens .stream")).to_be_visible()
        page.keyboard.press("c")
        expect(page.locator(".comparison")).to_be_visible()
    else:
        expect(page.locator("figure.chart path.line").first).to_be_visible()
        page.locator("select[name=reward]").select_option("won")
        page.locator(".list tbody a").first.click()
        expect(page.locator("article.turn").first).to_be_visible()
        expect(page.locator(".verdict-mark")).to_contain_text("✓")
    assert {url.partition("#")[0] for url in watch.asked if not url.startswith("data:")} == {target.as_uri()}
    page.context.close()
    assert not watch.problems, watch.problems
