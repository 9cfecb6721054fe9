// The list of all runs: sortable, filtered by text, several selected to compare. Runs that differ only in their seed are one row, which opens;
// the rows of a folder, such as a sweep, stand together below its name.
import { ago, duration, fill, h, number, printable, withCode } from "./dom.js";
import { get, saved } from "./api.js";
import { spark } from "./charts.js";
import { rememberView } from "./curves.js";
import { ACCURACY, deviation, figure, figureText, mean, scoreText } from "./figures.js";

const MOST_KEYS = 5; // columns of keys that differ

/** What the scores of some rows are. */
const measureOf = (rows) => {
  const measures = new Set(rows.filter((row) => row.score !== null).map((row) => row.measure));
  return measures.size > 1 ? "held out" : figure([...measures][0] ?? ACCURACY).label;
};

const columns = (keys, measure) => [
  ["name", "run"], ["state", "state"], ["verdict", "verdict"], ["step", "step", "number"], ["reward", figure("reward").label, "number"], ["curve", ""],
  ["score", measure, "number"], ...keys.map((key) => [key, shortened(key, keys)]), ["wall_s", "duration", "number"], ["changed", "changed", "number"], ["marks", ""],
];

/** The last words of a dotted key that no other of the keys ends with, at least two. */
function shortened(key, keys) {
  const words = printable(key).split("."), end = (count) => words.slice(-count).join(".");
  let count = 2;
  while (count < words.length && keys.some((other) => other !== key && `.${other}`.endsWith(`.${end(count)}`))) count += 1;
  return end(count);
}

/** Ids of runs that this browser remembers under a name. */
function remembered(name) {
  const ids = new Set(JSON.parse(localStorage.getItem(name) ?? "[]"));
  return { has: (id) => ids.has(id), turn(id) { if (!ids.delete(id)) ids.add(id); localStorage.setItem(name, JSON.stringify([...ids])); } };
}

export async function runsView(query) {
  let answer = await get("runs");
  const by = query.get("order") ?? "-changed";
  let order = { key: by.replace(/^-/, ""), down: by.startsWith("-") };
  const chosen = new Set(saved ? answer.runs.map((run) => run.id) : (query.get("runs") ?? "").split(",").filter(Boolean)), opened = new Set();
  const pinned = remembered("pinned"), hidden = remembered("hidden");
  const body = h("tbody"), head = h("tr"), count = h("span", { class: "muted" });
  const search = h("input", { type: "search", placeholder: "Filter by name, value, verdict …", "aria-label": "Filter runs", "data-search": true, value: query.get("find") ?? "", oninput: change });
  const together = h("input", { type: "checkbox", checked: true, id: "together", onchange: draw }), seeds = h("label", {}, together, "seeds in one row");
  const all = h("input", { type: "checkbox", id: "hidden", onchange: draw }), unseen = h("span"), others = h("label", {}, all, unseen);
  const compare = h("button", { type: "button", id: "compare", onclick: go }, "Compare");
  const problems = h("div");
  const element = h("div", {},
    h("div", { class: "tools" }, h("h1", {}, "Runs"), count, h("span", { class: "grow" }), others, seeds, search, compare),
    problems, h("div", { class: "panel scroll" }, h("table", { id: "runs" }, h("thead", {}, head), body)));

  function go() { if (chosen.size > 1) location.hash = `#/compare?runs=${[...chosen].join(",")}`; }

  /** Draw what the user has asked for. The address holds it. */
  function change() {
    const sorted = `${order.down ? "-" : ""}${order.key}`;
    rememberView("#/", { runs: [...chosen].join(","), find: search.value.trim(), order: sorted === "-changed" ? "" : sorted });
    draw();
  }

  function choose(ids, on) {
    for (const id of ids) { if (on) chosen.add(id); else chosen.delete(id); }
    draw();
  }

  /** The rows to show, in order: a run, or several that differ only in their seed, followed by them if they are opened. */
  function rowsOf(runs) {
    const groups = new Map();
    for (const run of runs) {
      const key = together.checked ? run.setting : run.id;
      groups.set(key, [...(groups.get(key) ?? []), run]);
    }
    const rows = [...groups.values()].map((members) => (members.length > 1 ? grouped(members) : members[0]));
    const sorted = (some) => some.sort((one, other) => pins(other) - pins(one) || compared(valueOf(one, order.key), valueOf(other, order.key)) * (order.down ? -1 : 1));
    return sorted(rows).flatMap((row) => [row, ...(opened.has(row.id) && row.members ? sorted([...row.members]) : [])]);
  }

  /** The rows with those of a folder together, below a row of its own; as they are if all are in one folder. */
  function inFolders(rows) {
    const folders = new Map();
    for (const row of rows) folders.set(folderOf(row), [...(folders.get(folderOf(row)) ?? []), row]);
    if (folders.size < 2) return rows;
    return [...folders].flatMap(([folder, members]) => (folder && members.length > 1 ? [{ folder, members }, ...members] : members));
  }

  const pins = (row) => (row.members ?? [row]).some((run) => pinned.has(run.id));

  function draw() {
    const text = search.value.trim().toLowerCase(), keys = Object.keys(answer.differing), shown = keys.slice(0, MOST_KEYS);
    const valued = answer.runs.map((run, index) => ({ ...run, values: Object.fromEntries(keys.map((key) => [key, answer.differing[key][index]])) }));
    const found = valued.filter((run) => `${run.name} ${run.path} ${run.state} ${run.verdict} ${Object.values(run.values).join(" ")}`.toLowerCase().includes(text));
    const away = found.filter((run) => hidden.has(run.id)).length, runs = all.checked ? found : found.filter((run) => !hidden.has(run.id));
    const focused = document.activeElement?.closest?.("tr.link")?.dataset.id;
    fill(count, `${runs.length} ${answer.folder === null ? "below runs, or living on this machine" : `below ${printable(answer.folder)}`}`);
    compare.disabled = chosen.size < 2;
    fill(compare, chosen.size < 2 ? "Compare" : `Compare ${chosen.size}`);
    seeds.hidden = new Set(answer.runs.map((run) => run.setting)).size === answer.runs.length;
    fill(unseen, `${away} hidden`);
    others.hidden = !away;
    fill(problems, answer.problems.map((problem) => h("p", { class: "note bad" }, printable(problem))));
    fill(head, h("th"), columns(shown, measureOf(answer.runs)).map(([key, label, kind]) => h("th", { class: kind ?? "", scope: "col", title: label ? key : null, "aria-sort": order.key === key && label ? (order.down ? "descending" : "ascending") : null },
      label && h("button", { type: "button", onclick: () => { order = { key, down: order.key === key ? !order.down : kind === "number" }; change(); } }, label))));
    const rows = rowsOf(runs), scores = rows.map((row) => row.score).filter((value) => value !== null);
    fill(body, inFolders(rows).map((row) => row.folder ? heading(row, columns(shown, "").length) : line(row, shown, scores.length > 1 && !answer.caution ? Math.max(...scores) : null)));
    if (!runs.length) fill(body, h("tr", {}, h("td", { colspan: columns(shown, "").length + 1, class: "empty" }, answer.runs.length ? "No run matches the filter." : nothing())));
    if (focused) body.querySelector(`[data-id="${focused}"]`)?.focus();
  }

  const nothing = () => withCode(answer.folder === null ? "No run is below `runs` here, and none of yours lives on this machine. `stretto run FILE` starts one; `stretto ui FOLDER` shows others."
    : "No run in this folder yet. `stretto quickstart` makes an example and runs it.");

  function heading({ folder, members }, width) {
    const ids = [...new Set(members.flatMap((row) => (row.members ?? [row]).map((run) => run.id)))];
    return h("tr", { class: "folder" },
      h("td", {}, h("input", { type: "checkbox", class: "asks", checked: ids.every((id) => chosen.has(id)), "aria-label": `Select all in ${folder}`, onchange: (event) => choose(ids, event.target.checked) })),
      h("td", { colspan: width, class: "name" }, printable(folder), h("span", { class: "muted" }, ` ${number(ids.length)} runs`)));
  }

  function line(row, keys, highest) {
    const ids = (row.members ?? [row]).map((run) => run.id), open = () => (row.members ? unfold(row.id) : (location.hash = `#/run/${row.id}/overview`));
    const mark = (label, sign, set) => h("button", { type: "button", class: "plain small", "aria-label": `${label} ${row.name}`, title: label, "aria-pressed": String(ids.every(set.has)), onclick: () => { for (const id of ids) set.turn(id); draw(); } }, sign);
    return h("tr", { class: `link ${ids.every((id) => chosen.has(id)) && !saved ? "chosen" : ""} ${opened.has(row.setting) && !row.members ? "member" : ""}`, tabindex: "0", "data-id": row.id,
      onclick: (event) => { if (!event.target.closest("input, a, button")) open(); },
      onkeydown: (event) => { if (event.key === "Enter" && event.target.tagName === "TR") open(); } },
      h("td", {}, h("input", { type: "checkbox", class: "asks", checked: ids.every((id) => chosen.has(id)), "aria-label": `Select ${row.name}`, onchange: (event) => choose(ids, event.target.checked) })),
      h("td", { class: "name clip", title: printable(row.path) }, 
        row.members ? [printable(row.name), h("button", { type: "button", class: "plain small", "aria-expanded": String(opened.has(row.id)), onclick: () => unfold(row.id) }, `${row.members.length} seeds ${opened.has(row.id) ? "▴" : "▾"}`)]
          : h("a", { href: `#/run/${row.id}/overview` }, printable(row.name)), ![".", row.name].includes(row.path) && h("span", { class: "muted" }, ` ${printable(row.path)}`)),
      h("td", { class: "state" }, h("span", { class: `pill ${row.state}` }, row.state)),
      h("td", { class: "said clip", title: printable(row.verdict) }, warning(row), printable(row.members ? row.verdict : said(row)) || "–"),
      h("td", { class: "number step" }, `${number(row.step)} / ${number(row.total)}`),
      h("td", { class: "number reward" }, figureText("reward", row.reward), spread("reward", row.reward_sd)), h("td", { class: "curve" }, spark(...(row.members ?? [row]).map((run) => run.curve))),
      h("td", { class: "number score", title: `${figure(row.measure).label}, best ${scoreText(row.best)}` }, row.score !== null && row.score === highest && h("span", { class: "pill highest", title: "The highest of the runs here" }, "highest"), ` ${scoreText(row.score)}`, spread(row.measure, row.score_sd)),
      keys.map((key) => h("td", { class: "value clip", title: printable(row.values[key] ?? "") }, printable(row.values[key] ?? "–"))),
      h("td", { class: "number" }, duration(row.wall_s)), h("td", { class: "number" }, ago(row.changed)),
      h("td", { class: "marks" }, mark("Pin", "★", pinned), mark("Hide", "✕", hidden)));
  }

  function unfold(id) {
    if (!opened.delete(id)) opened.add(id);
    draw();
  }

  draw();
  return {
    element, title: "Runs", path: [],
    live: () => answer.runs.some((run) => run.state === "running"),
    async update() { const before = JSON.stringify(answer); answer = await get("runs"); if (JSON.stringify(answer) !== before) draw(); },
    redraw() {},
    key(event) {
      const row = document.activeElement?.closest?.("tr.link");
      if (event.key === "c") go();
      else if (event.key === "x" && row) row.querySelector("input").click();
      else return false;
      return true;
    },
  };
}

/** The first clause of a run's verdict, without its state. */
const said = ({ verdict }) => verdict.split(";")[0].replace(/^[a-z ]+\d*, /, "");

const spread = (key, sd) => typeof sd === "number" && h("span", { class: "muted", title: "± the standard deviation between the seeds" }, ` ± ${figureText(key, sd)} sd`);

/** Open advice and failed tickets of a run, or of the worst of several. */
function warning({ advice, failed }) {
  const texts = [...advice.map((rule) => rule.replaceAll("_", " ")), failed >= 0.005 && `${Math.round(100 * failed)} % failed`].filter(Boolean);
  return texts.length > 0 && h("span", { class: "warn", title: printable(texts.join(", ")) }, failed >= 0.005 ? `▲ ${texts.at(-1)} ` : "▲ ");
}

/** One row for runs that differ only in their seed: means over them, and the standard deviation between them. */
function grouped(members) {
  const of = (key) => members.map((run) => run[key]).filter((value) => typeof value === "number");
  const [first] = members, states = new Set(members.map((run) => run.state)), joined = (texts, by) => [...new Set(texts)].join(by);
  return {
    ...first, members, id: first.setting, path: ".", values: Object.fromEntries(Object.keys(first.values).map((key) => [key, joined(members.map((run) => run.values[key]), " ")])),
    state: ["running", "failed", "stopped", "interrupted", "completed"].find((state) => states.has(state)), verdict: joined(members.map(said), " · "),
    advice: [...new Set(members.flatMap((run) => run.advice))], failed: Math.max(...of("failed")), step: Math.min(...of("step")),
    reward: mean(of("reward")), reward_sd: deviation(of("reward")), score: mean(of("score")), score_sd: deviation(of("score")),
    best: of("best").length ? Math.max(...of("best")) : null, wall_s: mean(of("wall_s")), changed: Math.max(...of("changed")),
  };
}

/** The folder of a run, or of several that differ only in their seed. */
const folderOf = (row) => (row.members ?? [row])[0].path.split("/").slice(0, -1).join("/");

/** What a column shows of a row: one of its values by a dotted key, or one of its figures. */
const valueOf = (row, key) => (key in row.values ? row.values[key] : row[key]);

function compared(one, other) {
  if (one === other) return 0;
  if (one === null || one === undefined) return -1;
  if (other === null || other === undefined) return 1;
  if (typeof one !== "string") return one - other;
  const numbers = [Number(one), Number(other)];
  return numbers.every(Number.isFinite) ? numbers[0] - numbers[1] : one.localeCompare(other);
}
