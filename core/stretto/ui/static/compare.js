// Several runs: their figures side by side, their curves over each other, and what differs in their configuration.
import { duration, fill, h, number, printable, seriesKey } from "./dom.js";
import { get } from "./api.js";
import { curvesPanel } from "./curves.js";
import { configTable } from "./config.js";

export async function compareView(query) {
  const ids = [...new Set((query.get("runs") ?? "").split(",").filter(Boolean))];
  let all = await Promise.all(ids.map((id) => get(`runs/${id}`)));
  const names = distinct(all);
  const runs = all.map((facts, index) => ({ id: facts.id, name: names[index] }));
  const place = h("div"), nav = h("nav", { class: "tabs", "aria-label": "Views of the comparison" }), figures = h("div", { class: "panel scroll" });
  const keys = [...new Set(all.flatMap((facts) => facts.keys))];
  let panel = null;

  function drawFigures() {
    const rows = [
      ["state", (facts) => facts.state], ["steps", (facts) => `${number(facts.step)} of ${number(facts.total)}`], ["duration", (facts) => duration(facts.wall_s)],
      ["reward", (facts) => number(facts.last.reward)], ["held out", (facts) => number(accuracies(facts).at(-1))],
      ["best", (facts) => number(accuracies(facts).length ? Math.max(...accuracies(facts)) : null)],
      ["staleness", (facts) => number(facts.last.staleness)], ["tokens/s", (facts) => number(facts.last.step_tokens_per_s)],
    ];
    fill(figures, h("table", { id: "figures" }, h("thead", {}, h("tr", {}, h("th", {}, "run"), rows.map(([label]) => h("th", { class: "number" }, label)))),
      h("tbody", {}, all.map((facts, index) => h("tr", {}, h("td", {}, seriesKey(index), h("a", { href: `#/run/${facts.id}/overview` }, printable(names[index]))), rows.map(([, value]) => h("td", { class: "number" }, value(facts))))))));
  }

  async function show(tab) {
    panel?.board.destroy();
    panel = null;
    fill(nav, [["curves", "Curves"], ["config", "Configuration"]].map(([each, label]) => h("a", { href: `#/compare?runs=${ids.join(",")}&tab=${each}`, "aria-current": each === tab ? "page" : null }, label)));
    if (tab === "config") {
      const values = await Promise.all(runs.map((run) => get(`runs/${run.id}/config`)));
      fill(place, configTable(values.map((each, index) => ({ ...each, name: runs[index].name })), { onlyDifferences: true }));
    } else {
      panel = curvesPanel(runs, keys, { evaluations: all.some((facts) => facts.evaluations.length) });
      fill(place, panel.element);
    }
  }

  drawFigures();
  await show(query.get("tab") ?? "curves");
  return {
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Comparison"), h("a", { class: "muted", href: `#/?runs=${ids.join(",")}` }, "change the selection")), h("div", { style: { height: "12px" } }), figures, h("p", { class: "faint" }, "Reward, staleness and tokens/s are those of the newest step."), nav, place),
    title: "Comparison", path: [`${runs.length} runs`],
    live: () => all.some((facts) => facts.state === "running"),
    accepts(parts, parameters) {
      if (parts[0] !== "compare" || parameters.get("runs") !== ids.join(",")) return false;
      show(parameters.get("tab") ?? "curves");
      return true;
    },
    async update() {
      if (!all.some((facts) => facts.state === "running")) return;
      const before = JSON.stringify(all.map((facts) => facts.revision));
      all = await Promise.all(ids.map((id) => get(`runs/${id}`)));
      drawFigures();
      if (JSON.stringify(all.map((facts) => facts.revision)) !== before) panel?.board.refresh();
    },
    redraw() { panel?.board.redraw(); },
    destroy() { panel?.board.destroy(); },
  };
}

function accuracies(facts) {
  return facts.evaluations.map((each) => each["evaluation/accuracy"]).filter((value) => typeof value === "number");
}

/** Names that differ: runs of one name get their folders. */
function distinct(all) {
  const names = all.map((facts) => facts.name);
  return all.map((facts) => (names.filter((name) => name === facts.name).length > 1 ? facts.path : facts.name));
}
