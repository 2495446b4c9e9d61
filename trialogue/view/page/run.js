// The screen of one run: progress, health, and its conversations.

import { h, s, fill, plain, toCount, toNumber, toPercent, toSeconds, toAgo } from "./dom.js";
import { ask, baked } from "./source.js";
import { onlyFilters, toRun } from "./address.js";
import { Charts, DOUBLE, bars, spark } from "./charts.js";
import { ConversationList } from "./list.js";
import { passed, state } from "./runs.js";

const CONCURRENT = { agent: 0, user: 1, tools: 2, update: 3, evaluate: 4 };
const OUTCOMES = [["", "any"], ["won", "won"], ["lost", "lost"], ["between", "between"], ["none", "failed, none"]];

export class RunScreen {
  constructor(place, address) {
    this.place = place;
    this.name = address.run;
    this.filters = onlyFilters(address.query);
  }

  title() {
    return this.name;
  }

  crumbs() {
    return [[this.name, toRun(this.name)]];
  }

  async open() {
    this.head = h("div", { class: "head" });
    this.charts = h("section", { class: "charts", "aria-label": "Charts" });
    this.health = h("section", { class: "health", "aria-label": "Health" });
    this.form = h("form", { class: "filters", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() });
    this.about = h("section", { class: "about", "aria-label": "Settings and origin" });
    this.listed = h("section", { class: "listed" }, h("h2", {}, "Conversations"), this.form);
    this.injured = h("section", { class: "injured bad", role: "alert", "aria-label": "Injured records" });
    fill(this.place, h("div", { class: "wide" }, this.head, this.injured, this.health, this.charts, this.listed, this.about));
    this.makeList();
    await Promise.all([this.refresh().then(() => this.drawForm()), this.list.load()]);
  }

  async refresh() {
    const run = await ask("run", { run: this.name });
    const known = this.run;
    this.run = run;
    this.drawHead();
    if (known && known.version === run.version && known.state === run.state) return;
    this.drawInjuries();
    this.drawCharts();
    this.drawHealth();
    this.drawAbout();
    if (known && this.list) {
      this.drawForm();
      await this.list.renew();
    }
  }

  get isLive() {
    return this.run?.state === "running" || this.run?.scanning;
  }

  drawHead() {
    const run = this.run;
    const facts = [run.kind, run.domain, run.model && `agent ${run.model}`, run.user && `user ${run.user}`, run.seed !== null && `seed ${run.seed}`, `begun ${toAgo(run.created)}`].filter(Boolean);
    const figures = [];
    if (run.step !== null) figures.push(figure("step", run.steps ? `${run.step}/${run.steps}` : run.step));
    if (run.pass1[0] !== null && run.pass1[0] !== undefined) figures.push(figure(run.kind === "train" ? "held-out pass^1" : "pass^1", passed(run.pass1)));
    const last = (run.series.reward ?? []).at(-1) ?? run.reward;
    if (last !== null && last !== undefined) figures.push(figure("reward", toNumber(last)));
    if (run.cost) figures.push(figure("cost", toNumber(run.cost)));
    fill(this.head, h("div", {}, h("h1", {}, plain(run.name)), h("p", { class: "facts" }, state(run), facts.map((fact) => [" · ", plain(fact)]))), h("dl", { class: "figures" }, figures));
  }

  drawCharts() {
    const { series, steps_shown: steps, checks, result } = this.run;
    if (!steps.length) {
      fill(this.charts, result.accepted !== undefined ? corpusCharts(result, (verdict) => this.narrow({ verdict })) : result.tasks ? evaluationCharts(result, (key, value) => this.narrow({ [key]: value })) : h("p", { class: "muted" }, this.run.state === "running" ? "No step is over yet." : ""));
      return;
    }
    const charts = new Charts(steps, (step) => this.pick(step));
    if (checks.length) charts.origin = Math.min(...checks.map((check) => check.step));
    const spread = (sign) => series.reward?.map((value, index) => (value === null ? null : Math.min(1, Math.max(0, value + sign * (series.reward_spread?.[index] ?? 0)))));
    const tools = Object.entries(this.run.tools).map(([name, values], number) => ({ name, values, colour: number }));
    const shown = [
      charts.lines("Reward", [{ name: "mean", values: series.reward, low: spread(-1), high: spread(1) }], { unit: toNumber, ceiling: 1, hint: "Mean reward of the step's conversations; the band is the spread within groups." }),
      charts.lines("Held-out pass^1", [{ name: "dev tasks", values: checks.map((check) => check["pass^1"]), low: checks.map((check) => check["pass^1_low"]), high: checks.map((check) => check["pass^1_high"]), steps: checks.map((check) => check.step), colour: 3 }], { unit: (value) => toPercent(value), ceiling: 1, hint: "Greedy conversations on dev tasks, with 95 % interval." }),
      charts.lines("Policy", [{ name: "every rule kept", values: series.compliant }, { name: "solved, whatever rules say", values: series.outcome, colour: 2 }], { ceiling: 1, hint: "Share of the step's conversations that keep every rule, and mean outcome before rules are looked at." }),
      charts.lines("Broken rules", Object.entries(this.run.breaches).map(([name, values]) => ({ name, values })), { ceiling: 1, hint: "Share of the step's conversations that break a rule; the five most broken." }),
      charts.lines("Turns and calls", [{ name: "turns", values: series.turns }, { name: "tool calls", values: series.tool_calls, colour: 2 }, { name: "refused", values: series.tool_errors, colour: 4 }], { hint: "Per conversation." }),
      charts.lines("Reply length", [{ name: "tokens a reply", values: series.reply_tokens }], { hint: "Tokens the agent samples in one reply." }),
      charts.stack("Seconds a step", Object.entries(this.run.seconds).map(([name, values]) => ({ name, values, colour: CONCURRENT[name] })), { unit: toSeconds, hint: "Wall-clock time. Conversations overlap: their time is divided in the proportion in which agent, user and tools kept each other waiting." }),
      this.signals(series, charts),
      charts.stack("Tool use", tools, { wide: DOUBLE, hint: "Calls of the agent in each step, by tool." }),
      charts.lines("Loss", this.run.kind === "sft" ? [{ name: "loss", values: series.loss }, { name: "validation", values: series.validation_loss, colour: 3 }] : [], {}),
      charts.lines("Money", series.cost?.some((value) => value > 0) ? [{ name: "so far", values: sumUp(series.cost), colour: 2 }] : [], { hint: "What the simulated user cost so far." }),
      charts.lines("Reward by family", Object.entries(this.run.families).map(([name, values]) => ({ name: name.replaceAll("_", " "), values })), { ceiling: 1, hint: "Mean reward of each family of tasks." }),
    ];
    fill(this.charts, shown.filter(Boolean));
  }

  /** Figures that show whether learning is healthy, each on its own scale. */
  signals(series, charts) {
    const names = { entropy: "entropy", kl: "KL from the start", clip_share: "clipped", logprob_gap: "sampler–trainer gap", grad_norm: "gradient norm", no_signal: "groups without signal", cut_off: "cut off", unique_replies: "different replies", learning_rate: "learning rate" };
    const share = new Set(["clip_share", "no_signal", "cut_off", "unique_replies"]);
    const rows = Object.entries(names).filter(([key]) => series[key]).map(([key, name]) => {
      const value = h("td", { class: "number" });
      const unit = share.has(key) ? (number) => toPercent(number) : toNumber;
      const tell = (index) => (value.textContent = unit(series[key][index ?? series[key].length - 1]));
      charts.pointers.push(tell);
      tell(null);
      return h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, spark(series[key], 120, 18)), value);
    });
    if (!rows.length) return null;
    return h("figure", { class: "chart signals", data: { title: "Learning signals" } }, h("figcaption", {}, h("h2", {}, "Learning signals")), h("table", {}, h("tbody", {}, rows)));
  }

  drawInjuries() {
    const { injuries, injured } = this.run;
    if (!injured) { fill(this.injured); return; }
    fill(this.injured, h("p", {}, h("b", {}, `${toCount(injured, "record")} not as written: figures of this run cannot be trusted.`), " trialogue verify lists everything."),
      h("ul", {}, injuries.map((text) => h("li", {}, plain(text)))));
  }

  drawHealth() {
    const { health, count, broken, scanning, decisions } = this.run;
    const ends = Object.entries(health.ends);
    if (!ends.length) { fill(this.health); return; }
    const notes = [h("b", {}, toCount(count, "conversation"))];
    if (health.no_signal !== null && health.no_signal !== undefined) notes.push(h("span", {}, `no signal in ${toPercent(health.no_signal)} of recent groups`));
    const blame = Object.entries(health.blame).map(([who, number]) => h("button", { type: "button", class: "link bad", onclick: () => this.narrow({ blame: who }) }, `${number} failed, blame ${who}`));
    if (broken) notes.push(h("span", { class: "bad" }, `${broken} lines cannot be read`));
    const decided = Object.entries(decisions).filter(([name]) => ["accepted", "to review", "reviewed", "rejected"].includes(name));
    notes.push(...decided.map(([verdict, number]) => h("button", { type: "button", class: `link ${verdict === "rejected" ? "bad" : ""}`, onclick: () => this.narrow({ verdict }) }, `${number.toLocaleString("en")} ${verdict}`)));
    if (health.near_calls) notes.push(h("p", { class: "bad", role: "status" }, health.near_calls));
    if (scanning) notes.push(h("span", {}, "scanning conversations …"));
    const share = (number) => (number / count < 0.001 ? "< 0.1 %" : toPercent(number / count, number / count < 0.01 ? 1 : 0));
    const links = ends.map(([end, number]) => h("button", { type: "button", class: `link ${end}`, title: `${number} conversations`, onclick: () => this.narrow({ end }) }, h("i", { "aria-hidden": "true" }), `${end.replace("_", " ")} ${share(number)}`));
    const strip = s("svg", { class: "segments", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
    let from = 0;
    for (const [end, number] of ends) {
      strip.append(s("rect", { class: `layer ${end}`, x: (100 * from) / count, width: (100 * number) / count, height: 8 }));
      from += number;
    }
    fill(this.health, h("div", { class: "notes" }, notes, h("div", { class: "ends", role: "group", "aria-label": "How conversations ended" }, links), blame), strip,
      (health.warnings || []).map(({ step, text }) => h("p", { class: "bad", role: "status" }, `step ${step}: ${text}`)));
  }

  drawForm() {
    const { facets, health, decisions } = this.run;
    if (this.form.contains(document.activeElement)) return;
    const steps = [...new Set(facets.files.filter((file) => file.step !== null).map((file) => file.step))];
    const parts = [...new Set(facets.files.map((file) => file.part))];
    fill(this.form,
      this.search("text", "said or called", "Search text"),
      this.search("task", "task", "Task"),
      this.choice("reward", "reward", OUTCOMES),
      this.choice("end", "end", withAny(Object.keys(health.ends))),
      Object.keys(health.blame).length ? this.choice("blame", "blame", withAny(Object.keys(health.blame))) : null,
      Object.keys(decisions).length ? this.choice("verdict", "verdict", withAny(Object.keys(decisions))) : null,
      facets.family.length ? this.choice("family", "family", withAny(facets.family)) : null,
      facets.level.length > 1 ? this.choice("level", "level", withAny(facets.level)) : null,
      parts.length > 1 ? this.choice("part", "part", withAny(parts)) : null,
      steps.length > 1 ? this.choice("step", "step", withAny(steps)) : null,
      h("label", { class: "check" }, this.tick(), "lost by all siblings"),
      Object.keys(this.filters).length ? h("button", { type: "button", class: "quiet", onclick: () => this.narrow(null) }, "Clear") : null);
  }

  tick() {
    const box = h("input", { type: "checkbox", name: "lost", onchange: () => this.narrow({ lost: box.checked ? "1" : "" }) });
    box.checked = Boolean(this.filters.lost);
    return box;
  }

  search(key, placeholder, label) {
    const box = h("input", { type: "search", name: key, placeholder, "aria-label": label, autocomplete: "off", spellcheck: "false" });
    box.value = this.filters[key] ?? "";
    let waiting;
    box.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => this.narrow({ [key]: box.value }), 250);
    });
    return box;
  }

  choice(key, label, options) {
    const box = h("select", { name: key, onchange: () => this.narrow({ [key]: box.value }) }, options.map(([value, name]) => h("option", { value }, String(name))));
    box.value = this.filters[key] ?? "";
    return h("label", {}, label, box);
  }

  /** Change the filters, also in the page's address. */
  narrow(change) {
    this.filters = change === null ? {} : onlyFilters({ ...this.filters, ...change });
    history.replaceState(null, "", toRun(this.name, this.filters));
    this.drawForm();
    this.makeList();
    this.list.load();
  }

  pick(step) {
    this.narrow({ step: String(step), part: this.run.kind === "train" ? "step" : "" });
    this.listed.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  }

  makeList() {
    const list = new ConversationList(this.name, this.filters, (sort) => this.narrow({ sort }));
    if (this.list) this.list.node.replaceWith(list.node);
    else this.listed.append(list.node);
    this.list = list;
  }

  drawAbout() {
    const { changed, command, versions } = this.run;
    const settings = Object.entries(changed).map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, key)), h("td", {}, h("code", {}, plain(JSON.stringify(value))))));
    fill(this.about, h("details", {}, h("summary", {}, h("h2", {}, "Settings and origin")),
      baked ? h("p", {}, `This file holds ${toCount(baked.rows.length, "conversation")} of ${this.run.count}.`) : null,
      settings.length ? h("table", { class: "settings" }, h("caption", {}, "Settings that are not the default"), h("tbody", {}, settings)) : h("p", {}, "All settings are the default."),
      h("p", {}, "Command ", h("code", {}, plain(command.join(" ")))),
      h("p", {}, "Versions ", Object.entries(versions).map(([name, number]) => `${name} ${number}`).join(", "))));
  }

  key(key) {
    if (key === "j" || key === "k") this.list?.move(key === "j" ? 1 : -1);
    else if (key === "Enter" && this.list) this.list.body.querySelector("tr.marked a")?.click();
    else if (key === "/") this.form.querySelector("input[name=text]")?.focus();
    else if (key === "u") location.hash = "#/";
    else return false;
    return true;
  }
}

function figure(name, value) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}

function withAny(values) {
  return [["", "any"], ...values.map((value) => [String(value), String(value).replace("_", " ")])];
}

function sumUp(values) {
  let total = 0;
  return values.map((value) => (total += value ?? 0));
}

/** Of synthesised conversations: how many were accepted, by family, and why others were rejected. */
function corpusCharts(result, pick) {
  const counts = (items, colour, key = null) => Object.entries(items ?? {}).map(([name, value]) => ({ name: name.replaceAll("_", " "), id: key && name, value, colour }));
  const shown = (title, items, choose = null) => bars(title, items, { unit: (value) => value.toLocaleString("en"), most: Math.max(1, ...items.map((item) => item.value)), pick: choose && ((item) => choose(item.id)) });
  return [
    shown("Corpus", counts({ wanted: result.wanted, held: result.held, accepted: result.accepted, "for training": result.train, "for validation": result.validation }, 3)),
    shown("Accepted, by family", counts(result.families, 0)),
    shown("Left out, by reason", counts(result.reasons, 4, true), pick),
  ].filter(Boolean);
}

function evaluationCharts(result, pick) {
  const hats = Object.keys(result).filter((key) => /^pass\^\d+$/.test(key)).map((key) => ({ name: key, value: result[key], low: result[`${key}_low`], high: result[`${key}_high`], colour: 3 }));
  const part = (figures, key) => Object.entries(figures ?? {}).filter(([, item]) => item["pass^1"] !== undefined).map(([name, item]) => ({ name: name.replaceAll("_", " "), key, id: name, value: item["pass^1"], low: item["pass^1_low"], high: item["pass^1_high"], note: `${item.tasks} tasks` }));
  const counts = (items, colour) => Object.entries(items ?? {}).map(([name, value]) => ({ name, value, colour }));
  const most = (items) => Math.max(1, ...items.map((item) => item.value));
  const tools = counts(result.tools, 2).slice(0, 8);
  const choose = (item) => pick(item.key, item.id);
  const levels = part(result.levels, "level").map((item) => ({ ...item, name: `level ${item.name}` }));
  const each = Math.max(1, result.conversations);
  const all = bars("All tasks", hats) ?? h("figure", { class: "chart" });
  all.append(h("dl", { class: "figures small" }, figure("turns", toNumber(result.turns)), figure("tool calls", toNumber(result.tool_calls)), figure("seconds", toSeconds(result.seconds / each)), figure("tokens", toNumber(Math.round(((result.tokens?.prompt ?? 0) + (result.tokens?.completion ?? 0)) / each))), figure("wall clock", toSeconds(result.wall_seconds))));
  return [
    all,
    bars("By family, pass^1", part(result.families, "family"), { pick: choose }),
    levels.length > 1 ? bars("By level, pass^1", levels, { pick: choose }) : null,
    bars("Calls by tool", tools, { unit: (value) => String(value), most: most(tools) }),
  ].filter(Boolean);
}
