// Two conversations of a group side by side: the shared start once, then both from their first difference on.

import { h, plain } from "./dom.js";
import { mark } from "./list.js";
import { drawBlock, toBlocks } from "./transcript.js";

/** The default sibling to compare with: the best one, or the worst if this conversation is the best. */
export function chooseOther(entry, siblings) {
  const others = siblings.filter((item) => item.id !== entry.id);
  const value = (item) => item.reward ?? -1;
  const sorted = [...others].sort((a, b) => value(b) - value(a));
  if (!sorted.length) return null;
  return value(sorted[0]) > value(entry) ? sorted[0].id : sorted[sorted.length - 1].id;
}

export function drawComparison(one, other) {
  const [left, right] = [one, other].map(({ trajectory, seconds }) => toBlocks(trajectory.turns, seconds));
  let same = 0;
  while (same < left.length && same < right.length && toKey(left[same]) === toKey(right[same])) same += 1;
  const shared = left.slice(0, same).map((block) => drawBlock(block, { gutter: false }));
  const rows = [];
  for (let index = same; index < Math.max(left.length, right.length); index += 1) {
    const [a, b] = [left[index], right[index]];
    const words = index === same && a && b && a.turn.side === b.turn.side ? findDifference(a.turn.message.content ?? "", b.turn.message.content ?? "") : null;
    rows.push(h("div", { class: "pair" }, h("div", { class: "half" }, a ? drawBlock(a, { gutter: false, highlight: words?.left }) : null), h("div", { class: "half" }, b ? drawBlock(b, { gutter: false, highlight: words?.right }) : null)));
  }
  return h("div", { class: "comparison" },
    h("div", { class: "pair heads" }, [one, other].map(({ entry }) => h("h2", { class: `half ${entry.outcome}` }, plain(`conversation ${entry.trial + 1}`), " ", mark(entry)))),
    same ? h("details", { class: "shared" }, h("summary", {}, `${same} ${same === 1 ? "block is" : "blocks are"} the same in both`), shared) : null,
    h("p", { class: "split", id: "difference" }, rows.length ? `First difference: turn ${(left[same] ?? right[same]).index + 1}` : "Both conversations are the same."),
    rows);
}

function toKey({ turn, calls }) {
  const results = calls.map(({ call, result }) => [call.name, call.arguments, result?.turn.message.content]);
  return JSON.stringify([turn.side, turn.message.role, turn.message.content ?? "", results]);
}

/** Mark the words in which two texts differ, between their common start and end. */
function findDifference(left, right) {
  const [a, b] = [left.split(/(?<=\s)/), right.split(/(?<=\s)/)];
  let start = 0;
  while (start < Math.min(a.length, b.length) && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < Math.min(a.length, b.length) - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const draw = (words) => () => [plain(words.slice(0, start).join("")), h("mark", {}, plain(words.slice(start, words.length - end).join(""))), plain(words.slice(words.length - end).join(""))];
  return { left: draw(a), right: draw(b) };
}
