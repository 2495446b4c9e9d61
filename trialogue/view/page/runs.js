// The screen of all runs.

import { h, fill, plain, toAgo, toNumber, toPercent, toRange } from "./dom.js";
import { ask } from "./source.js";
import { toRun } from "./address.js";
import { spark } from "./charts.js";

export class RunsScreen {
  constructor(place) {
    this.place = place;
    this.marked = 0;
    this.runs = [];
    this.body = h("tbody", {});
  }

  title() {
    return "runs";
  }

  crumbs() {
    return [];
  }

  async open() {
    const headings = ["run", "state", "kind", "domain", "agent", "user", "step", "curve", "pass^1", "cost", "begun"];
    this.note = h("p", { class: "muted" });
    fill(this.place, h("section", { class: "wide" }, h("h1", {}, "Runs"), this.note,
      h("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": "Runs" }, h("table", { class: "runs" }, h("thead", {}, h("tr", {}, headings.map((name) => h("th", { scope: "col", class: ["step", "pass^1", "cost"].includes(name) ? "number" : null }, name)))), this.body))));
    await this.refresh();
  }

  async refresh() {
    const { folder, runs } = await ask("runs");
    const seen = JSON.stringify(runs);
    if (seen === this.seen) return;
    this.seen = seen;
    this.runs = runs;
    fill(this.note, runs.length ? `${runs.length} in ${folder}` : `There is no run in ${folder} yet. Make one: trialogue eval shop --agent oracle --user agenda`);
    this.draw();
  }

  draw() {
    fill(this.body, this.runs.map((run, index) => h("tr", { class: index === this.marked ? "marked" : "", onclick: (event) => { if (!event.target.closest("a")) location.hash = toRun(run.name); } },
      h("th", { scope: "row" }, h("a", { href: toRun(run.name) }, plain(run.name))),
      h("td", {}, state(run)),
      h("td", {}, h("span", { class: `kind ${run.kind}` }, run.kind)),
      h("td", {}, plain(run.domain)),
      h("td", {}, plain(run.model)),
      h("td", {}, plain(run.user)),
      h("td", { class: "number" }, run.step === null ? "" : run.steps ? `${run.step}/${run.steps}` : run.step),
      h("td", {}, run.curve.length > 1 ? spark(run.curve) : ""),
      h("td", { class: "number" }, passed(run.pass1)),
      h("td", { class: "number" }, run.cost ? toNumber(run.cost) : ""),
      h("td", { title: run.created }, toAgo(run.created)))));
  }

  key(key) {
    if (key === "j" || key === "k") {
      this.marked = Math.min(Math.max(0, this.marked + (key === "j" ? 1 : -1)), this.runs.length - 1);
      this.draw();
      this.body.children[this.marked]?.scrollIntoView({ block: "nearest" });
    } else if (key === "Enter" && this.runs[this.marked]) location.hash = toRun(this.runs[this.marked].name);
    else return false;
    return true;
  }
}

export function passed([value, low, high]) {
  if (value === null || value === undefined) return "";
  return h("span", { class: "passed" }, h("b", {}, toPercent(value, 1)), low === null || low === undefined ? "" : h("span", { class: "muted" }, ` ${toRange(low, high)}`));
}

export function state(run) {
  const quiet = run.state === "running" && Date.now() / 1000 - run.written > 300;
  return h("span", { class: `state ${quiet ? "quiet" : run.state}` }, h("i", { "aria-hidden": "true" }), run.state, quiet ? h("span", { class: "muted" }, ` · nothing written for ${toAgo(run.written).replace(" ago", "")}`) : "");
}
