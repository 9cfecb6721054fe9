// The frame of the page: the bar, the views by address, the keyboard, the theme, and the clock that keeps views live.
import { fill, h, svg } from "./dom.js";
import { get, saved } from "./api.js";
import { loadFigures } from "./figures.js";
import { runsView } from "./runs.js";
import { runView } from "./run.js";
import { compareView } from "./compare.js";

const PERIOD_MS = 2000;
const main = document.getElementById("main");
const bar = document.getElementById("bar");
const live = h("span", { class: "live", role: "status" }, saved?.written ?? "");
const path = h("div", { class: "path" });
let view = null;
let turn = 0;

/** Addresses: #/ is the index, #/run/ID/TAB?…, #/compare?runs=ID,ID. */
function address() {
  const [place, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: place.split("/").filter(Boolean), query: new URLSearchParams(query) };
}

async function open() {
  const mine = ++turn, { parts, query } = address();
  if (view?.accepts?.(parts, query)) return;
  view?.destroy?.();
  view = null;
  fill(main, h("p", { class: "empty" }, "Loading …"));
  try {
    await loadFigures();
    const made = await (parts[0] === "run" ? runView(parts[1], parts[2] ?? "overview", query) : parts[0] === "compare" ? compareView(query) : runsView(query));
    if (mine !== turn) { made.destroy?.(); return; }
    view = made;
    fill(main, view.element);
    view.shown?.();
    document.title = view.title ? `${view.title} · stretto` : "stretto";
    fill(path, (view.path ?? []).map((each) => [h("span", { class: "faint" }, "/"), h("span", {}, each)]));
    said("");
  } catch (error) {
    if (mine === turn) fill(main, h("p", { class: "note bad", role: "alert" }, error.message), !saved && h("p", {}, h("a", { href: "#/" }, "All runs")));
    if (!error.message) throw error;
  }
}

async function tick() {
  try {
    if (view?.update && !document.hidden) {
      await view.update();
      said("");
    }
  } catch (error) {
    if (error.name !== "AbortError") said(error.message);
  }
  setTimeout(tick, PERIOD_MS);
}

function said(fault) {
  if (saved) return;
  live.className = `live ${fault ? "off" : view?.live?.() ? "on" : ""}`;
  live.title = fault;
  fill(live, fault ? "no answer" : "live");
  live.hidden = !fault && !view?.live?.();
}

// ------------------------------------------------------------------------------------------------ theme

function theme(value) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = value === "auto" ? (dark ? "dark" : "light") : value;
  view?.redraw?.();
}

const chosen = () => localStorage.getItem("theme") ?? "auto";

function nextTheme() {
  const now = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", now);
  theme(now);
}

// --------------------------------------------------------------------------------------------- keyboard

const KEYS = [
  ["?", "show or hide this list"], ["g r", "go to the list of runs"], ["1 … 6", "the tabs of a run: overview, curves, timeline, samples, configuration, logs"],
  ["/", "to the search or filter of the view"], ["j  k", "next, previous row of a table; Enter opens it"], ["x", "in the list of runs: select the row to compare"],
  ["c", "in the list of runs: compare the selected runs"], ["+  −  ←  →  0", "in a chart or the timeline: zoom, move, show everything"],
  ["[  ]", "in a group: previous, next group"], ["←  →", "in the tokens of a sample: previous, next token"], ["t", "light or dark"], ["Esc", "close, or leave a field"],
];
const help = h("dialog", { "aria-label": "Keyboard" }, h("h2", {}, "Keyboard"),
  h("table", {}, h("tbody", {}, KEYS.map(([keys, what]) => h("tr", {}, h("td", {}, h("kbd", {}, keys)), h("td", {}, what))))),
  h("p", {}, h("button", { type: "button", onclick: () => help.close() }, "Close")));
document.body.append(help);

function toggleHelp() { if (help.open) help.close(); else help.showModal(); }

let prefix = "";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches?.("input:not([type=checkbox]):not([type=range]), select, textarea");
  if (typing) { if (event.key === "Escape") event.target.blur(); return; }
  const before = prefix;
  prefix = "";
  if (event.defaultPrevented) return;
  if (event.key === "?") toggleHelp();
  else if (help.open) return;
  else if (before === "g" && event.key === "r") location.hash = "#/";
  else if (event.key === "g") prefix = "g";
  else if (event.key === "t") nextTheme();
  else if (event.key === "/" && document.querySelector("[data-search]")) document.querySelector("[data-search]").focus();
  else if (event.key === "j" || event.key === "k") row(event.key === "j" ? 1 : -1);
  else if (!view?.key?.(event)) return;
  event.preventDefault();
});

/** Move the focus among the rows of the view's table. */
function row(step) {
  const rows = [...main.querySelectorAll("tr.link")];
  const now = rows.indexOf(document.activeElement.closest?.("tr.link"));
  rows[Math.min(rows.length - 1, Math.max(0, now + step))]?.focus();
}

// ------------------------------------------------------------------------------------------------ start

fill(bar,
  h("a", { class: "mark", href: "#/", "aria-label": "stretto: list of runs" },
    svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: "M1 12h6M5 8h6M9 4h6", stroke: "currentColor", "stroke-width": "2.6", "stroke-linecap": "round" })),
    h("span", { class: "word" }, "stretto")),
  path, h("span", { class: "grow" }), live,
  h("button", { type: "button", class: "plain", id: "theme", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: nextTheme }, "◐"),
  h("button", { type: "button", class: "plain", id: "help", title: "Keyboard (?)", "aria-label": "Keyboard", onclick: toggleHelp }, "?"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(chosen()));
addEventListener("hashchange", open);
theme(chosen());
if (!location.hash) {
  const { runs, single } = await get("runs").catch(() => ({ runs: [], single: false }));
  if (single && runs.length === 1) history.replaceState(null, "", `#/run/${runs[0].id}/overview`);
}
await open();
if (!saved) setTimeout(tick, PERIOD_MS);
