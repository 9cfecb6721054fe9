// The list of all runs: sortable, filtered by text, several selected to compare.
import { ago, duration, fill, h, number, printable } from "./dom.js";
import { get } from "./api.js";
import { spark } from "./charts.js";
import { ACCURACY, figure, figureText } from "./figures.js";

const columns = () => [
  ["name", "run"], ["state", "state"], ["step", "step", "number"], ["reward", figure("reward").label, "number"], ["curve", "", ""], ["accuracy", figure(ACCURACY).label, "number"],
  ["best", "best", "number"], ["algorithm", "algorithm"], ["model", "model"], ["wall_s", "duration", "number"], ["changed", "changed", "number"],
];

export async function runsView(query) {
  let answer = await get("runs");
  let order = { key: "changed", down: true };
  const chosen = new Set((query.get("runs") ?? "").split(",").filter(Boolean));
  const body = h("tbody"), head = h("tr"), count = h("span", { class: "muted" });
  const search = h("input", { type: "search", placeholder: "Filter by name, folder, model …", "aria-label": "Filter runs", "data-search": true, oninput: draw });
  const compare = h("button", { type: "button", id: "compare", onclick: go }, "Compare");
  const problems = h("div");
  const element = h("div", {},
    h("div", { class: "tools" }, h("h1", {}, "Runs"), count, h("span", { class: "grow" }), search, compare),
    problems, h("div", { class: "panel scroll" }, h("table", { id: "runs" }, h("thead", {}, head), body)));

  function go() { if (chosen.size > 1) location.hash = `#/compare?runs=${[...chosen].join(",")}`; }

  function choose(id, on) {
    if (on) chosen.add(id); else chosen.delete(id);
    draw();
  }

  function draw() {
    const text = search.value.trim().toLowerCase();
    const rows = answer.runs.filter((run) => `${run.name} ${run.path} ${run.model} ${run.algorithm} ${run.state}`.toLowerCase().includes(text));
    rows.sort((one, other) => compared(one[order.key], other[order.key]) * (order.down ? -1 : 1));
    const focused = document.activeElement?.closest?.("tr.link")?.dataset.id;
    fill(count, `${rows.length} below ${printable(answer.folder)}`);
    compare.disabled = chosen.size < 2;
    fill(compare, chosen.size < 2 ? "Compare" : `Compare ${chosen.size}`);
    fill(problems, answer.problems.map((problem) => h("p", { class: "note bad" }, printable(problem))));
    fill(head, h("th", {}, h("span", { class: "muted" }, "")), columns().map(([key, label, kind]) => h("th", { class: kind ?? "", scope: "col", "aria-sort": order.key === key && label ? (order.down ? "descending" : "ascending") : null },
      label && h("button", { type: "button", onclick: () => { order = { key, down: order.key === key ? !order.down : kind === "number" }; draw(); } }, label))));
    fill(body, rows.map((run) => h("tr", { class: `link ${chosen.has(run.id) ? "chosen" : ""}`, tabindex: "0", "data-id": run.id,
      onclick: (event) => { if (!event.target.closest("input, a")) location.hash = `#/run/${run.id}/overview`; },
      onkeydown: (event) => { if (event.key === "Enter" && event.target.tagName === "TR") location.hash = `#/run/${run.id}/overview`; } },
      h("td", {}, h("input", { type: "checkbox", checked: chosen.has(run.id), "aria-label": `Select ${run.name}`, onchange: (event) => choose(run.id, event.target.checked) })),
      h("td", {}, h("a", { href: `#/run/${run.id}/overview` }, printable(run.name)), h("div", { class: "faint wrap" }, printable(run.path))),
      h("td", {}, h("span", { class: `pill ${run.state}` }, run.state)),
      h("td", { class: "number" }, `${number(run.step)} / ${number(run.total)}`),
      h("td", { class: "number" }, figureText("reward", run.reward)), h("td", {}, spark(run.curve)),
      h("td", { class: "number" }, figureText(ACCURACY, run.accuracy)), h("td", { class: "number" }, figureText(ACCURACY, run.best)),
      h("td", {}, printable(run.algorithm ?? "–")), h("td", { class: "clip", title: printable(run.model ?? "") }, printable((run.model ?? "–").split("/").slice(-2).join("/"))),
      h("td", { class: "number" }, duration(run.wall_s)), h("td", { class: "number" }, ago(run.changed)))));
    if (!rows.length) fill(body, h("tr", {}, h("td", { colspan: columns().length + 1, class: "empty" }, answer.runs.length ? "No run matches the filter." : "No run in this folder yet.")));
    if (focused) body.querySelector(`[data-id="${focused}"]`)?.focus();
  }

  draw();
  return {
    element, title: "Runs", path: [],
    live: () => answer.runs.some((run) => run.state === "running"),
    async update() { const before = JSON.stringify(answer); answer = await get("runs"); if (JSON.stringify(answer) !== before) draw(); },
    redraw() {},
    key(event) {
      const id = document.activeElement?.closest?.("tr.link")?.dataset.id;
      if (event.key === "c") go();
      else if (event.key === "x" && id) choose(id, !chosen.has(id));
      else return false;
      return true;
    },
  };
}

function compared(one, other) {
  if (one === other) return 0;
  if (one === null || one === undefined) return -1;
  if (other === null || other === undefined) return 1;
  return typeof one === "string" ? one.localeCompare(other) : one - other;
}
