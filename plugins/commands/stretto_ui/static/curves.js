// All curves of a run, or of several runs over each other, in sections.
import { choice, fill, h, printable, seriesKey } from "./dom.js";
import { Board } from "./charts.js";
import { figure } from "./figures.js";
import { adviceMarks } from "./overview.js";

const SECTIONS = [
  ["Reward", /^(reward|evaluation|zero_variance|advantage)/], ["Optimisation", /^(loss|grad_norm|lr|entropy|clipped|dual_clipped|ratio|kl|micro_batches|skipped|update|value)/],
  ["Off-policy", /^(staleness|importance_weight|masked|behaviour|divergence|mismatch|drift|canary)/], ["Answers", /^(length|truncated|tokens$)/],
  ["Speed", /(_s|_per_s)$|^(slots|samples_waiting|kv_|prefix)/], ["Others", /./],
];

/** The keys by which the evaluations of some runs are judged. */
export const heldOut = (all) => [...new Set(all.filter((facts) => facts.evaluations.length).map((facts) => facts.held_out))];

/** Tools and charts for runs, as `Board` takes them; `keys` are the curves that any of them has. The address holds the view: `query` is what it says, and `remember` keeps it there. */
export function curvesPanel(runs, keys, { evaluations, marks, query, remember }) {
  const stored = Number(query.get("smoothing") ?? localStorage.getItem("smoothing") ?? 0), x = query.get("x") === "time_s" ? "time_s" : "step";
  const window = query.has("from") ? [Number(query.get("from")), Number(query.get("to"))] : null;
  const board = new Board(runs, { smoothing: stored, x, log: query.get("y") === "log", window, marks });
  const all = [...evaluations, ...keys];
  const place = h("div"), whole = h("button", { type: "button", disabled: window === null, onclick: () => board.set({ window: null }) }, "Whole run");
  const search = h("input", { type: "search", value: query.get("find") ?? "", placeholder: "Filter curves …", "aria-label": "Filter curves", "data-search": true, oninput: () => { draw(); keep(); } });
  const amount = h("output", { class: "mono" }, stored.toFixed(2));
  const slider = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(stored), id: "smoothing", "aria-label": "Smoothing", oninput: () => {
    fill(amount, Number(slider.value).toFixed(2));
    localStorage.setItem("smoothing", slider.value);
    board.set({ smoothing: Number(slider.value) });
  } });
  const fits = (key) => `${key} ${figure(key).title}`.toLowerCase().includes(search.value.trim().toLowerCase());
  board.onset = () => { whole.disabled = board.window === null; keep(); };

  function keep() {
    const [from, to] = board.window ?? [];
    remember({ find: search.value.trim(), x: board.x === "step" ? "" : board.x, y: board.log ? "log" : "", smoothing: board.smoothing || "", from: from?.toPrecision(6), to: to?.toPrecision(6) });
  }

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
  const tools = h("div", { class: "tools" }, search, h("label", { class: "asks" }, "smoothing ", slider, amount), h("span", { class: "asks" }, choice("X-axis", [["step", "steps"], ["time_s", "time"]], x, (x) => board.set({ x }))), choice("Y-axis", [["", "linear"], ["log", "log"]], board.log ? "log" : "", (y) => board.set({ log: y === "log" })), whole,
    h("span", { class: "faint" }, "Drag over a chart to zoom, double-click for everything."));
  const legend = runs.length > 1 && h("div", { class: "legend names" }, runs.map(({ name }, index) => h("span", {}, seriesKey(index), printable(name))));
  return { element: h("div", {}, tools, legend, place), board };
}

/** Put the parameters of a view that are set into the address, without a step in the history. */
export function rememberView(place, parameters) {
  const set = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== undefined && value !== ""));
  history.replaceState(null, "", set.size ? `${place}${place.includes("?") ? "&" : "?"}${set}` : place);
}

export async function curvesTab({ id, name, facts, query }) {
  const panel = curvesPanel([{ ids: [id], name }], facts().keys, { evaluations: heldOut([facts()]), marks: () => adviceMarks(facts()), query, remember: (view) => rememberView(`#/run/${id}/curves`, view) });
  return {
    element: panel.element,
    async update(changed) { if (changed) panel.board.refresh(); },
    redraw() { panel.board.redraw(); },
    destroy() { panel.board.destroy(); },
  };
}
