// The screen of one conversation: the transcript, the reasons for its reward, its siblings, its tokens.

import { h, fill, plain } from "./dom.js";
import { ask } from "./source.js";
import { onlyFilters, toConversation, toRun } from "./address.js";
import { chooseOther, drawComparison } from "./compare.js";
import { mark, toShort } from "./list.js";
import { drawTokens } from "./tokens.js";
import { drawBlock, toBlocks } from "./transcript.js";
import { drawWhy } from "./why.js";

const VIEWS = [["", "Transcript"], ["tokens", "Tokens"], ["compare", "Compare"]];

/** The rules of the policy that were broken in one turn. */
const breachesOf = (index, { reward }) => (reward?.breaches ?? []).filter(({ turn }) => turn === index);

export class ConversationScreen {
  constructor(place, address) {
    this.place = place;
    this.run = address.run;
    this.id = address.id;
    this.view = VIEWS.some(([view]) => view === address.query.view) ? address.query.view ?? "" : "";
    this.with = address.query.with;
    this.filters = onlyFilters(address.query);
  }

  title() {
    return `${this.id} · ${this.run}`;
  }

  crumbs() {
    return [[this.run, toRun(this.run, this.filters)], [this.id, this.address()]];
  }

  address(id = this.id, view = this.view, other = undefined) {
    return toConversation(this.run, id, { ...this.filters, view, with: other });
  }

  async open() {
    this.told = await ask("conversation", { ...this.filters, run: this.run, id: this.id });
    const { entry, trajectory } = this.told;
    this.body = h("div", { class: "body" });
    const where = [entry.family?.replaceAll("_", " "), entry.level ? `level ${entry.level}` : null, entry.step !== null && entry.step !== undefined ? `${entry.part} ${entry.step}` : null, `conversation ${entry.trial + 1}`].filter(Boolean);
    fill(this.place, h("div", { class: "wide conversation" },
      h("div", { class: "head" },
        h("div", {}, h("h1", {}, plain(toShort(trajectory.task.id))), h("p", { class: "facts" }, plain(where.join(" · ")))),
        h("div", { class: `verdict-mark ${entry.outcome}` }, h("span", {}, "reward"), mark(entry))),
      h("div", { class: "tools-bar" }, this.drawSiblings(), this.drawViews(), this.drawNeighbours()),
      this.body));
    await this.drawBody();
  }

  async drawBody() {
    if (this.view === "tokens") {
      fill(this.body, drawTokens(await ask("tokens", { run: this.run, id: this.id })));
    } else if (this.view === "compare") {
      const other = this.with ?? chooseOther(this.told.entry, this.told.siblings);
      if (!other) {
        fill(this.body, h("p", { class: "muted" }, "This conversation has no siblings to compare it with."));
        return;
      }
      fill(this.body, this.drawChoice(other), drawComparison(this.told, await ask("conversation", { run: this.run, id: other })));
    } else {
      const blocks = toBlocks(this.told.trajectory.turns, this.told.seconds);
      fill(this.body, h("div", { class: "columns" },
        h("section", { class: "transcript", "aria-label": "Transcript" }, h("h2", { class: "unheard" }, "Transcript"), blocks.map((block) => drawBlock(block, { breaches: breachesOf(block.index, this.told.trajectory) }))),
        h("aside", { class: "why", "aria-label": "Why" }, drawWhy(this.told))));
    }
  }

  drawChoice(other) {
    const box = h("select", { onchange: () => { location.hash = this.address(this.id, "compare", box.value); } }, this.told.siblings.filter((item) => item.id !== this.id).map((item) => h("option", { value: item.id }, `conversation ${item.trial + 1}, ${item.reward === null ? "failed" : `reward ${item.reward}`}`)));
    box.value = other;
    return h("p", { class: "filters" }, h("label", {}, "compared with", box));
  }

  drawSiblings() {
    const { siblings } = this.told;
    if (siblings.length < 2) return h("div", {});
    return h("nav", { class: "siblings", "aria-label": "Conversations of the same task" }, siblings.map((item) => h("a", { href: this.address(item.id), class: `sibling ${item.outcome}`, "aria-current": item.id === this.id ? "page" : null, title: `conversation ${item.trial + 1}: ${item.reward === null ? "failed" : item.reward}`, "aria-label": `conversation ${item.trial + 1}, ${item.outcome}` }, String(item.trial + 1))));
  }

  drawViews() {
    return h("nav", { class: "views", "aria-label": "Views" }, VIEWS.map(([view, name]) => h("a", { href: this.address(this.id, view), "aria-current": view === this.view ? "page" : null }, name)));
  }

  drawNeighbours() {
    const { previous, next, place, total } = this.told;
    const link = (id, name, label) => (id ? h("a", { href: this.address(id), "aria-label": label }, name) : h("span", { class: "muted", "aria-hidden": "true" }, name));
    return h("nav", { class: "neighbours", "aria-label": "Neighbours in the list" }, link(previous, "↑", "previous in the list"), link(next, "↓", "next in the list"), place === null ? null : h("span", { class: "muted" }, ` ${place + 1} of ${total.toLocaleString("en")}`));
  }

  /** The sibling that many positions away, cyclically. */
  sibling(by) {
    const { siblings } = this.told;
    const at = siblings.findIndex((item) => item.id === this.id);
    return siblings[(at + by + siblings.length) % siblings.length]?.id;
  }

  key(key) {
    const go = (address) => { location.hash = address; };
    const moves = { j: this.told?.next, k: this.told?.previous, h: this.told && this.sibling(-1), l: this.told && this.sibling(1) };
    if (key in moves) { if (moves[key] && moves[key] !== this.id) go(this.address(moves[key])); }
    else if (key === "t") go(this.address(this.id, this.view === "tokens" ? "" : "tokens"));
    else if (key === "c") go(this.address(this.id, this.view === "compare" ? "" : "compare"));
    else if (key === "u") go(toRun(this.run, this.filters));
    else if (key === "/") go(toRun(this.run, this.filters));
    else return false;
    return true;
  }
}
