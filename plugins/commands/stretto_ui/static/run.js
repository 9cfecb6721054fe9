// One run: its head, its tabs, and the tab that is open.
import { duration, fill, h, number, printable } from "./dom.js";
import { get } from "./api.js";
import { overviewTab } from "./overview.js";
import { curvesTab } from "./curves.js";
import { timelineTab } from "./timeline.js";
import { samplesTab } from "./samples.js";
import { configTab } from "./config.js";
import { logsTab } from "./logs.js";

const TABS = { overview: ["Overview", overviewTab], curves: ["Curves", curvesTab], timeline: ["Timeline", timelineTab], samples: ["Samples", samplesTab], config: ["Configuration", configTab], logs: ["Logs", logsTab] };

export async function runView(id, tab, query) {
  let facts = await get(`runs/${id}`);
  const name = ["", ".", facts.name].includes(facts.path) ? facts.name : `${facts.name} (${facts.path})`;
  const head = h("div"), nav = h("nav", { class: "tabs", "aria-label": "Views of the run" }), place = h("div");
  const bar = h("div"), progress = h("div", { class: "progress", role: "progressbar", "aria-label": "Steps" }, bar);
  let current = null, shown = "";

  function drawHead() {
    const { state, step, total, wall_s, status } = facts, left_s = (state === "running" && status?.left_s) || null;
    fill(head,
      h("h1", {}, printable(facts.name)), h("span", { class: `pill ${state}`, id: "state" }, state),
      h("span", { class: "muted", id: "steps" }, `step ${number(step)} of ${number(total)}`),
      h("span", { class: "muted" }, `${duration(wall_s)}${left_s === null ? "" : ` · about ${duration(left_s)} left`}`),
      h("span", { class: "where" }, printable(facts.folder)));
    progress.setAttribute("aria-valuenow", step);
    progress.setAttribute("aria-valuemax", total);
    bar.style.setProperty("width", `${total ? (100 * step) / total : 0}%`);
    progress.hidden = state === "completed";
  }

  async function show(name, parameters) {
    current?.destroy?.();
    shown = name;
    fill(nav, Object.entries(TABS).map(([each, [label]]) => h("a", { href: `#/run/${id}/${each}`, "aria-current": each === name ? "page" : null }, label)));
    current = await TABS[name][1]({ id, name: facts.name, facts: () => facts, query: parameters });
    fill(place, current.element);
    current.shown?.();
  }

  drawHead();
  await show(tab in TABS ? tab : "overview", query);
  head.className = "head";
  return {
    element: h("div", {}, head, progress, nav, place), title: name, path: [printable(name)],
    live: () => facts.state === "running",
    shown() { current.shown?.(); },
    accepts(parts, parameters) {
      if (parts[0] !== "run" || parts[1] !== id || !(parts[2] in TABS)) return false;
      if (parts[2] === shown && current.accepts?.(parameters)) return true;
      show(parts[2], parameters).catch((error) => fill(place, h("p", { class: "note bad", role: "alert" }, error.message)));
      return true;
    },
    async update() {
      const old = facts, same = (...values) => new Set(values.map((value) => JSON.stringify(value))).size === 1;
      facts = await get(`runs/${id}`);
      if (facts.state !== "running" && same(old, facts)) return; // drawn again, it would lose what the reader has selected
      drawHead();
      await current.update?.(!same([old.revision, old.state], [facts.revision, facts.state]));
    },
    redraw() { current?.redraw?.(); },
    key(event) {
      const names = Object.keys(TABS);
      if (/^[1-6]$/.test(event.key)) { location.hash = `#/run/${id}/${names[event.key - 1]}`; return true; }
      return current?.key?.(event) ?? false;
    },
    destroy() { current?.destroy?.(); },
  };
}
