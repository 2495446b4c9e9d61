// Why a conversation got its reward, and all other details about it.

import { h, plain, toJson, toSeconds } from "./dom.js";
import { writeArguments } from "./transcript.js";

export function drawWhy({ trajectory, prompts, seconds, entry, decision }) {
  const { reward, task } = trajectory;
  return [
    h("section", { class: "verdict" }, h("h2", {}, "Why"), reward ? drawParts(reward) : drawFailure(trajectory), h("p", { class: "muted" }, toEnd(trajectory, seconds))),
    drawDecision(decision),
    drawExpected(task.expected),
    drawBreaches(reward ?? {}),
    drawFindings(trajectory),
    drawAdvantage(entry),
    more("Instructions of the user", h("div", { class: "text document", dir: "auto" }, plain(task.instructions)), true),
    drawDocuments("Policy", prompts.policies),
    drawDocuments("Prompt of the user's model", prompts.users),
    drawTools("Tools of the agent", prompts.tools),
    drawTools("Tools of the user", prompts.user_tools),
    drawNotes(trajectory.meta),
    task.setup ? more("World at the start", raw(task.setup)) : null,
    more("Raw JSON", raw(trajectory)),
  ];
}

function drawParts(reward) {
  const left = [...(reward.why ?? [])];
  const groups = Object.entries(reward.parts ?? {}).map(([name, value]) => {
    const own = left.filter((text) => text.startsWith(`${name}:`));
    for (const text of own) left.splice(left.indexOf(text), 1);
    const good = value >= 1 - 1e-6;
    const differences = name === "database" ? reward.differences ?? [] : [];
    return h("div", { class: `part ${good ? "good" : "bad"}` },
      h("h3", {}, h("span", { class: "sign", "aria-hidden": "true" }, good ? "✓" : "✗"), ` ${name.replaceAll("_", " ")}`, h("span", { class: "unheard" }, good ? " holds" : " does not hold"), value > 0 && value < 1 ? ` ${value.toFixed(2)}` : ""),
      differences.length ? h("div", { class: "differences" }, differences.map(drawDifference), own.slice(differences.length).map((text) => h("p", {}, plain(text)))) : own.map((text) => h("p", {}, plain(text.slice(name.length + 1).trim()))));
  });
  return [groups, left.map((text) => h("p", { class: "evidence" }, plain(text)))];
}

function drawDifference({ path, expected, actual }) {
  return h("div", { class: "difference" }, h("code", { class: "path" }, plain(path)),
    h("div", { class: "expected" }, h("span", { class: "what" }, "expected"), h("code", {}, plain(toJson(expected)))),
    h("div", { class: "actual" }, h("span", { class: "what" }, "actual"), h("code", {}, plain(toJson(actual)))));
}

function drawFailure({ error, blame }) {
  return h("div", { class: "part bad" }, h("h3", {}, h("span", { class: "sign", "aria-hidden": "true" }, "!"), " failed, no reward"), h("p", {}, plain(error ?? "no reason recorded")), blame ? h("p", {}, `to blame: ${blame}`) : null);
}

function toEnd({ end, turns }, seconds) {
  const took = seconds.reduce((sum, value) => sum + value, 0);
  return `Ended by ${end.replace("_", " ")} after ${turns.length} turns${took ? `, ${toSeconds(took)}` : ""}.`;
}

function drawExpected(expected) {
  if (!expected) return null;
  const calls = (expected.calls ?? []).map((call) => h("li", { class: "call-line" }, h("span", { class: "tool-name" }, plain(call.name)), writeArguments(call.arguments)));
  const say = (expected.say ?? []).map((words) => h("li", {}, "says ", h("q", {}, plain([words].flat().join(" or ")))));
  const holds = (expected.assertions ?? []).map((item) => h("li", { class: "call-line" }, h("span", { class: "tool-name" }, plain(item.name)), writeArguments(item.arguments), ` is ${item.value ?? true}`));
  const nothing = expected.nothing ? [h("li", {}, "nothing should be done")] : [];
  return h("section", {}, h("h2", {}, "Expected"), h("ul", { class: "expectations" }, calls, say, holds, nothing));
}

/** Whether a synthesised conversation was accepted into the corpus, and the verdict of each stage. */
function drawDecision(decision) {
  if (!decision) return null;
  const { accepted, verdicts = [] } = decision;
  const waits = accepted && !verdicts.some(({ stage }) => stage === "review");
  return h("section", { class: "decision" }, h("h2", {}, accepted ? "Accepted" : "Rejected"),
    verdicts.map((verdict) => h("div", { class: `part ${verdict.accepted ? "good" : "bad"}` },
      h("h3", {}, h("span", { class: "sign", "aria-hidden": "true" }, verdict.accepted ? "✓" : "✗"), ` ${verdict.stage}`, verdict.by ? h("span", { class: "muted" }, " ", plain(verdict.by)) : null, h("span", { class: "unheard" }, verdict.accepted ? " accepts it" : " rejects it")),
      verdict.flaws?.length ? null : (verdict.reasons ?? []).map((reason) => h("p", {}, plain(reason))),
      verdict.note && !verdict.reasons?.includes(verdict.note) ? h("p", {}, plain(verdict.note)) : null,
      verdict.scores ? h("p", { class: "muted" }, Object.entries(verdict.scores).map(([point, score]) => `${point} ${score}`).join(" · ")) : null,
      (verdict.flaws ?? []).map((flaw) => h("p", {}, h("b", {}, flaw.check), " ", toTurn(flaw.turn), " ", plain(flaw.text))))),
    waits ? h("p", { class: "muted" }, "Not reviewed yet: trialogue review will show it.") : null);
}

function toTurn(turn) {
  return h("button", { type: "button", class: "link", onclick: () => document.getElementById(`turn-${turn + 1}`)?.scrollIntoView({ block: "center" }) }, `turn ${turn + 1}`);
}

/** The rules of the policy that the agent broke: where, how it shows, and the sentence each stands for. */
function drawBreaches({ outcome, compliance, breaches = [] }) {
  if (compliance === null || compliance === undefined) return null;
  const kept = breaches.length ? `${(100 * compliance).toFixed(0)} % of the rules kept; without rules it would be worth ${outcome}.` : "Every rule kept.";
  return h("section", { class: "breaches" }, h("h2", {}, "Policy"), h("p", { class: "muted" }, kept),
    breaches.map((item) => h("div", { class: "part bad" },
      h("h3", {}, plain(item.rule), " ", toTurn(item.turn), item.required === false ? h("span", { class: "muted" }, " (only reported)") : null),
      h("p", {}, plain(item.evidence)),
      item.policy ? h("p", { class: "muted" }, h("q", {}, plain(item.policy))) : null)));
}

/** What the audit of the simulated user found. */
function drawFindings({ findings = [], excluded }) {
  if (!findings.length) return null;
  return h("section", { class: "findings" }, h("h2", {}, "Audit of the user"),
    excluded ? h("p", { class: "bad" }, "Excluded: graded, but in no baseline and no figure.") : null,
    findings.map((item) => h("div", { class: "part bad" }, h("h3", {}, item.kind.replaceAll("_", " "), " ", toTurn(item.turn)), h("p", {}, plain(item.evidence), item.by === "judge" ? h("span", { class: "muted" }, " (a judge)") : null))));
}

function drawAdvantage({ advantage }) {
  if (advantage === null || advantage === undefined) return null;
  return h("section", {}, h("h2", {}, "Learning"), h("p", {}, "Advantage ", h("b", { class: advantage > 0 ? "good" : "bad" }, `${advantage > 0 ? "+" : ""}${advantage.toFixed(3)}`), ": the weight of every sampled token in learning."));
}

/** Everything else in the conversation's metadata. */
function drawNotes(meta = {}) {
  const notes = Object.entries(meta).filter(([key]) => !["domain", "advantage"].includes(key));
  return notes.length ? more("Notes", h("div", {}, notes.map(([key, value]) => h("div", { class: "note" }, h("h3", {}, key), typeof value === "string" ? h("p", {}, plain(value)) : raw(value))))) : null;
}

function drawDocuments(name, texts = []) {
  if (!texts.length) return null;
  return more(texts.length > 1 ? `${name} (${texts.length}, by task)` : name, h("div", {}, texts.map((text) => h("div", { class: "text document", dir: "auto" }, plain(text)))));
}

function drawTools(name, tools = []) {
  return tools.length ? more(`${name} (${tools.length})`, h("div", {}, tools.map((tool) => drawTool(tool.function ?? tool)))) : null;
}

function drawTool(tool) {
  const names = Object.keys(tool.parameters?.properties ?? {});
  return h("div", { class: "tool-card" }, h("h3", {}, h("code", {}, plain(tool.name), `(${names.join(", ")})`)), h("p", {}, plain(tool.description)));
}

function raw(value) {
  return h("pre", { class: "raw", tabindex: "0" }, plain(JSON.stringify(value, null, 2)));
}

function more(name, content, open = false) {
  return h("details", { class: "more", open }, h("summary", {}, name), content);
}
