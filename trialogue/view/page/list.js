// The list of conversations: only visible rows are in the document, and only their pages are requested.

import { h, fill, plain, toNumber } from "./dom.js";
import { ask, clean } from "./source.js";
import { toConversation } from "./address.js";

const ROW = 36;
const PAGE = 100;
const HEADINGS = [
  ["reward", "reward"], ["task", null], ["step", null], ["group", null], ["ended by", null], ["turns", "turns"], ["calls", null], ["tokens", "tokens"], ["advantage", "advantage"], ["the user begins", null],
];

export class ConversationList {
  constructor(run, filters, onSort, marked) {
    this.run = run;
    this.filters = filters;
    this.onSort = onSort;
    this.marked = marked ?? 0;
    this.body = h("tbody", {});
    this.count = h("p", { class: "count", role: "status" });
    this.table = h("table", { class: "list" }, h("caption", { class: "unheard" }, "Conversations"), h("thead", {}, h("tr", {}, HEADINGS.map((heading) => this.heading(heading)))), this.body);
    this.box = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Conversations" }, this.table);
    this.box.addEventListener("scroll", () => this.draw());
    this.node = h("div", {}, this.count, this.box);
    this.forget();
  }

  heading([name, key]) {
    if (!key) return h("th", { scope: "col", class: `column-${name}` }, name);
    const now = this.filters.sort ?? "";
    const next = now === `-${key}` ? key : now === key ? "" : `-${key}`;
    const order = now === key ? "ascending" : now === `-${key}` ? "descending" : null;
    return h("th", { scope: "col", class: `column-${key}`, "aria-sort": order }, h("button", { type: "button", class: "link", onclick: () => this.onSort(next) }, name, order ? (order === "ascending" ? " ↑" : " ↓") : ""));
  }

  forget() {
    this.pages = new Map();
    this.rows = [];
    this.total = 0;
    this.turn = (this.turn ?? 0) + 1;
  }

  async load() {
    this.turn += 1;
    if (this.filters.text) return this.search();
    await this.fetch(Math.max(0, Math.floor(this.box.scrollTop / ROW / PAGE)), true);
    return this;
  }

  /** Load again, keeping the shown rows until the answer arrives. */
  async renew() {
    if (this.filters.text) return;
    const before = this.pages;
    this.pages = new Map();
    await this.fetch(Math.max(0, Math.floor(this.box.scrollTop / ROW / PAGE)), true).catch(() => (this.pages = before));
  }

  async fetch(page, anew = false) {
    if (this.pages.has(page) && !anew) return;
    this.pages.set(page, null);
    const turn = this.turn;
    const answer = await ask("conversations", { ...this.filters, run: this.run, offset: page * PAGE, limit: PAGE });
    if (turn !== this.turn) return;
    this.total = answer.total;
    this.pages.set(page, answer.rows);
    this.hide(answer.rows);
    this.tell(`${answer.total.toLocaleString("en")} conversation${answer.total === 1 ? "" : "s"}`);
    this.draw();
  }

  /** Hide columns that are empty in this run. */
  hide(rows) {
    const empty = { step: (row) => row.step === null, group: (row) => row.group.length < 2, tokens: (row) => !row.tokens, advantage: (row) => row.advantage === null };
    for (const [name, says] of Object.entries(empty)) this.table.classList.toggle(`without-${name}`, rows.every(says));
  }

  /** Search text in steps; results are shown as they are found. */
  async search() {
    const turn = this.turn;
    let offset = 0;
    this.rows = [];
    for (;;) {
      const answer = await ask("conversations", { ...this.filters, run: this.run, offset, limit: 200 });
      if (turn !== this.turn || !this.node.isConnected) return this;
      this.rows.push(...answer.rows);
      this.total = this.rows.length;
      offset = answer.reached;
      const done = offset >= answer.total || this.rows.length >= 1000;
      this.tell(`${this.rows.length.toLocaleString("en")} found, ${done && offset >= answer.total ? "all" : offset.toLocaleString("en")} of ${answer.total.toLocaleString("en")} searched`);
      this.draw();
      if (done) return this;
    }
  }

  tell(text) {
    if (this.count.textContent !== text) this.count.textContent = text;
  }

  row(index) {
    if (this.filters.text) return this.rows[index];
    const page = this.pages.get(Math.floor(index / PAGE));
    return page?.[index % PAGE];
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 6);
    const last = Math.min(this.total, first + Math.ceil((this.box.clientHeight || 600) / ROW) + 14);
    if (!this.filters.text) for (let page = Math.floor(first / PAGE); page <= Math.floor(Math.max(first, last - 1) / PAGE); page += 1) if (page * PAGE < this.total) this.fetch(page);
    const shown = [];
    for (let index = first; index < last; index += 1) shown.push(this.line(index));
    fill(this.body, spacer(first * ROW), shown, spacer((this.total - last) * ROW));
    this.table.setAttribute("aria-rowcount", String(this.total + 1));
    if (!this.total) fill(this.body, h("tr", {}, h("td", { colspan: HEADINGS.length, class: "empty" }, "No conversation matches these filters.")));
  }

  line(index) {
    const row = this.row(index);
    if (!row) return h("tr", { class: "waiting" }, h("td", { colspan: HEADINGS.length }, "…"));
    const calls = Object.values(row.tools).reduce((sum, number) => sum + number, 0);
    const advantage = row.advantage === null || row.advantage === undefined ? "" : `${row.advantage > 0 ? "+" : ""}${row.advantage.toFixed(2)}`;
    const address = toConversation(this.run, row.id, clean(this.filters));
    return h("tr", { class: index === this.marked ? "marked" : "", "aria-rowindex": index + 2, onclick: (event) => { if (!event.target.closest("a")) location.hash = address; } },
      h("td", {}, mark(row)),
      h("th", { scope: "row" }, h("a", { href: address }, plain(toShort(row.task))), row.trial ? h("span", { class: "muted" }, ` /${row.trial}`) : null),
      h("td", { class: "number column-step" }, row.step === null || row.step === undefined ? "" : `${row.part === "eval" ? "eval " : ""}${row.step}`),
      h("td", { class: "column-group" }, squares(row.group, row.id)),
      h("td", { class: row.end === "error" ? "bad" : "" }, row.end.replace("_", " "), row.blame ? ` (${row.blame})` : "", row.excluded ? h("span", { class: "badge" }, "left out") : null),
      h("td", { class: "number" }, row.turns),
      h("td", { class: "number" }, calls, row.refused ? h("span", { class: "bad", title: `${row.refused} refused` }, ` −${row.refused}`) : null),
      h("td", { class: "number column-tokens" }, row.tokens ? toNumber(row.tokens) : ""),
      h("td", { class: `number column-advantage ${row.advantage > 0 ? "good" : row.advantage < 0 ? "bad" : ""}` }, advantage),
      h("td", { class: "words" }, plain(row.found ?? row.says)));
  }

  /** Move the mark and return its row. */
  move(by) {
    this.marked = Math.min(Math.max(0, this.marked + by), this.total - 1);
    const top = this.marked * ROW;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    if (top > this.box.scrollTop + this.box.clientHeight - 2 * ROW) this.box.scrollTop = top - this.box.clientHeight + 2 * ROW;
    this.draw();
    return this.row(this.marked);
  }
}

function spacer(height) {
  const row = h("tr", { class: "spacer", "aria-hidden": "true" }, h("td", { colspan: HEADINGS.length }));
  row.firstChild.style.height = `${Math.max(0, height)}px`;
  return row;
}

/** A reward as a symbol and a number. */
export function mark({ reward, outcome }) {
  const signs = { won: "✓", lost: "✗", between: "~", none: "!" };
  return h("span", { class: `mark ${outcome}` }, h("span", { "aria-hidden": "true" }, signs[outcome]), " ", outcome === "none" ? "failed" : toNumber(reward));
}

/** The conversations of a group as small squares, filled if won. */
export function squares(group, own) {
  if (group.length < 2) return "";
  const won = group.filter(([, outcome]) => outcome === "won").length;
  return h("span", { class: "squares", role: "img", "aria-label": `${won} of ${group.length} won` }, group.slice(0, 16).map(([id, outcome]) => h("i", { class: `${outcome} ${id === own ? "own" : ""}` })));
}

/** A generated task's id without the prefix that all of them share. */
export function toShort(task) {
  const found = /^[a-z0-9]+-(train|dev|test)-\d+-\d+-(.+)$/.exec(task);
  return found ? found[2] : task;
}
