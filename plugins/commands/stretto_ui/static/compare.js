// Several runs: what differs in their run files, their figures as `stretto compare` has them, and their curves over each other.
import { duration, fill, h, number, printable, seriesKey } from "./dom.js";
import { get } from "./api.js";
import { curvesPanel } from "./curves.js";
import { configTable } from "./config.js";
import { ACCURACY, figure, figureText } from "./figures.js";

export async function compareView(query) {
  const ids = [...new Set((query.get("runs") ?? "").split(",").filter(Boolean))];
  const asked = () => Promise.all([get("compare", { runs: ids.join(",") }), ...ids.map((id) => get(`runs/${id}`))]);
  let [comparison, ...all] = await asked();
  const names = comparison.runs.map((run) => run.label);
  const runs = all.map((facts, index) => ({ id: facts.id, name: names[index] }));
  const place = h("div"), nav = h("nav", { class: "tabs", "aria-label": "Views of the comparison" }), figures = h("div", { class: "panel scroll" }), differing = h("div", { class: "panel scroll" }), groups = h("div");
  const keys = [...new Set(all.flatMap((facts) => facts.keys))];
  let panel = null;

  function table(id, columns) {
    return h("table", { id }, h("thead", {}, h("tr", {}, h("th", {}, "run"), columns.map(([label]) => h("th", { class: "number" }, printable(label))))),
      h("tbody", {}, names.map((name, index) => h("tr", {}, h("td", { class: "whole" }, seriesKey(index), h("a", { href: `#/run/${ids[index]}/overview` }, printable(name))), columns.map(([, value]) => h("td", { class: "number" }, printable(value(index))))))));
  }

  function drawFigures() {
    const of = (show) => (index) => show(comparison.runs[index]);
    const column = (key, value) => [figure(key).name, of((run) => figureText(key, value(run)))];
    const accuracy = figure(ACCURACY).label;
    const differences = new Map(comparison.paired.map((each) => [each.run, each]));
    const keys = Object.entries(comparison.differences);
    fill(differing, keys.length ? table("differing", keys.map(([key, values]) => [key, (index) => values[index] ?? "–"])) : h("p", { class: "muted" }, "No value of the run files, besides name and out."));
    fill(figures, table("figures", [
      ["state", of((run) => run.state)], ["steps", (index) => `${number(all[index].step)} of ${number(all[index].total)}`], ["duration", of((run) => duration(run.wall_s))],
      column("reward", (run) => run.reward), [accuracy, of((run) => evaluated(run.last))],
      differences.size && [`minus ${names[0]}`, of((run) => paired(differences.get(run.label)))], [`best ${accuracy}`, of((run) => evaluated(run.best))],
      column("staleness", (run) => run.staleness), column("step_tokens_per_s", (run) => run.tokens_per_s),
    ].filter(Boolean)));
    fill(groups, h("p", { class: "faint" }, "Figures of steps are means of the newest 10. ± is a 95 % interval, v the version that was evaluated; a difference is paired by row, in the last evaluation that both have."),
      comparison.groups.map((group) => h("p", {}, printable(`${group.runs.length} runs that differ in their seed: ${group.runs.join(", ")}: ${accuracy} ${figureText(ACCURACY, group.accuracy)}, standard deviation ${figureText(ACCURACY, group.accuracy_sd)}`))));
  }

  async function show(tab) {
    panel?.board.destroy();
    panel = null;
    fill(nav, [["curves", "Curves"], ["config", "Configuration"]].map(([each, label]) => h("a", { href: `#/compare?runs=${ids.join(",")}&tab=${each}`, "aria-current": each === tab ? "page" : null }, label)));
    if (tab === "config") {
      const values = await Promise.all(runs.map((run) => get(`runs/${run.id}/config`)));
      fill(place, configTable(values.map((each, index) => ({ ...each, name: names[index] })), Object.keys(comparison.differences)));
    } else {
      panel = curvesPanel(runs, keys, { evaluations: all.some((facts) => facts.evaluations.length) });
      fill(place, panel.element);
    }
  }

  drawFigures();
  await show(query.get("tab") ?? "curves");
  return {
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Comparison"), h("a", { class: "muted", href: `#/?runs=${ids.join(",")}` }, "change the selection")), h("div", { class: "section" }, h("h2", {}, "What differs")), differing, h("div", { class: "section" }, h("h2", {}, "Figures")), figures, groups, nav, place),
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
      [comparison, ...all] = await asked();
      drawFigures();
      if (JSON.stringify(all.map((facts) => facts.revision)) !== before) panel?.board.refresh();
    },
    redraw() { panel?.board.redraw(); },
    destroy() { panel?.board.destroy(); },
  };
}

function estimate({ mean, ci95 }) {
  return `${mean.toFixed(4)}${ci95 === null ? "" : ` ± ${ci95.toFixed(4)}`}`;
}

function evaluated(evaluation) {
  return evaluation === null ? "–" : `${estimate(evaluation.accuracy)} v${evaluation.version}`;
}

function paired(each) {
  return each ? `${each.difference.mean < 0 ? "" : "+"}${estimate(each.difference)} v${each.version}` : "–";
}
