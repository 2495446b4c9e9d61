// The page: which screen is open, what the keys do, and refreshing while a run goes on.

import { h, fill, plain } from "./dom.js";
import { baked } from "./source.js";
import { readAddress } from "./address.js";
import { RunsScreen } from "./runs.js";
import { RunScreen } from "./run.js";
import { ConversationScreen } from "./conversation.js";

const KEYS = [
  ["j k", "next, previous: run, conversation"], ["Enter", "open the marked row"], ["h l", "previous, next sibling of the task"], ["t", "tokens used for learning"], ["c", "compare with a sibling"], ["/", "search"], ["u", "up"], ["?", "this help"],
];
const MOVES = new Set(["j", "k", "h", "l", "t", "c", "u"]);
const place = document.getElementById("main");
const live = document.getElementById("live");
let screen = null;
let opened = false;
let waiting = [];
let busy = false;

async function open() {
  const address = readAddress(location.hash);
  const before = screen;
  screen = address.id ? new ConversationScreen(place, address) : address.screen === "run" && address.run ? new RunScreen(place, address) : new RunsScreen(place);
  const own = screen;
  opened = false;
  document.title = `${screen.title()} · trialogue`;
  drawCrumbs();
  try {
    await screen.open();
    if (before && own === screen && own.constructor !== before.constructor) window.scrollTo(0, 0);
  } catch (error) {
    if (own === screen) fill(place, h("div", { class: "wide" }, h("h1", {}, "Not found"), h("p", {}, plain(error.message)), h("p", {}, h("a", { href: "#/" }, "All runs"))));
  }
  document.body.dataset.ready = String(Date.now());
  if (own === screen) { opened = true; pressWaiting(); }
}

/** Pass a key to the screen. If that opens another screen, the next keys are meant for the new one. */
function press(key) {
  const here = location.hash;
  const used = screen?.key(key);
  if (location.hash !== here) opened = false;
  return used;
}

/** Handle keys that were pressed while a screen was opening. */
function pressWaiting() {
  while (waiting.length && opened) press(waiting.shift());
}

function drawCrumbs() {
  const crumbs = [["trialogue", "#/"], ...screen.crumbs()];
  fill(document.getElementById("crumbs"), h("ol", {}, crumbs.map(([name, address], index) => h("li", {}, h("a", { href: address, "aria-current": index === crumbs.length - 1 ? "page" : null }, plain(name))))));
}

/** Refresh: often while a run goes on, rarely otherwise, never while the page is hidden. */
async function follow() {
  const own = screen;
  if (!busy && !document.hidden && own?.refresh) {
    busy = true;
    try {
      await own.refresh();
      live.textContent = own.isLive ? "following" : "";
    } catch {
      live.textContent = "the server does not answer";
    }
    busy = false;
  }
  if (!own?.refresh) live.textContent = "";
  setTimeout(follow, screen?.isLive ? 2000 : 6000);
}

const help = h("dialog", { class: "help", "aria-labelledby": "help-title" }, h("h2", { id: "help-title" }, "Keys"), h("dl", {}, KEYS.map(([keys, what]) => h("div", {}, h("dt", {}, keys.split(" ").map((key) => h("kbd", {}, key))), h("dd", {}, what)))), h("form", { method: "dialog" }, h("button", {}, "Close")));
document.body.append(help);
document.getElementById("help-button").addEventListener("click", () => help.showModal());

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const typing = event.target.closest?.("input, select, textarea");
  if (typing) {
    if (event.key === "Escape") typing.blur();
    return;
  }
  if (event.key === "Enter" && event.target.closest?.("a, button, summary")) return;
  if (event.key === "?") help.showModal();
  else if (!opened && MOVES.has(event.key)) waiting.push(event.key);
  else if (!press(event.key)) return;
  event.preventDefault();
});

window.addEventListener("hashchange", open);
if (baked && !location.hash) location.replace(baked.start);
open().then(() => { if (!baked) setTimeout(follow, 2000); });
