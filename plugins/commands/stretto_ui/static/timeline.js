// Generation and training over time, on a canvas: lanes of spans, what waited for what, zoom and movement.
import { colour, debounce, duration, fill, h, number, printable } from "./dom.js";
import { get, saved } from "./api.js";
import { figure, figureText, hueOf, timeBar } from "./figures.js";

const LABEL = 132, ROW = 18, THIN = 5, GAP = 9, AXIS = 22, FLIGHT = 46;
/** What a span shows -> the part of a step's time whose colour it has: training itself, or a wait for it. */
const PARTS = { step: "train_s", call: "train_s", swap: "wait/swap_s", train: "wait/groups_s", evaluation: "wait/evaluation_s", eval: "wait/evaluation_s" };
const SCORING = 4; // the colour of a wait that is rare
const KINDS = [["step", "training: a step, a call of its workers"], ["train", "ticket: generation"], ["score", "ticket: scoring"], ["swap", "swap of weights"], ["eval", "evaluation"]];
const hueOfKind = (kind) => (kind === "score" ? SCORING : hueOf(PARTS[kind]));

export async function timelineTab({ id, facts }) {
  let data = await get(`runs/${id}/timeline`, { width: 1200 });
  if (!data) return { element: h("p", { class: "empty" }, "This run has no timeline: it was made by an older version, or it has not begun.") };
  let [start, end] = [data.start, data.end], follows = facts().state === "running", loading = false, boxes = [];
  const abort = new AbortController();
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "Timeline of generation and training", id: "timeline" });
  const detail = h("p", { class: "detail", "aria-live": "polite" }), range = h("span", { class: "muted mono" }), time = h("section", { class: "panel", id: "share" });
  const tip = h("div", { class: "tip", hidden: true }), followed = h("input", { type: "checkbox", checked: follows, onchange: () => { follows = followed.checked; } });
  const button = (label, onclick) => h("button", { type: "button", class: "asks", onclick }, label);
  const element = h("div", {},
    h("div", { class: "tools" },
      button("Zoom in", () => zoom(0.5)), button("Zoom out", () => zoom(2)),
      button("Whole run", () => go(data.begun, data.ended)), button("Newest steps", newest),
      facts().state === "running" && h("label", { class: "asks" }, followed, "follow"), range),
    h("section", { class: "panel timeline" }, canvas, detail),
    h("div", { class: "legend", style: { margin: "10px 2px 14px" } }, KINDS.map(([kind, label]) => h("span", {}, h("span", { class: `key k${hueOfKind(kind)}` }), label)), h("span", { class: "faint" }, "Pale before a step: what training waits for. ", h("span", { class: "asks" }, "Drag to move, Ctrl and wheel to zoom. "), "Hover for details, click a ticket for its samples.")),
    time, tip);
  const sized = new ResizeObserver(() => draw());

  async function newest() {
    const answer = await get(`runs/${id}/timeline`, { width: pixels() }, abort.signal);
    [start, end] = [answer.start, answer.end];
    take(answer);
  }

  function take(answer) {
    data = answer;
    loading = false;
    draw();
  }

  const load = debounce(async () => {
    try {
      const asked = [start, end], answer = await get(`runs/${id}/timeline`, { start, end, width: pixels() }, abort.signal);
      if (asked[0] !== start || asked[1] !== end) return; // a newer window is on its way
      take(answer);
    } catch (error) {
      if (error.name !== "AbortError") fill(detail, error.message);
    }
  }, 120);

  const pixels = () => Math.max(200, Math.round(canvas.clientWidth - LABEL));
  const label = () => (canvas.clientWidth < 600 ? 84 : LABEL);

  function go(from, to) {
    if (saved) return; // it holds one window
    const least = 0.005, whole = Math.max(data.ended - data.begun, 1);
    const width = Math.min(Math.max(to - from, least), whole * 1.02);
    const middle = (from + to) / 2;
    start = Math.min(Math.max(middle - width / 2, data.begun - whole * 0.01), data.ended + whole * 0.01 - width);
    end = start + width;
    follows = followed.checked = false;
    loading = true; // until the answer comes, the spans and sums of the former window are no figures of this one
    draw();
    load();
  }

  function zoom(factor, at = (start + end) / 2) { go(at - (at - start) * factor, at + (end - at) * factor); }

  function heights() { return data.lanes.map((lane) => (lane.kind === "flight" || lane.kind === "times" ? FLIGHT : lane.kind === "tickets" ? Math.max(ROW, lane.rows * THIN) : ROW)); }

  function draw() {
    const width = canvas.clientWidth, left = label(), scale = devicePixelRatio || 1, tall = heights();
    const height = AXIS + tall.reduce((sum, each) => sum + each + GAP, 0);
    if (!width) return;
    canvas.style.setProperty("height", `${height}px`);
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d"), x = (time) => left + ((time - start) / (end - start)) * (width - left);
    pen.scale(scale, scale);
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    boxes = [];
    drawAxis(pen, x, left, width, height);
    let y = AXIS;
    data.lanes.forEach((lane, index) => {
      pen.fillStyle = colour("muted");
      pen.textBaseline = "top";
      pen.fillText(shorten(pen, lane.kind === "share" ? figure(lane.name).label : printable(lane.name), left - 10), 0, y + 3);
      pen.fillStyle = colour("sunk");
      pen.fillRect(left, y, width - left, tall[index]);
      pen.save();
      pen.beginPath();
      pen.rect(left, y, width - left, tall[index]);
      pen.clip();
      if (lane.kind === "flight" || lane.kind === "share") drawValues(pen, lane, x, y, tall[index]);
      else if (lane.kind === "times") drawTimes(pen, lane, x, y, tall[index]);
      else drawSpans(pen, lane, x, y, tall[index]);
      pen.restore();
      y += tall[index] + GAP;
    });
    pen.strokeStyle = colour("bad");
    for (const mark of data.marks) {
      const at = Math.round(x(mark.time)) + 0.5;
      if (at < left) continue;
      pen.beginPath();
      pen.moveTo(at, AXIS - 4);
      pen.lineTo(at, height);
      pen.stroke();
      boxes.push({ left: at - 4, right: at + 4, top: 0, bottom: AXIS, span: { ...mark, start: mark.time, end: mark.time, kind: "mark" } });
    }
    canvas.classList.toggle("loading", loading);
    fill(range, `${clock(start)} to ${clock(end)} · ${duration(end - start)}${loading ? " · loading" : ""}`);
    drawTime();
  }

  function drawAxis(pen, x, left, width, height) {
    const unit = tick((end - start) / Math.max(2, (width - left) / 90)), from = data.begun;
    pen.fillStyle = colour("muted");
    pen.textBaseline = "top";
    pen.strokeStyle = colour("line");
    for (let at = Math.ceil((start - from) / unit) * unit; at <= end - from; at += unit) {
      const place = Math.round(x(from + at)) + 0.5;
      pen.beginPath();
      pen.moveTo(place, 14);
      pen.lineTo(place, height);
      pen.stroke();
      pen.fillText(relative(at, unit), place + 3, 2);
    }
  }

  function drawSpans(pen, lane, x, y, tall) {
    const high = lane.kind === "tickets" ? (lane.rows * THIN < ROW ? ROW / lane.rows : THIN) : tall;
    for (const span of lane.spans) {
      const left = x(span.start), wide = Math.max(1, x(span.end) - left - (high > 6 ? 0.5 : 0)), top = y + (span.row ?? 0) * high;
      pen.fillStyle = colour(`c${span.part ? hueOf(span.part) : hueOfKind(span.kind)}`);
      pen.globalAlpha = span.kind === "wait" ? 0.5 : span.count > 1 ? 0.35 + 0.55 * Math.min(1, span.busy_s / (span.end - span.start)) : 0.9;
      pen.fillRect(left, top, wide, high - (high > 4 ? 1 : 0));
      if (span.score > 0.02) {
        pen.fillStyle = colour(`c${SCORING}`);
        pen.fillRect(left + wide * (1 - span.score), top, wide * span.score, high - (high > 4 ? 1 : 0));
      }
      pen.globalAlpha = 1;
      boxes.push({ left, right: left + Math.max(3, wide), top, bottom: top + high, span, lane });
      const text = span.count > 1 || tall !== ROW || lane.kind === "tickets" ? "" : span.kind === "wait" ? span.text.split(": ")[1] : span.text.split(/:| at version/)[0];
      if (text && wide > 26) {
        pen.fillStyle = span.kind === "wait" ? colour("text") : colour("panel");
        pen.textBaseline = "middle";
        const full = pen.measureText(text).width <= wide - 8, brief = (span.kind !== "wait" && text.match(/(\d+)$/)?.[1]) || text;
        pen.fillText(shorten(pen, full ? text : brief, wide - 8), Math.max(left, label()) + 4, top + high / 2);
      }
    }
  }

  /** The tickets in flight, or a share: how much of something is used. */
  function drawValues(pen, lane, x, y, tall) {
    const isShare = lane.kind === "share", most = isShare ? 1 : Math.max(1, ...lane.values), step = (data.end - data.start) / lane.values.length;
    const text = (value) => (isShare ? `${figure(lane.name).label} ${figureText(lane.name, value)}` : `${number(value)} tickets in flight (at most ${number(most)})`);
    pen.fillStyle = colour(`c${hueOfKind("train")}`);
    pen.globalAlpha = 0.6;
    pen.beginPath();
    pen.moveTo(x(data.start), y + tall);
    lane.values.forEach((value, place) => {
      const at = data.start + place * step, top = y + tall - (value / most) * (tall - 3);
      pen.lineTo(x(at), top);
      pen.lineTo(x(at + step), top);
      boxes.push({ left: x(at), right: x(at + step), top: y, bottom: y + tall, lane, span: { start: at, end: at + step, kind: lane.kind, text: text(value) } });
    });
    pen.lineTo(x(data.end), y + tall);
    pen.fill();
    pen.globalAlpha = 1;
  }

  /** Steps too narrow to be told apart: the parts of their time over each other. */
  function drawTimes(pen, lane, x, y, tall) {
    const parts = Object.entries(lane.times), columns = parts[0]?.[1].length ?? 0, step = (data.end - data.start) / columns;
    for (let place = 0; place < columns; place += 1) {
      const at = data.start + place * step, shares = parts.map(([part, values]) => [part, values[place]]).filter(([, share]) => share > 0);
      let top = y + tall;
      for (const [part, share] of shares) {
        pen.fillStyle = colour(`c${hueOf(part)}`);
        pen.fillRect(x(at), top - share * tall, x(at + step) - x(at) + 0.5, share * tall);
        top -= share * tall;
      }
      boxes.push({ left: x(at), right: x(at + step), top: y, bottom: y + tall, lane, span: { start: at, end: at + step, kind: "times", text: shares.map(([part, share]) => `${figure(part).label} ${(100 * share).toFixed(0)} %`).join("\n") || "no step" } });
    }
  }

  function drawTime() {
    const wait = loading ? "Loading." : data.parts.length ? "" : "No step in this window.";
    fill(time, h("h2", {}, "Time of the steps ", h("span", { class: "muted" }, "in this window")), wait ? h("p", { class: "muted" }, wait) : timeBar(data.parts));
  }

  const clock = (time) => relative(time - data.begun, (end - start) / 100);

  function found(event) {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    return boxes.findLast((each) => px >= each.left && px <= each.right && py >= each.top && py < each.bottom) ?? null;
  }

  function describe(box) {
    const { span, lane } = box, several = span.count > 1 ? `${number(span.count)} spans, busy ${duration(span.busy_s)}; the first: ` : "";
    return printable(`${lane ? `${lane.name}\n` : ""}${several}${span.text}\n${clock(span.start)}${span.end > span.start ? ` to ${clock(span.end)}, ${duration(span.end - span.start)}` : ""}`);
  }

  let grip = null;
  canvas.addEventListener("pointerdown", (event) => { grip = { x: event.clientX, start, end, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (grip) {
      const shift = ((event.clientX - grip.x) / (canvas.clientWidth - label())) * (grip.end - grip.start);
      if (Math.abs(event.clientX - grip.x) > 3) grip.moved = true;
      if (grip.moved) { tip.hidden = true; go(grip.start - shift, grip.end - shift); }
      return;
    }
    const box = found(event);
    tip.hidden = !box;
    if (!box) return;
    fill(tip, describe(box));
    tip.style.setProperty("left", `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`);
    tip.style.setProperty("top", `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`);
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointerup", (event) => {
    const still = grip && !grip.moved, box = found(event);
    grip = null;
    if (!still || !box) return;
    fill(detail, describe(box).replaceAll("\n", " · "), box.span.ticket !== undefined && box.span.ticket !== null && [" ", h("a", { href: `#/run/${id}/samples?ticket=${box.span.ticket}&purpose=${box.span.kind}&group=1` }, "its samples")]);
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const share = (event.clientX - canvas.getBoundingClientRect().left - label()) / (canvas.clientWidth - label());
    zoom(event.deltaY > 0 ? 1.25 : 0.8, start + share * (end - start));
  }, { passive: false });

  function key(event) {
    const width = end - start;
    const moves = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => go(start - width / 4, end - width / 4), ArrowRight: () => go(start + width / 4, end + width / 4), 0: () => go(data.begun, data.ended) };
    if (!moves[event.key]) return false;
    moves[event.key]();
    return true;
  }

  return {
    element,
    shown() { sized.observe(canvas); draw(); },
    async update() { if (follows) await newest(); },
    redraw: draw, key,
    destroy() { sized.disconnect(); abort.abort(); tip.remove(); },
  };
}

function tick(least) {
  for (const unit of [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800]) if (unit >= least) return unit;
  return 604800;
}

/** Time since the run began. */
function relative(seconds, precision) {
  const digits = precision >= 1 ? 0 : Math.min(3, Math.ceil(-Math.log10(precision)));
  if (Math.abs(seconds) < 120) return `${seconds.toFixed(digits)} s`;
  const hours = Math.floor(seconds / 3600), minutes = Math.floor((seconds % 3600) / 60), rest = (seconds % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

function shorten(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let shown = text;
  while (shown && pen.measureText(`${shown}…`).width > width) shown = shown.slice(0, -1);
  return shown ? `${shown}…` : "";
}
