// How the figures of metrics.jsonl are shown: the table of stretto.records.charts, which all views share.
import { duration, h, number, printable } from "./dom.js";
import { get } from "./api.js";

const TABLE = new Map();

export const ACCURACY = "evaluation/accuracy";
/** A held-out score, be it an accuracy or a reward. */
export const scoreText = (value) => figureText(ACCURACY, value);

/** Read the table once, before the first view. */
export async function loadFigures() {
  if (!TABLE.size) for (const [key, each] of Object.entries(await get("figures"))) TABLE.set(key, each);
}

/** How a figure is shown. A key that is not in the table is its own label. */
export function figure(key) {
  const label = printable(key);
  return TABLE.get(key) ?? { label, name: label, title: label, meaning: "", unit: "", form: ".4g" };
}

/** The explanation of a figure, with the key that other commands take. */
export function tooltip(key) {
  const { meaning } = figure(key);
  return meaning ? `${meaning} (${key})` : printable(key);
}

/** The number of the colour of a part of a step's time. */
export const hueOf = (key) => figure(key).part;

/** A value with its digits. The rule of `stretto.records.charts.Figure.text`. */
export function figureText(key, value) {
  const { unit, form } = figure(key), digits = Number(form.match(/\d/)[0]);
  if (typeof value !== "number") return "–";
  if (unit === "s") return duration(value);
  if (form.endsWith("g")) return number(value, digits);
  const fixed = (each) => each.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return form.endsWith("%") ? `${fixed(100 * value)} %` : fixed(value);
}

export const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

/** The standard deviation of a sample; null of fewer than two values. */
export function deviation(values) {
  const centre = mean(values);
  return values.length > 1 ? Math.sqrt(values.reduce((sum, value) => sum + (value - centre) ** 2, 0) / (values.length - 1)) : null;
}

/** One bar of the parts of a step's time, [key, words, seconds], and what their colours mean. */
export function timeBar(parts) {
  const all = parts.reduce((sum, [, , seconds]) => sum + seconds, 0);
  return [
    h("div", { class: "stack", role: "img", "aria-label": parts.map(([, text]) => text).join(", ") }, parts.map(([key, text, seconds]) => h("div", { class: `k${hueOf(key)}`, title: text, style: { width: `${(100 * seconds) / all}%` } }))),
    timeLegend(parts),
  ];
}

export const timeLegend = (parts) => h("div", { class: "legend" }, parts.map(([key, text]) => h("span", { "data-part": key, title: tooltip(key) }, h("span", { class: `key k${hueOf(key)}` }), text)));
