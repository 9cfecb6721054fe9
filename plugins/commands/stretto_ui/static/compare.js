// Several runs: what differs in their run files, their figures as `stretto compare` has them, and their curves over each other.
import { choice, duration, fill, h, number, printable, seriesKey } from "./dom.js";
import { get } from "./api.js";
import { curvesPanel, heldOut, rememberView } from "./curves.js";
import { configTable } from "./config.js";
import { figure, figureText, scoreText } from "./figures.js";

export async function compareView(query) {
  const ids = [...new Set((query.get("runs") ?? "").split(",").filter(Boolean))];
  const asked = () => Promise.all([get("compare", { runs: ids.join(",") }), ...ids.map((id) => get(`runs/${id}`))]);
  let [comparison, ...all] = await asked();
  const names = comparison.runs.map((run) => run.label);
  const apart = names.map((name, index) => ({ ids: [ids[index]], name })), together = joined(apart, comparison);
  const asWhole = query.get("seeds") ?? (together.length > 1 ? "together" : "apart");
  let runs = asWhole === "apart" ? apart : together;
  const place = h("div"), nav = h("nav", { class: "tabs", "aria-label": "Views of the comparison" }), figures = h("div", { class: "panel scroll" }), differing = h("div", { class: "panel scroll" }), differences = h("div", { id: "differences" });
  const keys = [...new Set(all.flatMap((facts) => facts.keys))];
  let panel = null;

  function table(id, columns) {
    return h("table", { id }, h("thead", {}, h("tr", {}, h("th", {}, "run"), columns.map(([label]) => h("th", { class: "number" }, printable(label))))),
      h("tbody", {}, names.map((name, index) => h("tr", {}, h("td", { class: "whole" }, seriesKey(runs.findIndex((run) => run.ids.includes(ids[index]))), h("a", { href: `#/run/${ids[index]}/overview` }, printable(name))), columns.map(([, value]) => h("td", { class: "number clip", title: printable(value(index)) }, printable(value(index))))))));
  }

  function drawFigures() {
    const of = (show) => (index) => show(comparison.runs[index]);
    const column = (key, value) => [figure(key).name, of((run) => figureText(key, value(run)))];
    const { measure } = comparison;
    const keys = Object.entries(comparison.differences);
    fill(differing, keys.length ? table("differing", keys.map(([key, values]) => [key, (index) => values[index] ?? "–"])) : h("p", { class: "muted" }, "No value of the run files, besides name and out."));
    const said = [
      ...comparison.groups.filter((group) => group.difference).map((group) => `${group.figure}, ${namesOf(group)} minus ${namesOf(comparison.groups[0])}: ${signedEstimate(group.difference)}, ${group.paired ? `paired by ${group.paired} seeds` : "seeds not paired"}`),
      ...comparison.between.map((each) => `${each.figure}, ${each.run} minus ${each.minus}: ${signedEstimate(each.difference)}, of ${each.of}`),
      ...comparison.groups.map((group) => [group, ...(group.score === null ? ["reward", group.reward, group.reward_sd] : [measure, group.score, group.score_sd])]).map(([group, label, mean, sd]) => `${namesOf(group)}: ${label} ${scoreText(mean)}, standard deviation ${scoreText(sd)}`),
    ];
    fill(differences, comparison.caution && h("p", { class: "note" }, `Caution: ${printable(comparison.caution)}.`), said.length ? said.map((each) => h("p", {}, printable(each))) : h("p", { class: "muted" }, "These runs have no figure in common."));
    fill(figures, table("figures", [
      ["state", of((run) => run.state)], ["steps", (index) => `${number(all[index].step)} of ${number(all[index].total)}`], ["duration", of((run) => duration(run.wall_s))],
      column("reward", (run) => run.reward), [measure, of((run) => evaluated(run.last))], [`best ${measure}`, of((run) => evaluated(run.best))],
      column("staleness", (run) => run.staleness), column("step_tokens_per_s", (run) => run.tokens_per_s), ["verdict", of((run) => run.verdict || "–")],
    ]));
  }

  const namesOf = (group) => together.find((run) => run.ids.includes(ids[names.indexOf(group.runs[0])])).name;
  const address = () => `#/compare?runs=${ids.join(",")}${together === apart ? "" : `&seeds=${runs === apart ? "apart" : "together"}`}`;

  async function show(parameters) {
    const tab = parameters.get("tab") ?? "curves";
    panel?.board.destroy();
    panel = null;
    fill(nav, [["curves", "Curves"], ["config", "Configuration"]].map(([each, label]) => h("a", { href: `${address()}&tab=${each}`, "aria-current": each === tab ? "page" : null }, label)));
    if (tab === "config") {
      const values = await Promise.all(ids.map((id) => get(`runs/${id}/config`)));
      fill(place, configTable(values.map((each, index) => ({ ...each, name: names[index] })), Object.keys(comparison.differences)));
    } else {
      panel = curvesPanel(runs, keys, { evaluations: heldOut(all), query: parameters, remember: (view) => rememberView(address(), view) });
      const seeds = together !== apart && choice("Seeds", [["together", "mean ± deviation over seeds"], ["apart", "each seed"]], runs === apart ? "apart" : "together", (which) => {
        runs = which === "apart" ? apart : together;
        drawFigures();
        const view = new URLSearchParams(location.hash.split("?")[1]);
        for (const name of ["runs", "seeds"]) view.delete(name);
        rememberView(address(), Object.fromEntries(view));
        show(view);
      });
      fill(place, seeds && h("div", { class: "tools" }, seeds), panel.element);
    }
  }

  drawFigures();
  await show(query);
  return {
    element: h("div", {}, h("div", { class: "head" }, h("h1", {}, "Comparison"), h("a", { class: "muted asks", href: `#/?runs=${ids.join(",")}` }, "change the selection")), h("div", { class: "section" }, h("h2", {}, "What differs")), differing, h("div", { class: "section" }, h("h2", {}, "Differences"), h("span", { class: "faint" }, "± is a 95 % interval")), differences, h("div", { class: "section" }, h("h2", {}, "Figures"), h("span", { class: "faint" }, "of steps: means of the newest 10; v is the version that was evaluated")), figures, nav, place),
    title: "Comparison", path: [`${ids.length} runs`],
    live: () => all.some((facts) => facts.state === "running"),
    accepts(parts, parameters) {
      if (parts[0] !== "compare" || parameters.get("runs") !== ids.join(",")) return false;
      show(parameters);
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
  return evaluation === null ? "–" : `${estimate(evaluation.score)} v${evaluation.version}`;
}

const signedEstimate = (each) => `${each.mean < 0 ? "" : "+"}${estimate(each)}`;

/** The runs with those that differ only in their seed as one; the same list if there are none. */
function joined(apart, { runs, groups, differences }) {
  const groupOf = (index) => groups.find((group) => group.runs.includes(runs[index].label));
  const values = (index) => Object.entries(differences).filter(([key]) => key !== "seed").map(([key, values]) => `${key} ${values[index] ?? "–"}`).join(", ");
  const firsts = apart.map((run, index) => index).filter((index) => (groupOf(index)?.runs[0] ?? runs[index].label) === runs[index].label);
  if (firsts.length === apart.length) return apart;
  return firsts.map((index) => {
    const group = groupOf(index);
    return group ? { ids: apart.filter((run) => group.runs.includes(run.name)).flatMap((run) => run.ids), name: `${values(index) || runs[index].label} (${group.runs.length} seeds)` } : apart[index];
  });
}
