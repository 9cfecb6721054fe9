// Charts of curves. A board holds charts with one window, one smoothing and one x-axis; it fetches what is visible.
/* global uPlot */
import { colour, debounce, duration, fill, h, number, seriesKey, seriesStyle, svg } from "./dom.js";
import { get } from "./api.js";
import { figure, figureText, tooltip } from "./figures.js";

export class Board {
  /**
   * @param {{id: string, name: string}[]} runs
   * @param {{x?: string, smoothing?: number}} settings
   */
  constructor(runs, settings = {}) {
    this.runs = runs;
    this.x = settings.x ?? "step";
    this.smoothing = settings.smoothing ?? 0;
    this.window = null;
    this.charts = [];
    this.onwindow = () => {};
    this.abort = new AbortController();
    this.sync = uPlot.sync(`board-${Math.random()}`);
    this.wanted = new Set();
    this.flush = debounce(() => this.#fetch(), 15);
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        entry.target.chart.visible = entry.isIntersecting;
        if (entry.isIntersecting && entry.target.chart.stale) this.want(entry.target.chart);
      }
    }, { rootMargin: "200px" });
    this.sized = new ResizeObserver((entries) => { for (const entry of entries) entry.target.parentElement.chart?.resize(); });
  }

  add(keys) {
    const chart = new Chart(this, keys);
    this.charts.push(chart);
    this.seen.observe(chart.element);
    this.sized.observe(chart.plot);
    return chart.element;
  }

  clear() {
    for (const chart of this.charts) chart.destroy();
    this.charts = [];
    this.seen.disconnect();
    this.sized.disconnect();
  }

  destroy() { this.clear(); this.abort.abort(); }

  set(settings) {
    if (settings.x !== undefined && settings.x !== this.x) { this.x = settings.x; this.window = null; }
    if (settings.smoothing !== undefined) this.smoothing = settings.smoothing;
    if (settings.window !== undefined) this.window = settings.window;
    this.onwindow(this.window);
    this.refresh();
  }

  refresh() {
    for (const chart of this.charts) {
      chart.stale = true;
      if (chart.visible) this.want(chart);
    }
  }

  redraw() { for (const chart of this.charts) chart.rebuild(); }

  want(chart) { this.wanted.add(chart); this.flush(); }

  async #fetch() {
    const charts = [...this.wanted];
    this.wanted.clear();
    if (!charts.length) return;
    const keys = [...new Set(charts.flatMap((chart) => chart.keys))];
    const width = Math.max(...charts.map((chart) => chart.plot.clientWidth || 400));
    const window = this.window, x = this.x, smoothing = this.smoothing;
    const asked = { x, smoothing: smoothing || "", points: Math.min(4000, Math.round(width * devicePixelRatio * 2)),
      start: window?.[0], end: window?.[1], keys: keys.map(encodeURIComponent).join(",") };
    try {
      const answers = await Promise.all(this.runs.map((run) => get(`runs/${run.id}/series`, asked, this.abort.signal)));
      if (window !== this.window || x !== this.x || smoothing !== this.smoothing) return; // a newer fetch is under way
      for (const chart of charts) chart.show(answers);
    } catch (error) {
      if (error.name !== "AbortError") for (const chart of charts) chart.fail(error);
    }
  }
}

class Chart {
  constructor(board, keys) {
    const { title } = figure(keys[0]);
    this.board = board;
    this.title = title;
    this.keys = keys;
    this.visible = false;
    this.stale = true;
    this.answers = null;
    this.lines = [];
    this.at = h("span", { class: "at" });
    this.values = h("div", { class: "values" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": title, onkeydown: (event) => this.#key(event) });
    this.data = h("div", { class: "data", hidden: true, tabindex: "0" });
    this.toggle = h("button", { type: "button", class: "plain small", "aria-pressed": "false", title: "Show the figures as a table", onclick: () => this.#flip() }, "table");
    this.element = h("section", { class: "panel chart", "data-key": keys[0] },
      h("header", {}, h("h2", { title: keys.map(tooltip).join("\n") }, title), this.at, h("span", { class: "grow" }), this.toggle), this.values, this.plot, this.data);
    this.element.chart = this;
  }

  /** Lines of the chart: one for each run and key that has points. */
  show(answers) {
    this.stale = false;
    this.answers = answers;
    this.lines = [];
    answers.forEach((answer, index) => {
      this.keys.forEach((key, place) => {
        const curve = answer.curves[key];
        if (!curve || !curve.x.length) return;
        const slot = this.keys.length > 1 && answers.length === 1 ? place : index;
        const name = [answers.length > 1 ? this.board.runs[index].name : "", this.keys.length > 1 ? figure(key).label : ""].filter(Boolean).join(" · ");
        this.lines.push({ key, slot, name, curve, points: key.startsWith("evaluation/") });
      });
    });
    this.rebuild();
  }

  fail(error) { this.u?.destroy(); this.u = null; fill(this.plot, h("p", { class: "note bad" }, error.message)); }

  rebuild() {
    if (!this.answers) return;
    this.u?.destroy();
    this.u = null;
    this.plot.replaceChildren();
    if (!this.lines.length) {
      fill(this.plot, h("p", { class: "empty" }, "No figures in this window."));
      fill(this.values);
      return;
    }
    const tables = [], series = [{}];
    this.shown = [];
    for (const line of this.lines) {
      const { colour: hue, dash } = seriesStyle(line.slot), stroke = colour(hue), smooth = line.curve.smooth_x.length > 0;
      tables.push([line.curve.x, line.curve.y]);
      series.push(line.points
        ? { stroke, width: 1, dash, spanGaps: true, points: { show: true, size: line.curve.x.length > 40 ? 4 : 7, fill: stroke, stroke } }
        : { stroke: smooth ? `${stroke}55` : stroke, width: smooth ? 1 : 1.5, dash, spanGaps: true, points: { show: line.curve.x.length < 3, size: 5 } });
      this.shown.push({ line, place: series.length - 1, smooth: null });
      if (smooth) {
        tables.push([line.curve.smooth_x, line.curve.smooth_y]);
        series.push({ stroke, width: 2, dash, spanGaps: true, points: { show: false } });
        this.shown.at(-1).smooth = series.length - 1;
      }
    }
    const data = uPlot.join(tables), time = this.board.x === "time_s";
    const grid = { stroke: colour("line"), width: 1 }, text = colour("muted"), font = `11px ${colour("sans") || "sans-serif"}`;
    const axis = { stroke: text, font, grid, ticks: { stroke: colour("line"), size: 4 } };
    const window = this.board.window;
    this.u = new uPlot({
      width: this.plot.clientWidth || 400, height: this.plot.clientHeight || 190,
      scales: {
        x: { time: false, range: (u, low, high) => window ?? (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { range: (u, low, high) => span(low, high) },
      },
      series, legend: { show: false },
      axes: [
        { ...axis, size: 26, space: 60, values: (u, ticks) => ticks.map((tick) => (time ? duration(tick) : Number.isInteger(tick) ? number(tick) : "")) },
        { ...axis, size: 52, space: 34, values: (u, ticks) => ticks.map((tick) => short(tick)) },
      ],
      cursor: { sync: { key: this.board.sync.key, setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 6 },
        bind: { dblclick: () => () => { this.board.set({ window: null }); } } },
      hooks: {
        setCursor: [(u) => this.#values(u.cursor.idx)],
        setSelect: [(u) => this.#selected(u)],
      },
    }, data, this.plot);
    this.#values(null);
    if (!this.data.hidden) this.#table();
  }

  resize() { if (this.u && this.plot.clientWidth) this.u.setSize({ width: this.plot.clientWidth, height: this.plot.clientHeight }); }

  #selected(u) {
    if (u.select.width < 4) return;
    const start = u.posToVal(u.select.left, "x"), end = u.posToVal(u.select.left + u.select.width, "x");
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.board.set({ window: [start, end] });
  }

  /** The values below the cursor, or the last ones. */
  #values(index) {
    const { data } = this.u;
    const x = index === null || index === undefined ? null : data[0][index];
    fill(this.at, x === null ? "" : this.board.x === "time_s" ? duration(x) : `step ${number(Math.round(x))}`);
    fill(this.values, this.shown.map(({ line, place, smooth }) => {
      const near = nearest(data[place], index);
      const soft = smooth === null ? null : nearest(data[smooth], index);
      const value = near === null ? null : data[place][near];
      const where = line.points && near !== null && this.board.x === "step" ? ` at version ${number(data[0][near])}` : "";
      return h("span", {}, seriesKey(line.slot), line.name ? `${line.name} ` : "", h("b", {}, figureText(line.key, soft === null ? value : data[smooth][soft])),
        soft === null ? "" : h("span", { class: "faint" }, ` ${figureText(line.key, value)}`), h("span", { class: "faint" }, where));
    }));
    const last = this.shown.map(({ line, place }) => `${line.name || this.title} ${figureText(line.key, data[place][nearest(data[place], null)])}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}: newest ${last}`);
  }

  #key(event) {
    const { board } = this, x = this.u?.scales.x;
    if (!x || event.ctrlKey || event.metaKey || event.altKey) return;
    const width = x.max - x.min, middle = (x.min + x.max) / 2;
    const moves = {
      "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4], "-": [middle - width, middle + width],
      ArrowLeft: [x.min - width / 4, x.max - width / 4], ArrowRight: [x.min + width / 4, x.max + width / 4], "0": null,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    board.set({ window: moves[event.key] });
  }

  #flip() {
    const table = this.data.hidden;
    this.data.hidden = !table;
    this.plot.hidden = table;
    this.toggle.setAttribute("aria-pressed", String(table));
    fill(this.toggle, table ? "chart" : "table");
    if (table) this.#table(); else this.resize();
  }

  #table() {
    const most = 500, x = this.board.x === "time_s" ? "time" : "step";
    fill(this.data, this.lines.map((line) => h("table", {},
      h("thead", {}, h("tr", {}, h("th", { class: "number" }, line.points ? "version" : x), h("th", { class: "number" }, line.name || this.title))),
      h("tbody", {}, line.curve.x.slice(-most).map((value, place) => h("tr", {},
        h("td", { class: "number" }, number(value)),
        h("td", { class: "number" }, number(line.curve.y[Math.max(0, line.curve.y.length - most) + place], 8))))))),
    this.lines.some((line) => line.curve.total > most) && h("p", { class: "faint" }, "A part of the points; a smaller window shows all of them."));
  }

  destroy() { this.u?.destroy(); this.u = null; }
}

/** The place of the known value nearest to an index, or the last known one. */
function nearest(values, index) {
  const from = index ?? values.length - 1;
  for (let distance = 0; distance < values.length; distance++) {
    for (const place of [from - distance, from + distance]) {
      if (values[place] !== null && values[place] !== undefined) return place;
    }
  }
  return null;
}

function span(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === 0 && high === 0) return [0, 1];
  if (low === high) { const half = Math.abs(low) * 0.1; return [low - half, high + half]; }
  const edge = (high - low) * 0.06;
  return [low >= 0 && low < edge * 2 ? Math.min(0, low) : low - edge, high + edge];
}

function short(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  if (size < 1e-3) return value.toExponential(0);
  return String(Number(value.toPrecision(4)));
}

/** A small curve without axes. */
export function spark(values) {
  const known = values.filter((value) => typeof value === "number");
  const attributes = { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" };
  if (known.length < 2) return svg("svg", attributes);
  const low = Math.min(...known), high = Math.max(...known), height = high - low || 1;
  const d = known.map((value, place) => `${place ? "L" : "M"}${((100 * place) / (known.length - 1)).toFixed(2)} ${(18.5 - (17 * (value - low)) / height).toFixed(2)}`).join("");
  return svg("svg", attributes, svg("path", { d }));
}
