// The configuration of a run, and the differences between runs.
import { fill, h, printable, seriesKey } from "./dom.js";
import { get } from "./api.js";

/** A table of dotted keys with a column for each run; the keys in `differing` are those that differ. */
export function configTable(runs, differing) {
  const keys = [...new Set(runs.flatMap((run) => run.values.map(([key]) => key)))];
  const columns = runs.map((run) => new Map(run.values));
  const body = h("tbody");
  const search = h("input", { type: "search", placeholder: "Filter keys and values …", "aria-label": "Filter the configuration", "data-search": true, oninput: draw });
  const only = h("input", { type: "checkbox", checked: runs.length > 1, id: "differences", onchange: draw });

  function draw() {
    const text = search.value.trim().toLowerCase();
    let part = null;
    fill(body, keys.map((key) => {
      const values = columns.map((column) => column.get(key)), differs = differing.includes(key);
      if (only.checked && !differs) return null;
      if (text && !`${key} ${values.join(" ")}`.toLowerCase().includes(text)) return null;
      const section = key.includes(".") ? key.split(".")[0] : "";
      const title = section !== part && section ? h("tr", { class: "part" }, h("td", { colspan: runs.length + 1 }, printable(section))) : null;
      part = section;
      return [title, h("tr", { class: differs ? "differs" : "", "data-key": key }, h("td", {}, printable(section ? key.slice(section.length + 1) : key)),
        values.map((value) => h("td", { class: `wrap ${runs.length > 1 && !differs ? "same" : ""}` }, value === undefined ? "–" : printable(value))))];
    }));
    if (!body.children.length) fill(body, h("tr", {}, h("td", { colspan: runs.length + 1, class: "empty" }, text ? "Nothing matches the filter." : "No key differs.")));
  }

  draw();
  return h("div", {},
    h("div", { class: "tools" }, search, runs.length > 1 && h("label", {}, only, "differences only")),
    h("div", { class: "panel scroll config" }, h("table", { id: "config" }, h("thead", {}, h("tr", {}, h("th", {}, "key"), runs.map((run, index) => h("th", {}, runs.length > 1 && seriesKey(index), printable(run.name))))), body)));
}

export async function configTab({ id }) {
  return { element: configTable([await get(`runs/${id}/config`)], []) };
}
