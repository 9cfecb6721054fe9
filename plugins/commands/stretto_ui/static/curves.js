// All curves of a run, or of several runs over each other, in sections.
import { choice, fill, h } from "./dom.js";
import { Board } from "./charts.js";
import { ACCURACY, figure } from "./figures.js";

const SECTIONS = [
  ["Reward", /^(reward|evaluation|zero_variance|advantage)/], ["Optimisation", /^(loss|grad_norm|lr|entropy|clipped|dual_clipped|ratio|kl|micro_batches|skipped|update|value)/],
  ["Off-policy", /^(staleness|importance_weight|masked|behaviour|divergence|mismatch|drift|canary)/], ["Answers", /^(length|truncated|tokens$)/],
  ["Speed", /(_s|_per_s)$|^(slots|samples_waiting|kv_|prefix)/], ["Others", /./],
];

/** Tools and charts for runs; `keys` are the curves that any of them has. */
export function curvesPanel(runs, keys, { evaluations }) {
  const stored = Number(localStorage.getItem("smoothing") ?? 0);
  const board = new Board(runs, { smoothing: stored });
  const all = evaluations ? [ACCURACY, ...keys] : keys;
  const place = h("div"), whole = h("button", { type: "button", disabled: true, onclick: () => board.set({ window: null }) }, "Whole run");
  const search = h("input", { type: "search", placeholder: "Filter curves …", "aria-label": "Filter curves", "data-search": true, oninput: draw });
  const amount = h("output", { class: "mono" }, stored.toFixed(2));
  const slider = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(stored), id: "smoothing", "aria-label": "Smoothing", oninput: () => {
    fill(amount, Number(slider.value).toFixed(2));
    localStorage.setItem("smoothing", slider.value);
    board.set({ smoothing: Number(slider.value) });
  } });
  const fits = (key) => `${key} ${figure(key).title}`.toLowerCase().includes(search.value.trim().toLowerCase());
  board.onwindow = (window) => { whole.disabled = window === null; };

  function draw() {
    const left = new Set(all.filter(fits));
    board.clear();
    fill(place, SECTIONS.map(([title, pattern]) => {
      const mine = [...left].filter((key) => pattern.test(key));
      for (const key of mine) left.delete(key);
      return mine.length > 0 && [h("div", { class: "section" }, h("h2", {}, title), h("span", { class: "faint" }, String(mine.length))), h("div", { class: "charts" }, mine.map((key) => board.add([key])))];
    }));
    if (!all.some(fits)) fill(place, h("p", { class: "empty" }, all.length ? "No curve matches the filter." : "No step yet."));
  }

  draw();
  const tools = h("div", { class: "tools" }, search, h("label", {}, "smoothing ", slider, amount), choice("X-axis", [["step", "steps"], ["time_s", "time"]], "step", (x) => board.set({ x })), whole,
    h("span", { class: "faint" }, "Drag over a chart to zoom, double-click for everything."));
  return { element: h("div", {}, tools, place), board };
}

export async function curvesTab({ id, name, facts }) {
  const panel = curvesPanel([{ id, name }], facts().keys, { evaluations: facts().evaluations.length > 0 });
  return {
    element: panel.element,
    async update(changed) { if (changed) panel.board.refresh(); },
    redraw() { panel.board.redraw(); },
    destroy() { panel.board.destroy(); },
  };
}
