// Makes elements. Text becomes text nodes, never markup: a model, a reward or a run file may have written it.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Control characters as escapes such as \x1b; newlines and tabs stay. */
export function printable(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (each) => {
    const code = each.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** A row of buttons of which one is pressed. */
export function choice(label, options, current, choose) {
  const group = h("div", { class: "choice", role: "group", "aria-label": label });
  for (const [value, text] of options) {
    group.append(h("button", { type: "button", "aria-pressed": String(value === current), "data-value": value, onclick: () => {
      for (const each of group.children) each.setAttribute("aria-pressed", String(each.dataset.value === String(value)));
      choose(value);
    } }, text));
  }
  return group;
}

/** Text in which `words between backticks` are code. */
export function withCode(text, code = (part) => h("code", {}, part)) {
  return printable(text).split("`").map((part, index) => (index % 2 ? code(part) : part));
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return printable(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

/** The rule of `stretto.records.charts.duration_text`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), minutes = Math.round(whole / 60);
  if (whole < 60) return `${whole} s`;
  if (whole < 600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function ago(unix) {
  return unix ? `${duration(Math.max(0, Date.now() / 1000 - unix))} ago` : "–";
}

export function debounce(work, wait) {
  let timer = 0;
  return (...values) => { clearTimeout(timer); timer = setTimeout(() => work(...values), wait); };
}

const HUES = Number(colour("hues"));

/** How the n-th series is drawn: each hue without dashes, then each with one long dash, then with ever more short ones. */
export function seriesStyle(series) {
  const round = Math.floor(series / HUES);
  return { colour: `c${series % HUES}`, dash: round ? [9, 4, ...Array(round - 1).fill([2, 4]).flat()] : [] };
}

/** The sign of the n-th series in a legend. */
export function seriesKey(series) {
  const style = seriesStyle(series), line = svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, "stroke-width": 3, "stroke-dasharray": style.dash.join(" ") });
  line.style.setProperty("stroke", `var(--${style.colour})`);
  return svg("svg", { class: "series", width: 22, height: 10, "aria-hidden": "true" }, line);
}

/** A colour by its name, as the theme has it now. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
