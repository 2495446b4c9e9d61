// A conversation as a document: one column, a coloured rule per side, a call and its result in one block.

import { h, plain, toSeconds } from "./dom.js";

const LONGEST = 8;
const NAMES = { agent: "Agent", user: "User" };

/** Turns together with the results of their calls. */
export function toBlocks(turns, seconds = []) {
  const blocks = [];
  const waiting = new Map();
  turns.forEach((turn, index) => {
    const block = { turn, index, seconds: seconds[index], calls: [] };
    if (turn.message.role === "tool") {
      const call = waiting.get(turn.message.tool_call_id);
      if (call) {
        call.result = { turn, index, seconds: seconds[index] };
        waiting.delete(turn.message.tool_call_id);
        return;
      }
    }
    for (const call of turn.message.tool_calls ?? []) {
      const made = { call, result: null };
      block.calls.push(made);
      waiting.set(call.id, made);
    }
    blocks.push(block);
  });
  return blocks;
}

export function drawBlock(block, { gutter = true, highlight = null, breaches = [] } = {}) {
  const { turn, index } = block;
  const { message } = turn;
  const role = message.role === "tool" ? "tool" : turn.side;
  const name = message.role === "tool" ? "Tool" : NAMES[turn.side] ?? turn.side;
  return h("article", { class: `turn ${role}`, id: `turn-${index + 1}`, "aria-label": `${name}, turn ${index + 1}` },
    h("h3", { class: "side" }, name),
    h("div", { class: "said" },
      message.reasoning ? h("details", { class: "reasoning" }, h("summary", {}, "reasoning"), h("div", { class: "text", dir: "auto" }, plain(message.reasoning))) : null,
      message.content ? h("div", { class: message.role === "tool" ? "result" : "text", dir: "auto" }, highlight ? highlight(message.content) : message.role === "tool" ? fold(message.content) : withStop(message.content)) : null,
      block.calls.map(drawCall),
      breaches.map((item) => h("p", { class: "bad small breach", title: item.policy ?? "" }, h("b", {}, "✗ ", plain(item.rule)), ": ", plain(item.evidence))),
      turn.finish === "length" ? h("p", { class: "bad small" }, "cut off here: the reply was too long") : null),
    gutter ? h("div", { class: "gutter" }, gutterNotes(block)) : null);
}

function gutterNotes({ turn, index, seconds }) {
  const tokens = turn.sampled ?? turn.usage?.completion;
  return [
    h("a", { class: "place", href: "#", "aria-label": `turn ${index + 1}`, onclick: (event) => event.preventDefault() }, String(index + 1)),
    h("span", {}, [tokens ? `${tokens} tok` : "", seconds >= 0.0005 ? toSeconds(seconds) : ""].filter(Boolean).join(" · ")),
  ];
}

function drawCall({ call, result }) {
  const failed = result?.turn.failed;
  return h("div", { class: `call ${failed ? "refused" : ""}` },
    h("div", { class: "asked" }, h("span", { class: "tool-name" }, plain(call.name)), writeArguments(call.arguments), failed ? h("span", { class: "badge bad" }, "refused") : null),
    result ? h("div", { class: "answered" }, h("span", { class: "arrow", "aria-label": "result" }, "↳"), h("div", { class: "result", dir: "auto" }, fold(result.turn.message.content))) : h("div", { class: "answered muted" }, "no result"));
}

/** `(order_id="W1", total=3)`, or the raw text if the arguments were not an object. */
export function writeArguments(given = {}) {
  if (typeof given === "string") return h("span", { class: "bad" }, " ", plain(given));
  const parts = Object.entries(given).map(([key, value], number) => [number ? ", " : "", h("span", { class: "argument" }, plain(key)), "=", h("span", { class: "value" }, plain(JSON.stringify(value)))]);
  return ["(", parts, ")"];
}

/** A text of which only the first lines are shown, with a button for the rest. JSON is formatted. */
export function fold(text) {
  const shown = setOut(text);
  const lines = shown.split("\n");
  if (lines.length <= LONGEST + 2 && shown.length < 1200) return plain(shown);
  const rest = Math.max(0, lines.length - LONGEST);
  const short = lines.slice(0, LONGEST).join("\n").slice(0, 1200);
  const box = h("span", {}, plain(short));
  const button = h("button", { type: "button", class: "link fold", "aria-expanded": "false" }, rest ? `… ${rest} lines more` : "… more");
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    box.replaceChildren(...plain(open ? short : shown));
    button.textContent = open ? (rest ? `… ${rest} lines more` : "… more") : "less";
  });
  return [box, " ", button];
}

/** Long JSON with one line per field of the outermost object; other text unchanged. */
function setOut(text) {
  if (text.length < 90 || !/^\s*[[{]/.test(text)) return text;
  try {
    const value = JSON.parse(text);
    const items = Array.isArray(value) ? value.map(toLine) : Object.entries(value).map(([key, item]) => `${JSON.stringify(key)}: ${toLine(item)}`);
    const [open, close] = Array.isArray(value) ? "[]" : "{}";
    return `${open}\n${items.map((item) => `  ${item}`).join(",\n")}\n${close}`;
  } catch {
    return text;
  }
}

/** JSON on one line, with spaces after commas and colons. */
function toLine(value) {
  if (Array.isArray(value)) return `[${value.map(toLine).join(", ")}]`;
  if (value && typeof value === "object") return `{${Object.entries(value).map(([key, item]) => `${JSON.stringify(key)}: ${toLine(item)}`).join(", ")}}`;
  return JSON.stringify(value);
}

function withStop(text) {
  const found = /^([\s\S]*?)(###[A-Z-]+###)\s*$/.exec(text);
  return found ? [plain(found[1]), h("span", { class: "badge" }, found[2].replaceAll("#", ""))] : plain(text);
}
