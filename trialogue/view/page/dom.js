// Elements built from text nodes only: text of a model, tool or task is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes, listeners (on…) and children; strings become text nodes. */
export function h(name, props = {}, ...children) {
  return build(document.createElement(name), props, children);
}

/** An SVG element, made like `h`. */
export function s(name, props = {}, ...children) {
  return build(document.createElementNS(SVG, name), props, children);
}

function build(node, props, children) {
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.setAttribute("class", value);
    else if (key === "data") Object.assign(node.dataset, value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Control characters, direction marks and invisible characters could change or hide what is shown.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** A text with its invisible characters spelt out. */
export function plain(text) {
  const parts = [];
  let from = 0;
  for (const found of String(text).matchAll(UNSEEN)) {
    parts.push(text.slice(from, found.index), h("span", { class: "unseen", title: "invisible character" }, toName(found[0])));
    from = found.index + 1;
  }
  parts.push(String(text).slice(from));
  return parts;
}

function toName(letter) {
  const code = letter.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

export function toPercent(value, digits = 0) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

export function toNumber(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 10000) return String(value);
  if (size >= 10000) return `${(value / 1000).toFixed(size >= 100000 ? 0 : 1)}k`;
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size >= 0.001) return value.toFixed(size >= 1 ? 2 : 3);
  return value.toExponential(1);
}

/** `55–73 %`. */
export function toRange(low, high) {
  return `${(100 * low).toFixed(0)}–${(100 * high).toFixed(0)} %`;
}

/** A number on an axis, as short as possible. */
export function toTick(value) {
  return Math.abs(value) >= 10000 ? `${Number((value / 1000).toPrecision(3))}k` : String(Number(value.toPrecision(3)));
}

export function toSeconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.1) return `${Math.round(value * 1000)} ms`;
  if (value < 90) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function toCount(number, what) {
  return `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
}

/** How long ago a date, or a time in seconds since the epoch, was. */
export function toAgo(when) {
  const then = typeof when === "number" ? when * 1000 : Date.parse(when);
  if (!then) return "–";
  const seconds = Math.max(0, (Date.now() - then) / 1000);
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 86400 * 2) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

/** A JSON value as text; `nothing` if there is none. */
export function toJson(value, indent) {
  return value === undefined || value === null ? "nothing" : typeof value === "string" && !indent ? `"${value}"` : JSON.stringify(value, null, indent);
}
