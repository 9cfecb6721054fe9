// How the figures of metrics.jsonl are shown: the table of stretto.charts, which all views share.
import { duration, number, printable } from "./dom.js";
import { get } from "./api.js";

const TABLE = new Map();

export const ACCURACY = "evaluation/accuracy";

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

/** A value with its digits. The rule of `stretto.charts.Figure.text`. */
export function figureText(key, value) {
  const { unit, form } = figure(key), digits = Number(form.match(/\d/)[0]);
  if (typeof value !== "number") return "–";
  if (unit === "s") return duration(value);
  if (form.endsWith("g")) return number(value, digits);
  const fixed = (each) => each.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return form.endsWith("%") ? `${fixed(100 * value)} %` : fixed(value);
}
