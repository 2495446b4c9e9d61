// The tokens of a conversation: sampled ones are tinted by their advantage, observed ones are grey.

import { h, toNumber } from "./dom.js";

const FOLDED = 160;

export function drawTokens({ advantage, turns }) {
  if (!turns.length) return h("p", { class: "muted" }, "No tokens were recorded: the agent's model did not run in this process.");
  const tone = advantage === null || advantage === undefined || advantage === 0 ? "flat" : advantage > 0 ? "up" : "down";
  const told = h("p", { class: "told", role: "status" }, "Point at a token.");
  const strength = Math.min(1, Math.abs(advantage ?? 0) / 2);
  const rows = [];
  for (const turn of turns) {
    if (turn.start || !rows.length) rows.push([]);
    rows[rows.length - 1].push(turn);
  }
  const sampled = turns.reduce((sum, turn) => sum + turn.reply.length, 0);
  const observed = turns.reduce((sum, turn) => sum + turn.prompt.length, 0);
  const box = h("div", { class: `tokens ${tone}` },
    h("p", { class: "legend" },
      h("span", { class: "token trained" }, tone === "flat" ? "sampled" : "learned from"), ` ${sampled} tokens`, tone === "flat" ? (advantage === 0 ? ", advantage 0" : ", not learned from") : `, advantage ${advantage > 0 ? "+" : ""}${advantage.toFixed(3)}`,
      " · ", h("span", { class: "token" }, "only read"), ` ${observed} tokens`,
      " · ", h("span", { class: "token trained unsure" }, "unlikely"), " probability below 0.5",
      turns.some((turn) => turn.prompt[0]?.[1] === null) ? " · no tokenizer here: ids are shown" : ""),
    told,
    rows.map((row, number) => h("section", { class: "row" }, rows.length > 1 ? h("h3", {}, `row ${number + 1}`) : null, h("div", { class: "stream" }, row.map((turn) => [drawObserved(turn), drawReply(turn)])))));
  box.style.setProperty("--strength", String(0.14 + 0.36 * strength));
  box.addEventListener("pointerover", (event) => tell(event.target));
  box.addEventListener("focusin", (event) => tell(event.target));
  function tell(target) {
    const token = target.closest?.(".token[data-id]");
    if (!token) return;
    const { id, logprob, turn } = token.dataset;
    const chance = logprob === undefined ? "" : ` · logprob ${Number(logprob).toFixed(4)} · probability ${toNumber(Math.exp(Number(logprob)))}`;
    told.textContent = `${JSON.stringify(token.textContent)} · id ${id} · turn ${Number(turn) + 1} · mask ${token.classList.contains("trained") ? 1 : 0}${chance}`;
  }
  return box;
}

function drawObserved(turn) {
  const all = turn.prompt.map(([id, text]) => h("span", { class: "token", data: { id, turn: turn.turn } }, show(id, text)));
  if (all.length <= FOLDED) return all;
  const [head, tail] = [all.slice(0, 40), all.slice(-60)];
  const button = h("button", { type: "button", class: "link fold" }, ` … ${all.length - 100} tokens more … `);
  button.addEventListener("click", () => button.replaceWith(...all.slice(40, -60)));
  return [head, button, tail];
}

function drawReply(turn) {
  return turn.reply.map(([id, text, logprob]) => h("span", { class: `token trained ${logprob < -0.6931 ? "unsure" : ""}`, data: { id, logprob, turn: turn.turn } }, show(id, text)));
}

function show(id, text) {
  if (text === null) return `${id} `;
  return text.replaceAll("\n", "↵\n").replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, (letter) => `⟨${letter.codePointAt(0).toString(16)}⟩`);
}
