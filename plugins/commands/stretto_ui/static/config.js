// The configuration of a run, and the differences between runs.
import { fill, h, printable, seriesKey } from "./dom.js";
import { get } from "./api.js";

/** A table of dotted keys with a column for each run; the keys in `differing` are those that differ, those in `written` come first, with their `defaults`, and `filter` is the text to begin with. */
export function configTable(runs, differing, { written = [], defaults = {}, filter = "" } = {}) {
  const columns = runs.map((run) => new Map(run.values)), all = [...new Set(runs.flatMap((run) => run.values.map(([key]) => key)))];
  const set = all.filter((key) => written.some((each) => key === each || key.startsWith(`${each}.`))), keys = [...set, ...all.filter((key) => !set.includes(key))];
  const body = h("tbody");
  const search = h("input", { type: "search", value: filter, placeholder: "Filter keys and values …", "aria-label": "Filter the configuration", "data-search": true, oninput: draw });
  const only = h("input", { type: "checkbox", checked: runs.length > 1, id: "differences", onchange: draw });

  /** Where a key stands: its title, and its name below it. */
  function place(key, index) {
    if (index < set.length) return ["set by you", key];
    const dot = key.indexOf(".");
    return dot > 0 ? [set.length ? `${key.slice(0, dot)}: defaults` : key.slice(0, dot), key.slice(dot + 1)] : [set.length ? "defaults" : "", key];
  }

  function draw() {
    const text = search.value.trim().toLowerCase();
    let part = null;
    fill(body, keys.map((key, index) => {
      const values = columns.map((column) => column.get(key)), differs = differing.includes(key);
      if (only.checked && !differs) return null;
      if (text && !`${key} ${values.join(" ")}`.toLowerCase().includes(text)) return null;
      const [section, name] = place(key, index);
      const title = section !== part && section ? h("tr", { class: "part" }, h("td", { colspan: runs.length + 1 }, printable(section))) : null;
      part = section;
      return [title, h("tr", { class: differs ? "differs" : "", "data-key": key }, h("td", {}, printable(name)),
        values.map((value) => h("td", { class: `wrap ${runs.length > 1 && !differs ? "same" : ""}` }, value === undefined ? "–" : printable(value),
          index < set.length && key in defaults && h("span", { class: "muted" }, defaults[key] === value ? " (the default)" : ` (default: ${printable(defaults[key])})`))))];
    }));
    if (!body.children.length) fill(body, h("tr", {}, h("td", { colspan: runs.length + 1, class: "empty" }, text ? "Nothing matches the filter." : "No key differs.")));
  }

  draw();
  return h("div", {},
    h("div", { class: "tools" }, search, runs.length > 1 && h("label", {}, only, "differences only")),
    h("div", { class: "panel scroll config" }, h("table", { id: "config" }, h("thead", {}, h("tr", {}, h("th", {}, "key"), runs.map((run, index) => h("th", {}, runs.length > 1 && seriesKey(index), printable(run.name))))), body)));
}

export async function configTab({ id, query }) {
  const run = await get(`runs/${id}/config`), { origin } = run;
  return { element: h("div", {}, origin && provenance(origin), configTable([run], [], { written: origin?.written, defaults: origin?.defaults, filter: query.get("filter") ?? "" })) };
}

function provenance({ host, gpus, python, packages, commit }) {
  const facts = [["host", host], ["GPUs", gpus.join(", ")], ["commit of the working directory", commit.replace("+", ", with changes")], ["Python", python], ["packages", Object.entries(packages).map((each) => each.join(" ")).join(", ")]];
  return h("section", { class: "panel", style: { "margin-bottom": "14px" } }, h("dl", { class: "facts", id: "origin" }, facts.filter(([, value]) => value).map(([label, value]) => [h("dt", {}, label), h("dd", { class: "mono" }, printable(value))])));
}
