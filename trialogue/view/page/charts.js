// Small SVG charts. The legend shows the newest values, or those under the pointer, in all charts at once.

import { h, s, toNumber, toPercent, toRange, toTick } from "./dom.js";

const NARROW = 320;
const WIDE = 662;
const HEIGHT = 132;
const LEFT = 34;
const BOTTOM = 16;
const TOP = 6;

export const DOUBLE = WIDE;

/** Charts over the same steps: pointing at one points at all, a click selects the step. */
export class Charts {
  constructor(steps, onPick) {
    this.steps = steps;
    this.onPick = onPick;
    this.pointers = [];
  }

  point(index) {
    for (const pointer of this.pointers) pointer(index);
  }

  /** Lines over steps. A line has a name and values, optionally `low` and `high` for a band, and own `steps`. */
  lines(title, lines, { unit = toNumber, floor = 0, ceiling = null, hint = "", wide = NARROW } = {}) {
    const shown = lines.filter((line) => line.values?.some((value) => value !== null && value !== undefined));
    if (!shown.length) return null;
    const values = shown.flatMap((line) => [...line.values, ...(line.high ?? []), ...(line.low ?? [])]).filter(isNumber);
    const bottom = floor === null ? Math.min(...values) : Math.min(floor, ...values);
    const scale = toScale(bottom, ceiling ?? Math.max(...values));
    return this.figure(title, hint, scale, unit, wide, shown, (area) => {
      shown.forEach((line, number) => {
        const x = (index) => this.x(line.steps ? line.steps[index] : this.steps[index], wide);
        const style = `c${line.colour ?? number}`;
        if (line.low) area.append(s("path", { class: `band ${style}`, d: toBand(line.high, line.low, x, scale.y) }));
        area.append(s("path", { class: `line ${style}`, d: toPath(line.values, x, scale.y) }));
        if (line.values.length < 25) {
          line.values.forEach((value, index) => isNumber(value) && area.append(s("circle", { class: `dot ${style}`, cx: x(index), cy: scale.y(value), r: line.low && line.steps ? 3 : 1.8 })));
        }
        if (line.low && line.steps) {
          line.values.forEach((value, index) => isNumber(line.low[index]) && area.append(s("path", { class: `whisker ${style}`, d: `M${x(index)} ${scale.y(line.low[index])}V${scale.y(line.high[index])}` })));
        }
      });
    });
  }

  /** Stacked layers over steps. */
  stack(title, layers, { unit = toNumber, hint = "", wide = NARROW } = {}) {
    const shown = layers.filter((layer) => layer.values?.some((value) => value > 0));
    if (!shown.length) return null;
    const totals = this.steps.map((_, index) => shown.reduce((sum, layer) => sum + (layer.values[index] ?? 0), 0));
    const scale = toScale(0, Math.max(...totals));
    return this.figure(title, hint, scale, unit, wide, shown, (area) => {
      const below = totals.map(() => 0);
      shown.forEach((layer, number) => {
        const above = below.map((value, index) => value + (layer.values[index] ?? 0));
        const x = (index) => this.x(this.steps[index], wide);
        const style = `c${layer.colour ?? number}`;
        if (this.steps.length < 40) {
          const thick = Math.max(1.5, Math.min(64, (x(this.steps.length - 1) - x(0)) / Math.max(1, this.steps.length - 1) || 64) * 0.6);
          above.forEach((value, index) => value > below[index] && area.append(s("rect", { class: `layer ${style}`, x: Math.min(Math.max(LEFT, x(index) - thick / 2), wide - thick), y: scale.y(value), width: thick, height: scale.y(below[index]) - scale.y(value) })));
        } else area.append(s("path", { class: `layer ${style}`, d: toBand(above, [...below], x, scale.y) }));
        above.forEach((value, index) => (below[index] = value));
      });
    });
  }

  x(step, wide) {
    const [first, last] = [this.steps[0], this.steps[this.steps.length - 1]];
    const start = Math.min(first, this.origin ?? first);
    return LEFT + ((step - start) / Math.max(1, last - start)) * (wide - LEFT - 6) + 2;
  }

  figure(title, hint, scale, unit, wide, lines, draw) {
    const legend = lines.map((line, number) => {
      const value = h("b", {});
      const item = h("span", { class: `key c${line.colour ?? number}` }, h("i", { "aria-hidden": "true" }), lines.length > 1 || line.name !== title ? `${line.name} ` : "", value);
      return { line, value, item };
    });
    const area = s("svg", { viewBox: `0 0 ${wide} ${HEIGHT}`, class: "plot", "aria-hidden": "true" });
    for (const tick of scale.ticks) {
      area.append(s("path", { class: "grid", d: `M${LEFT} ${scale.y(tick)}H${wide}` }));
      area.append(s("text", { class: "tick", x: LEFT - 5, y: scale.y(tick) + 3.5, "text-anchor": "end" }, (unit === toNumber ? toTick : unit)(tick)));
    }
    const [first, last] = [Math.min(this.steps[0], this.origin ?? this.steps[0]), this.steps[this.steps.length - 1]];
    area.append(s("text", { class: "tick", x: LEFT, y: HEIGHT - 2 }, String(first)), s("text", { class: "tick", x: wide, y: HEIGHT - 2, "text-anchor": "end" }, `step ${last}`));
    draw(area);
    const rule = s("path", { class: "rule", d: "" });
    area.append(rule);
    const at = h("span", { class: "at" });
    const tell = (index) => {
      const step = index === null ? null : this.steps[index];
      rule.setAttribute("d", step === null ? "" : `M${this.x(step, wide)} ${TOP}V${HEIGHT - BOTTOM}`);
      at.textContent = step === null ? "" : `step ${step}`;
      for (const { line, value } of legend) value.textContent = toLabel(line, step, this.steps, line.unit ?? unit);
    };
    this.pointers.push(tell);
    tell(null);
    const find = (event) => {
      const box = area.getBoundingClientRect();
      const where = ((event.clientX - box.left) / box.width) * wide;
      let best = 0;
      this.steps.forEach((step, index) => { if (Math.abs(this.x(step, wide) - where) < Math.abs(this.x(this.steps[best], wide) - where)) best = index; });
      return best;
    };
    area.addEventListener("pointermove", (event) => this.point(find(event)));
    area.addEventListener("pointerleave", () => this.point(null));
    area.addEventListener("click", (event) => this.onPick?.(this.steps[find(event)]));
    return h("figure", { class: wide === WIDE ? "chart double" : "chart", data: { title } }, h("figcaption", { title: hint || null }, h("h2", {}, title), at, h("div", { class: "keys" }, legend.map(({ item }) => item))), area);
  }
}

function toLabel(line, step, steps, unit) {
  const own = line.steps ?? steps;
  let index = own.length - 1;
  if (step !== null) {
    index = -1;
    own.forEach((at, number) => { if (at <= step) index = number; });
  }
  while (step === null && index > 0 && !isNumber(line.values[index])) index -= 1;
  const value = line.values[index];
  if (!isNumber(value)) return "–";
  return line.low && line.steps ? `${unit(value)} (${toRange(line.low[index], line.high[index])})` : unit(value);
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function toScale(bottom, top) {
  if (!(top > bottom)) top = bottom + 1;
  const rough = (top - bottom) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const stride = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let tick = Math.ceil(bottom / stride) * stride; tick <= top + stride * 1e-6; tick += stride) ticks.push(Number(tick.toPrecision(12)));
  const high = Math.max(top, ticks[ticks.length - 1]);
  return { ticks, y: (value) => HEIGHT - BOTTOM - ((value - bottom) / (high - bottom)) * (HEIGHT - BOTTOM - TOP) };
}

function toPath(values, x, y) {
  let path = "";
  let drawing = false;
  values.forEach((value, index) => {
    if (!isNumber(value)) { drawing = false; return; }
    path += `${drawing ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    drawing = true;
  });
  return path;
}

function toBand(high, low, x, y) {
  const known = high.map((value, index) => index).filter((index) => isNumber(high[index]) && isNumber(low[index]));
  if (!known.length) return "";
  const over = known.map((index) => `${x(index).toFixed(1)} ${y(high[index]).toFixed(1)}`);
  const under = known.reverse().map((index) => `${x(index).toFixed(1)} ${y(low[index]).toFixed(1)}`);
  return `M${over.join("L")}L${under.join("L")}Z`;
}

/** A word-sized curve. */
export function spark(values, wide = 92, tall = 20) {
  const known = values.filter(isNumber);
  if (known.length < 2) return h("span", { class: "muted" }, "–");
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const x = (index) => 2 + (index / (values.length - 1)) * (wide - 5);
  const y = (value) => tall - 3 - ((value - low) / (high - low || 1)) * (tall - 6);
  return s("svg", { class: "spark", viewBox: `0 0 ${wide} ${tall}`, width: wide, height: tall, role: "img", "aria-label": `from ${toNumber(known[0])} to ${toNumber(known[known.length - 1])}` },
    s("path", { class: "line c0", d: toPath(values, x, y) }), s("circle", { class: "dot c0", cx: x(values.length - 1), cy: y(known[known.length - 1]), r: 2.2 }));
}

/** Shares with intervals, one bar per line. `pick` makes the names buttons. */
export function bars(title, items, { unit = (value) => toPercent(value), most = 1, pick = null } = {}) {
  if (!items.length) return null;
  const rows = items.map((item) => {
    const share = (value) => `${Math.min(100, (100 * value) / (most || 1))}`;
    const picture = s("svg", { class: "bar-row", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      s("rect", { class: "back", width: 100, height: 10 }), s("rect", { class: `layer c${item.colour ?? 0}`, width: share(item.value), height: 10 }),
      isNumber(item.low) && item.high > item.low ? s("path", { class: "interval", d: `M${share(item.low)} 5H${share(item.high)}` }) : null);
    const name = pick ? h("button", { type: "button", class: "link", onclick: () => pick(item) }, item.name) : item.name;
    const range = isNumber(item.low) ? h("span", { class: "muted" }, ` ${toRange(item.low, item.high)}`) : null;
    return h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "picture" }, picture), h("td", { class: "value" }, h("b", {}, unit(item.value)), range), h("td", { class: "muted value" }, item.note ?? ""));
  });
  return h("figure", { class: "chart bars", data: { title } }, h("figcaption", {}, h("h2", {}, title)), h("table", {}, h("tbody", {}, rows)));
}
