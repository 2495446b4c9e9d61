// Every screen has an address, with its filters, so that it can be shared and restored.
//   #/                        the runs
//   #/run/NAME?filters        a run
//   #/run/NAME/ID?filters     a conversation; view=tokens, view=compare&with=ID

import { clean } from "./source.js";

export const FILTERS = ["part", "step", "end", "blame", "family", "level", "reward", "verdict", "task", "text", "lost", "sort"];

export function readAddress(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [screen = "", run = "", id = ""] = path.split("/").map(decode);
  return { screen, run, id, query: Object.fromEntries(new URLSearchParams(query)) };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function toRun(run, query = {}) {
  return withQuery(`#/run/${encodeURIComponent(run)}`, query);
}

export function toConversation(run, id, query = {}) {
  return withQuery(`#/run/${encodeURIComponent(run)}/${encodeURIComponent(id)}`, query);
}

function withQuery(path, query) {
  const text = new URLSearchParams(clean(query)).toString();
  return text ? `${path}?${text}` : path;
}

export function onlyFilters(query) {
  return Object.fromEntries(FILTERS.filter((key) => query[key]).map((key) => [key, query[key]]));
}
