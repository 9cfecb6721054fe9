// Charts of curves. A board holds charts with one window, one smoothing and one x-axis; it fetches what is visible.
/* global uPlot */
import { colour, debounce, duration, fill, h, number, printable, seriesKey, seriesStyle, svg } from "./dom.js";
import { get, saved } from "./api.js";
import { figure, figureText, tooltip } from "./figures.js";

export class Board {
  /**
   * @param {{ids: string[], name: string}[]} runs of several ids, a curve is the mean, with a band of one standard deviation
   * @param {{x?: string, smoothing?: number, log?: boolean, window?: number[], marks?: () => {at: number, text: string}[]}} settings marks: steps at which something began
   */
  constructor(runs, settings = {}) {
    this.runs = runs;
    this.x = settings.x ?? "step";
    this.smoothing = settings.smoothing ?? 0;
    this.marks = settings.marks ?? (() => []);
    this.log = settings.log ?? false;
    this.window = settings.window ?? null;
    this.charts = [];
    this.onset = () => {};
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
    if (settings.log !== undefined) this.log = settings.log;
    this.onset();
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
      const answers = await Promise.all(this.runs.map(({ ids: [id, ...others] }) => get(`runs/${id}/series`, { ...asked, others: others.join(",") }, this.abort.signal)));
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
    const tool = (name, title, onclick) => h("button", { type: "button", class: "plain small", "aria-pressed": "false", title, onclick }, name);
    this.toggle = tool("table", "Show the figures as a table", () => this.#flip());
    this.widen = tool("wide", "Use the whole width, with files to download", () => this.#widen());
    const files = h("span", { class: "files" }, h("button", { type: "button", class: "plain small", title: "Download the points of this window", onclick: () => this.#csv() }, "CSV"), h("button", { type: "button", class: "plain small", title: "Download the picture", onclick: () => this.#png() }, "PNG"));
    this.element = h("section", { class: "panel chart", "data-key": keys[0] },
      h("header", {}, h("h2", { title: keys.map(tooltip).join("\n") }, title), this.at, h("span", { class: "grow" }), files, this.toggle, this.widen), this.values, this.plot, this.data);
    this.element.chart = this;
  }

  /** Lines of the chart: one for each run and key that has points. */
  show(answers) {
    this.stale = false;
    this.answers = answers;
    this.lines = [];
    answers.forEach((answer, index) => {
      this.keys.forEach((key, place) => {
        const curve = answer.curves[key] && within(answer.curves[key], this.board.window);
        if (!curve?.x.length) return;
        const slot = this.keys.length > 1 && answers.length === 1 ? place : index;
        const label = this.keys.length > 1 ? figure(key).label : "", name = [answers.length > 1 ? this.board.runs[index].name : "", label].filter(Boolean).join(" · ");
        this.lines.push({ key, slot, name, label, curve, points: key.startsWith("evaluation/") });
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
    const tables = [], series = [{}], bands = [];
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
      const { x, y, smooth_x, smooth_y, sd } = line.curve, [middle_x, middle_y] = smooth ? [smooth_x, smooth_y] : [x, y];
      if (sd.length) {
        for (const sign of [1, -1]) {
          tables.push([middle_x, middle_y.map((value, place) => value + sign * sd[place])]);
          series.push({ stroke: "transparent", points: { show: false }, spanGaps: true });
        }
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${stroke}2a` });
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
        y: this.#isLog() ? { distr: 3 } : { range: (u, low, high) => span(low, high) },
      },
      series, bands, legend: { show: false },
      axes: [
        { ...axis, size: 26, space: 60, values: (u, ticks) => ticks.map((tick) => (time ? duration(tick) : Number.isInteger(tick) ? number(tick) : "")) },
        { ...axis, size: 52, space: 34, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) },
      ],
      cursor: { sync: { key: this.board.sync.key, setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 6 },
        bind: { dblclick: () => () => { this.board.set({ window: null }); } } },
      hooks: {
        setCursor: [(u) => this.#values(u.cursor.idx)],
        setSelect: [(u) => this.#selected(u)],
        draw: [(u) => { this.#mark(u); this.#errors(u); }],
      },
    }, data, this.plot);
    this.#values(null);
    if (!this.data.hidden) this.#table();
  }

  /** Dashed lines where something began. */
  #mark(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = colour("warn");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const x of this.#marks().map(({ at }) => u.valToPos(at, "x", true))) {
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  /** Whether the y-axis is logarithmic, which only values above 0 can have. */
  #isLog() { return this.board.log && this.lines.every((line) => line.curve.y.every((value) => value > 0)); }

  /** The 95 % intervals of accuracies. */
  #errors(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const { curve, slot } of this.lines) {
      ctx.strokeStyle = colour(seriesStyle(slot).colour);
      ctx.globalAlpha = 0.55;
      curve.ci95.forEach((half, place) => {
        const x = u.valToPos(curve.x[place], "x", true);
        if (half === null || x < bbox.left || x > bbox.left + bbox.width) return;
        const at = (value) => Math.min(bbox.top + bbox.height, Math.max(bbox.top, u.valToPos(value, "y", true)));
        ctx.beginPath();
        ctx.moveTo(x, at(curve.y[place] - half));
        ctx.lineTo(x, at(curve.y[place] + half));
        ctx.stroke();
      });
    }
    ctx.restore();
  }

  #marks() { return this.board.x === "step" ? this.board.marks() : []; }

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
    const marks = this.#marks().filter(({ at }) => at === x).map(({ text }) => ` · ${text}`).join("");
    fill(this.at, x === null ? "" : this.board.x === "time_s" ? duration(x) : `step ${number(Math.round(x))}${printable(marks)}`);
    fill(this.values, this.shown.map(({ line, place, smooth }) => {
      const near = nearest(data[place], index);
      const soft = smooth === null ? null : nearest(data[smooth], index);
      const value = near === null ? null : data[place][near];
      const where = line.points && near !== null && this.board.x === "step" ? ` at version ${number(data[0][near])}` : "";
      return h("span", { title: line.name || null }, seriesKey(line.slot), line.label && `${line.label} `, h("b", {}, figureText(line.key, soft === null ? value : data[smooth][soft])),
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

  #widen() {
    const wide = this.element.classList.toggle("whole-width");
    this.widen.setAttribute("aria-pressed", String(wide));
    this.resize();
  }

  #csv() {
    const cell = (text) => `"${String(text).replaceAll('"', '""')}"`;
    const rows = this.lines.flatMap(({ key, name, curve }) => curve.x.map((x, place) => [cell(name || this.board.runs[0].name), cell(key), x, curve.y[place], curve.ci95[place] ?? "", (curve.smooth_x.length ? null : curve.sd[place]) ?? ""].join(",")));
    save(new Blob([[`run,figure,${this.board.x},value,ci95,sd`, ...rows, ""].join("\n")], { type: "text/csv" }), `${this.title}.csv`);
  }

  /** The chart with its title and the names of its lines. */
  #png() {
    const { canvas } = this.u.ctx, scale = devicePixelRatio, line = 18 * scale, names = this.lines.map(({ name, slot }) => [name, colour(seriesStyle(slot).colour)]).filter(([name]) => name);
    const picture = h("canvas", { width: canvas.width, height: canvas.height + line * (names.length + 1) }), ctx = picture.getContext("2d");
    ctx.fillStyle = colour("panel");
    ctx.fillRect(0, 0, picture.width, picture.height);
    ctx.font = `${12 * scale}px ${colour("sans") || "sans-serif"}`;
    [[this.title, colour("text")], ...names].forEach(([text, ink], place) => { ctx.fillStyle = ink; ctx.fillText(text, 8 * scale, line * (place + 0.8)); });
    ctx.drawImage(canvas, 0, line * (names.length + 1));
    picture.toBlob((blob) => save(blob, `${this.title}.png`));
  }

  #table() {
    const most = 500, x = this.board.x === "time_s" ? "time" : "step";
    fill(this.data, this.lines.map((line) => h("table", {},
      h("thead", {}, h("tr", {}, h("th", { class: "number" }, line.points ? "version" : x), h("th", { class: "number" }, line.name || this.title))),
      h("tbody", {}, line.curve.x.slice(-most).map((value, place) => h("tr", {},
        h("td", { class: "number" }, number(value)),
        h("td", { class: "number" }, number(line.curve.y[Math.max(0, line.curve.y.length - most) + place], 8))))))),
    this.lines.some((line) => line.curve.total > most) && h("p", { class: "faint" }, saved ? "A part of the points." : "A part of the points; a smaller window shows all of them."));
  }

  destroy() { this.u?.destroy(); this.u = null; }
}

function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\p{L}\p{N}.%-]+/gu, "-") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** The points of a curve in a window, and the nearest one on each side of it. A file of `stretto report` holds all. */
function within(curve, window) {
  if (!saved || !window) return curve;
  const keep = (values) => values.filter((value, at) => !(curve.x[at + 1] < window[0] || curve.x[at - 1] > window[1]));
  return { ...curve, x: keep(curve.x), y: keep(curve.y), ci95: keep(curve.ci95), sd: keep(curve.sd) };
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
  return String(Number(value.toPrecision(size < 1e-3 ? 2 : 4)));
}

/** Small curves in one picture, without axes. Each is a list of [x, y]; those with fewer than two points are left out. */
export function spark(...curves) {
  const drawn = curves.filter((curve) => curve.length > 1), element = svg("svg", { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" });
  const [left, right, low, high] = [0, 1].flatMap((axis) => { const all = drawn.flatMap((curve) => curve.map((point) => point[axis])); return [Math.min(...all), Math.max(...all)]; });
  const at = ([x, y]) => `${((100 * (x - left)) / (right - left || 1)).toFixed(2)} ${(18.5 - (17 * (y - low)) / (high - low || 1)).toFixed(2)}`;
  element.append(...drawn.map((curve) => svg("path", { d: `M${curve.map(at).join("L")}`, opacity: drawn.length > 1 ? 0.6 : 1 })));
  return element;
}
