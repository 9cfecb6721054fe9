// Kept samples: groups or single samples with filters, a group side by side, conversations, and tokens coloured by a figure.
import { choice, debounce, duration, fill, h, number, printable } from "./dom.js";
import { get, imageAddress, saved } from "./api.js";
import { deviation, figureText, mean } from "./figures.js";
import { scatter } from "./scatter.js";

const PAGE = { groups: 50, list: 50 };
const RANGES = [["step", "trained at step"], ["reward", "reward"], ["length", "tokens with the prompt"], ["staleness", "staleness"]];
const OUTCOMES = ["trained", "filtered", "expired", "failed", "evaluated"];
const ORDERS = [["-sequence", "newest first"], ["sequence", "oldest first"], ["-reward", "highest reward"], ["reward", "lowest reward"], ["-length", "longest"], ["length", "shortest"], ["-staleness", "most stale"], ["-seconds", "slowest"]];
const MOST_TOKENS = 6000;

export async function samplesTab({ id, facts, query }) {
  const place = h("div");
  let view = null;

  async function show(parameters) {
    view?.destroy?.();
    view = parameters.get("group") ? await groupView(id, facts, parameters) : await listView(id, facts, parameters);
    fill(place, view.element);
  }

  await show(query);
  return {
    element: place,
    accepts(parameters) {
      show(parameters).catch((error) => fill(place, h("p", { class: "note bad", role: "alert" }, error.message)));
      return true;
    },
    async update(changed) { if (changed) await view.update?.(); },
    redraw() { view.redraw?.(); },
    key: (event) => view.key?.(event) ?? false,
    destroy() { view.destroy?.(); },
  };
}

const link = (id, parameters) => `#/run/${id}/samples?${new URLSearchParams(parameters)}`;
const groupLink = (id, row) => link(id, { ticket: row.ticket, purpose: row.purpose, group: 1, sample: row.id });

// ------------------------------------------------------------------------------------------------- list

async function listView(id, facts, query) {
  // The newest samples of a run are those of its last evaluation; a run that trains opens with its newest step.
  const newest = facts().step, trains = newest > 0 && facts().keys.includes("reward");
  const pages = Object.keys(saved ?? {}).filter((path) => path.startsWith(`runs/${id}/groups`)).map((path) => new URLSearchParams(path.split("?")[1]));
  if (!query.size && pages.length) [query] = pages;
  if (!query.size && trains) query = new URLSearchParams({ purpose: "train", step_from: newest, step_to: newest });
  let view = query.get("view") ?? "groups", offset = Number(query.get("offset") ?? 0), asked = null;
  const inputs = {};
  const input = (name, attributes) => (inputs[name] = h("input", { type: "number", step: "any", value: query.get(name) ?? "", "aria-label": attributes.label, ...attributes, id: `f-${name}`, oninput: soon }));
  const select = (name, options, first) => (inputs[name] = h("select", { id: `f-${name}`, onchange: apply, "aria-label": name }, first !== null && h("option", { value: "" }, first), options.map(([value, text]) => h("option", { value }, text))));
  const soon = debounce(apply, 400);
  const named = (kind) => facts().keys.filter((key) => key.startsWith(`${kind}/`) && key.endsWith("/groups")).map((key) => key.slice(kind.length + 1, -"/groups".length));
  const note = h("div"), count = h("span", { class: "muted", id: "count", role: "status" }), body = h("tbody");
  const before = h("button", { type: "button", class: "asks", onclick: () => move(-PAGE[view]) }, "← Previous"), after = h("button", { type: "button", class: "asks", id: "next", onclick: () => move(PAGE[view]) }, "Next →");
  const form = h("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); apply(); } },
    h("div", {}, h("span", { class: "label" }, "text"), inputs.text = h("input", { type: "search", id: "f-text", value: query.get("text") ?? "", placeholder: "in prompt or answer", "data-search": true, oninput: soon, "aria-label": "Text in prompt or answer" })),
    RANGES.map(([name, label]) => h("fieldset", {}, h("legend", {}, label), h("div", { class: "pair" }, input(`${name}_from`, { placeholder: "from", label: `${label} from` }), input(`${name}_to`, { placeholder: "to", label: `${label} to` })))),
    h("div", {}, h("span", { class: "label" }, "ticket"), input("ticket", { min: "0", step: "1", label: "Ticket" })),
    h("div", {}, h("span", { class: "label" }, "outcome"), select("outcome", OUTCOMES.map((each) => [each, each]), "any")),
    [["source", "part of the dataset", "dataset"], ["variant", "variant", "variant"]].map(([name, label, kind]) => { const parts = named(kind); return parts.length > 0 && h("div", {}, h("span", { class: "label" }, label), select(name, parts.map((each) => [each, each]), "any")); }),
    h("div", {}, h("span", { class: "label" }, "purpose"), select("purpose", [["train", "training"], ["eval", "evaluation"]], "any")),
    h("div", {}, h("span", { class: "label" }, "stop reason"), inputs.finish = h("input", { type: "text", id: "f-finish", value: query.get("finish") ?? "", placeholder: "stop, length, …", oninput: soon, "aria-label": "Stop reason" })),
    h("div", {}, h("span", { class: "label" }, "worker or engine"), inputs.worker = h("input", { type: "text", id: "f-worker", value: query.get("worker") ?? "", placeholder: "rollout-0", oninput: soon, "aria-label": "Worker or engine" })),
    h("div", {}, h("span", { class: "label" }, "order"), select("order", ORDERS, null)),
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => { location.hash = link(id, {}); } }, "Clear")));
  for (const name of ["outcome", "purpose", "order", "source", "variant"].filter((each) => inputs[each])) inputs[name].value = query.get(name) ?? (name === "order" ? "-sequence" : "");
  const at = h("input", { type: "range", id: "f-step", min: 1, max: newest, "aria-label": "Step", oninput: () => { inputs.step_from.value = inputs.step_to.value = at.value; inputs.purpose.value = "train"; apply(); } }), step = h("output", {}), right = h("span", { id: "right" });
  const head = h("thead"), others = Object.keys(inputs).filter((name) => !["step_from", "step_to", "purpose", "order"].includes(name) && query.get(name));
  const picture = h("div", { id: "scatter" }), chart = h("details", { class: "fold", open: localStorage.getItem("scatter") === "open", ontoggle: () => localStorage.setItem("scatter", chart.open ? "open" : "") }, h("summary", { onclick: () => { if (!chart.open) drawScatter(); } }, "Reward against length"), picture);
  const element = h("div", {},
    h("div", { class: "tools" }, h("span", { class: "asks" }, choice("Samples", [["groups", "groups"], ["list", "single samples"]], view, (value) => { view = value; apply(); })), trains && h("label", { class: "asks" }, "step", at, step),
      pages.length > 0 && choice("Samples of", pages.map((each, at) => [at, `${each.get("purpose") === "eval" ? "evaluation of version" : "step"} ${each.get("step_from") ?? "–"}`]), pages.findIndex((each) => each.get("purpose") === query.get("purpose")), (at) => { location.hash = link(id, pages[at]); }), right),
    h("details", { class: "fold asks", open: others.length > 0 }, h("summary", {}, "Filters and order"), form), chart, note,
    h("div", { class: "panel scroll" }, h("table", { id: "samples" }, head, body)),
    h("div", { class: "tools", style: { "margin-top": "12px" } }, before, after, count));

  const conditions = () => Object.fromEntries(Object.entries(inputs).map(([name, each]) => [name, each.value]).filter(([name, value]) => value && !(name === "order" && value === "-sequence")));
  const address = () => ({ purpose: "", ...conditions(), ...(view === "list" ? { view } : {}), ...(offset ? { offset } : {}) });
  function apply() { offset = 0; remember(); load(); }
  function move(by) { offset = Math.max(0, offset + by); remember(); load(); }
  function remember() { history.replaceState(null, "", link(id, address())); }

  async function load() {
    asked?.abort();
    const mine = (asked = new AbortController());
    fill(count, "searching …");
    try {
      const page = await get(`runs/${id}/${view === "list" ? "samples" : "groups"}`, { ...conditions(), order: inputs.order.value, limit: PAGE[view], offset }, mine.signal);
      fill(note);
      const one = inputs.step_from.value && inputs.step_from.value === inputs.step_to.value;
      at.value = one ? inputs.step_from.value : newest;
      inputs.order.parentElement.hidden = view === "groups";
      fill(step, one ? inputs.step_from.value : "any");
      draw(page);
      if (chart.open) await drawScatter();
    } catch (error) {
      if (error.name === "AbortError") return;
      fill(note, h("p", { class: "note bad", role: "alert" }, error.message));
      fill(count);
    }
  }

  async function drawScatter() {
    const answer = await get(`runs/${id}/points`, conditions(), asked.signal);
    fill(picture, scatter(answer, (sample) => groupLink(id, { id: sample, ticket: sample.match(/\d+/)[0], purpose: sample.startsWith("eval-") ? "eval" : "train" })));
  }

  const row = (each, cells) => h("tr", { class: "link", tabindex: "0", "data-id": each.id, onclick: () => { location.hash = groupLink(id, each); }, onkeydown: (event) => { if (event.key === "Enter") location.hash = groupLink(id, each); } }, cells);
  const outcome = (each) => h("td", {}, h("span", { class: `pill ${each.outcome}` }, each.outcome));
  const titles = (...names) => fill(head, h("tr", {}, names.map((each) => h("th", { class: /^(step|reward|tokens|stale|seconds)$/.test(each) ? "number" : "", scope: "col" }, each))));

  function draw({ rows, groups, more, total }) {
    const shown = rows ?? groups;
    before.disabled = offset === 0;
    after.disabled = !more;
    fill(count, shown.length ? `${number(offset + 1)} to ${number(offset + shown.length)}${total === undefined || total === null ? (more ? " of more" : "") : ` of ${number(total)}`}` : "");
    const rewards = groups && !more && !offset ? rewardsOf(groups.flatMap((group) => group.samples)) : "";
    fill(right, rewards && `${number(groups.length)} group${groups.length === 1 ? "" : "s"}: ${rewards}`);
    if (groups) drawGroups(groups); else drawSamples(rows);
    if (!shown.length) fill(body, h("tr", {}, h("td", { colspan: 10, class: "empty" }, Object.keys(conditions()).length ? "No sample fits these conditions." : "This run keeps no samples yet. The key `samples` of the run file says which ones it keeps.")));
  }

  function drawSamples(rows) {
    titles("sample", "outcome", "step", "reward", "tokens", "stale", "stop", "seconds", "prompt", "answer");
    fill(body, rows.map((each) => row(each, [h("td", {}, h("a", { href: groupLink(id, each) }, each.id)), outcome(each),
      h("td", { class: "number" }, number(each.step)), h("td", { class: "number" }, number(each.reward)), h("td", { class: "number" }, number(each.length)), h("td", { class: "number" }, number(each.staleness)),
      h("td", {}, printable(each.finish ?? "–")), h("td", { class: "number" }, number(each.seconds, 3)),
      h("td", { class: "clip mono" }, preview(each.prompt_text)), h("td", { class: "clip mono" }, each.reason ? h("span", { class: "muted" }, preview(each.reason)) : preview(each.text))])));
  }

  function drawGroups(groups) {
    titles("ticket", "outcome", "step", "rewards", "prompt", "expected", "answer with the highest reward");
    const all = groups.flatMap((group) => group.samples), scale = scaleOf(all), rightOrWrong = areRightOrWrong(all);
    fill(body, groups.map((group) => { const [best] = group.samples; return row({ ...group, id: best.id }, [h("td", {}, h("a", { href: groupLink(id, best) }, number(group.ticket))), outcome(group),
      h("td", { class: "number" }, number(group.step)), h("td", { class: "whole" }, dots(group.samples, scale), h("span", { class: "muted" }, ` ${rewardsOf(group.samples, rightOrWrong)}`)),
      h("td", { class: "clip mono" }, preview(group.prompt_text)), h("td", { class: "clip mono" }, preview(text(group.expected))), h("td", { class: "clip mono" }, preview(best.reason ?? best.text))]); }));
  }

  await load();
  return { element, update: () => (offset === 0 ? load() : null), destroy() { asked?.abort(); } };
}

const text = (value) => (value === null || typeof value === "string" ? value : JSON.stringify(value));

/** Rewards in words: how many answers are right if each is right or wrong, and otherwise their mean and standard deviation. */
function rewardsOf(rows, rightOrWrong = areRightOrWrong(rows)) {
  const rewards = rows.map((row) => row.reward).filter((reward) => typeof reward === "number");
  if (!rewards.length) return "";
  const right = rewards.filter((reward) => reward === 1).length;
  if (rightOrWrong) return `${right}/${rewards.length} right`;
  return `${figureText("reward", mean(rewards))} ± ${figureText("reward", deviation(rewards) ?? 0)}`;
}

const areRightOrWrong = (rows) => rows.every(({ reward }) => typeof reward !== "number" || reward === 0 || reward === 1);

/** Where a reward lies between the lowest and the highest of some samples, 0 and 1 included. */
function scaleOf(rows) {
  const rewards = [0, 1, ...rows.map((row) => row.reward ?? 0)], low = Math.min(...rewards), high = Math.max(...rewards);
  return (reward) => (reward - low) / (high - low);
}

const dots = (rows, scale) => rows.map((row) => h("span", { class: "dot", title: `${row.id}: ${row.reward === null ? printable(row.reason ?? "no reward") : `reward ${number(row.reward)}`}`, style: { background: row.reward === null ? "var(--line)" : `color-mix(in srgb, var(--good) ${(100 * scale(row.reward)).toFixed(0)}%, var(--bad))` } }));

const preview = (text) => printable(text ?? "–").replace(/\s*\n\s*/g, " ⏎ ");

// ------------------------------------------------------------------------------------------------ group

const FIGURES = {
  logprob: { label: "logprob", of: (row) => row.logprobs, ramp: surprise, ends: ["certain (p = 1)", "unlikely (p ≤ 0.01)"] },
  version: { label: "version", of: (row) => row.versions, ramp: age, ends: ["oldest", "newest"] },
  advantage: { label: "advantage", of: (row) => row.advantages, ramp: sign, ends: ["negative", "positive"] },
  mismatch: { label: "mismatch", of: (row) => row.importance_weights?.map((value) => (value === null ? null : Math.log(value))), ramp: gap, ends: ["less likely for the trainer (≤ −0.5)", "more likely (≥ 0.5)"] },
  mask: { label: "mask", of: (row) => row.loss_mask.map(Number), ramp: () => () => "rgb(40 120 220 / 0.3)", ends: ["given", "sampled, trained"] },
  weight: { label: "importance weight", of: (row) => row.importance_weights, ramp: weight, ends: ["≤ 0.5", "≥ 2"] },
};

async function groupView(id, facts, query) {
  const ticket = Number(query.get("ticket")), purpose = query.get("purpose") ?? "train";
  const rows = (await get(`runs/${id}/group`, { ticket, purpose })).sort((one, other) => (other.reward ?? -Infinity) - (one.reward ?? -Infinity));
  const neighbour = (step) => link(id, { ticket: ticket + step, purpose, group: 1 });
  const nav = h("div", { class: "tools" }, h("h2", {}, `Ticket ${number(ticket)}`), rows.length > 0 && [h("span", { class: `pill ${rows[0].outcome}` }, rows[0].outcome), h("span", { id: "rewards" }, dots(rows, scaleOf(rows)), ` ${rewardsOf(rows)}`), rows[0].step !== null && h("span", { class: "muted" }, `step ${number(rows[0].step)}`)],
    h("span", { class: "grow" }), h("a", { class: "button asks", href: neighbour(-1) }, "← Previous"), h("a", { class: "button asks", href: neighbour(1) }, "Next →"), h("a", { class: "button", href: link(id, {}) }, "List of samples"));
  const key = (event) => {
    if (event.key === "[" && ticket > 0) location.hash = neighbour(-1);
    else if (event.key === "]") location.hash = neighbour(1);
    else return false;
    return true;
  };
  if (!rows.length) return { element: h("div", {}, nav, h("p", { class: "empty" }, "No sample of this ticket is kept.")), key };

  const loaded = new Map(), abort = new AbortController(), talks = rows.some((row) => row.messages);
  let mode = localStorage.getItem("tokens") ?? (talks ? "conversation" : "text");
  if (mode === "conversation" && !talks) mode = "text";
  const legend = h("div", { class: "legend", id: "legend" }), detail = h("p", { class: "detail mono", id: "token", "aria-live": "polite" });
  const modes = [["text", "text"], ...(talks ? [["conversation", "conversation"]] : []), ...Object.entries(FIGURES).map(([name, { label }]) => [name, label])];
  const { common, own } = splitFacts(rows);
  const cards = rows.map((row, place) => {
    const content = h("div");
    return { row, content, element: h("article", { class: `panel ${row.id === query.get("sample") ? "here" : ""}`, "data-sample": row.id }, sampleHead(row, rows[0].outcome), content, own[place]) };
  });
  const element = h("div", {}, nav, common, context(id, rows[0], purpose),
    h("div", { class: "tools", style: { "margin-top": "14px" } }, choice("What to show", modes, mode, (value) => { mode = value; localStorage.setItem("tokens", value); draw(); }), legend), detail,
    h("div", { class: "group" }, cards.map((card) => card.element)));

  async function draw() {
    fill(detail);
    if (!(mode in FIGURES)) {
      fill(legend, mode === "text" && h("span", {}, "Pale: as in the first answer. ", h("span", { class: "wrong" }, "Red"), ": the first word that differs from the row's answer, after words that do not."));
      for (const { row, content } of cards) fill(content, mode === "conversation" && row.messages ? conversation(id, row, purpose) : plain(row, rows[0]));
      return;
    }
    const now = mode;
    try {
      if (!loaded.size) for (const row of await get(`runs/${id}/tokens`, { ticket, purpose }, abort.signal)) if (row.sampled) loaded.set(row.id, row);
    } catch (error) {
      if (error.name !== "AbortError") for (const { content } of cards) fill(content, h("p", { class: "note bad" }, error.message));
      return;
    }
    if (now !== mode) return;
    for (const { row, content } of cards) fill(content, row.sampled ? tokens(loaded.get(row.id), now) : plain(row, row));
    drawLegend(legend, mode, [...loaded.values()]);
  }

  element.addEventListener("pointerover", (event) => say(event.target));
  element.addEventListener("focusin", (event) => say(event.target));
  element.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!step || !event.target.matches(".tok")) return;
    event.preventDefault();
    const all = [...event.target.parentElement.querySelectorAll(".tok")], next = all[Math.min(all.length - 1, Math.max(0, all.indexOf(event.target) + step))];
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  function say(target) {
    if (!target.matches?.(".tok")) return;
    const row = loaded.get(target.closest("article").dataset.sample), at = Number(target.dataset.at);
    const piece = row.pieces?.[at];
    fill(detail, `token ${at} · id ${row.tokens[at]}${piece === undefined ? "" : ` · ${printable(JSON.stringify(piece))}`} · ${tokenFacts(row, at)}`);
  }

  await draw();
  cards.find(({ row }) => row.id === query.get("sample"))?.element.scrollIntoView?.({ block: "nearest", inline: "nearest" });
  return { element, key, redraw: draw, destroy() { abort.abort(); } };
}

function tokenFacts(row, at) {
  if (!row.loss_mask[at]) return "not sampled by the policy, not trained";
  const facts = [`logprob ${number(row.logprobs?.[at])} (p = ${number(row.logprobs ? Math.exp(row.logprobs[at]) : null, 3)})`, `version ${number(row.versions?.[at])}`];
  facts.push(row.advantages ? `advantage ${number(row.advantages[at])}` : "not trained");
  if (row.importance_weights) facts.push(`importance weight ${number(row.importance_weights[at])}, trainer's logprob less the engine's ${number(Math.log(row.importance_weights[at]))}`);
  return facts.join(" · ");
}

function images(id, row, purpose) {
  const names = [row.dataset_row?.images, row.dataset_row?.image].flat().filter((name) => name);
  return names.map((path, number) => {
    if (typeof path !== "string") return null;
    return picture(id, { ticket: row.ticket, purpose, number }, printable(path));
  });
}

function picture(id, wanted, name) {
  const image = h("img", { src: imageAddress(`runs/${id}/image`, wanted), alt: name, title: name, onerror: () => image.replaceWith(h("p", { class: "muted" }, `${name} cannot be read here.`)) });
  return image;
}

function context(id, row, purpose) {
  const columns = Object.entries(row.dataset_row ?? {}).filter(([key, value]) => !(key === "prompt" && row.prompt_text?.includes(value)));
  const expected = columns.map(([key, value]) => [h("dt", {}, printable(key)), h("dd", { class: "mono" }, printable(typeof value === "string" ? value : JSON.stringify(value)))]);
  return h("div", { class: "grid" },
    h("section", { class: "panel w8" }, h("h2", {}, "Prompt"), h("div", { class: "images" }, images(id, row, purpose)), h("div", { class: "text tall", id: "prompt" }, printable(row.prompt_text ?? "not kept"))),
    h("section", { class: "panel w4" }, h("h2", {}, `Row ${number(row.row)} of the ${purpose === "eval" ? "held-out rows" : "dataset"}`), row.dataset_row ? h("dl", { class: "facts", id: "row" }, expected) : h("p", { class: "muted" }, "The row was not kept.")));
}

function sampleHead(row, common) {
  return [h("h2", { class: "sample" }, row.reward === null ? row.id : `reward ${number(row.reward)}`, row.outcome !== common && h("span", { class: `pill ${row.outcome}` }, row.outcome), h("span", { class: "grow" }), h("span", { class: "muted" }, row.id)),
    row.reason && h("p", { class: "note bad" }, printable(row.reason))];
}

function factsOf(row) {
  const time = (seconds) => (seconds === null ? null : duration(seconds));
  const facts = [["tokens", row.length ? `${number(row.sampled)} sampled, ${number(row.length - row.sampled)} given` : null], ["stop", row.finish], ["staleness", row.staleness], ["versions", row.oldest === row.newest ? row.oldest : `${row.oldest} to ${row.newest}`], ["step", row.step],
    ...["source", "variant"].filter((each) => row[each]).map((each) => [each, row[each]]), ["worker", row.worker], ["engine", row.engine], ["took", time(row.seconds)], ["generation", time(row.generate_s)], ["scoring", time(row.score_s)], ...Object.entries(row.metrics ?? {}).map(([name, value]) => [name, number(value)])];
  return new Map(facts.filter(([, value]) => value !== null && value !== undefined && value !== ""));
}

/** The facts of samples: those that all have in common, and for each the others. */
function splitFacts(rows) {
  const [first, ...others] = rows.map(factsOf), line = (facts) => h("div", { class: "facts-line" }, facts.map(([label, value]) => h("span", {}, `${printable(label)} `, h("b", { "data-fact": label }, printable(value)))));
  const isCommon = ([label, value]) => others.every((facts) => facts.get(label) === value);
  return { common: line([...first].filter(isCommon)), own: [first, ...others].map((facts) => line([...facts].filter(([label]) => !first.has(label) || !isCommon([label, first.get(label)])))) };
}

/** An answer as text. What it has in common with the best one of its group, from the beginning, is faint. */
function plain(row, best) {
  const answer = row.text ?? "not kept", same = row === best ? 0 : sharedWords(answer, best.text ?? "");
  const [from, to] = wrongWord(row), cuts = [...new Set([0, same, from, to, answer.length])].sort((one, other) => one - other);
  const kind = (at) => (at >= from && at < to ? { class: "wrong", title: "The first word that differs from the row's answer" } : { class: at < same ? "faint" : "" });
  return h("div", { class: "text tall", "data-part": "answer" }, cuts.slice(0, -1).map((at, place) => h("span", kind(at), printable(answer.slice(at, cuts[place + 1])))));
}

/** Where the first word of an answer stands that differs from the row's answer: from, to. Equal if nothing is the same up to it. */
function wrongWord({ text, reward, dataset_row }) {
  const expected = dataset_row?.answer, none = [0, 0];
  if (typeof text !== "string" || typeof expected !== "string" || reward === 1) return none;
  const agrees = shared(text, expected), rest = text.slice(agrees);
  if (!rest.trim()) return none;
  const from = agrees === expected.length && /^\s/.test(rest) ? agrees : text.slice(0, agrees).search(/\S*$/);
  const words = (each) => each.trim().split(/\s+/).length; // an answer of another form is wrong as a whole
  return from > 0 || (agrees > 0 && words(text) === words(expected)) ? [from, from + text.slice(from).match(/^\s*\S*/)[0].length] : none;
}

function sharedWords(one, other) {
  const same = shared(one, other), ends = (text) => same === text.length || /\s/.test(text[same]);
  return ends(one) && ends(other) ? same : one.slice(0, same).search(/\S*$/);
}

/** The number of characters at the beginning that two texts have in common. */
function shared(one, other) {
  let same = 0;
  while (same < one.length && one[same] === other[same]) same += 1;
  return same;
}

function conversation(id, row, purpose) {
  const parts = (value) => (Array.isArray(value) ? value.map((part, at) => (isImage(part) ? h("div", { class: "images" }, picture(id, { ticket: row.ticket, purpose, sha256: part.sha256 }, `image ${part.sha256.slice(0, 8)}…`)) : `${at && !isImage(value[at - 1]) ? "\n" : ""}${printable(content([part]))}`)) : printable(content(value)));
  return h("div", {}, row.messages.map((message) => h("div", { class: `turn ${/^(assistant|user|tool|system)$/.test(message.role) ? message.role : ""}` },
    h("div", { class: "who" }, printable(message.role), message.name && ` ${printable(message.name)}`),
    /^(tool|system)$/.test(message.role) && typeof message.content === "string" ? folded(message.content) : h("div", { class: "text" }, parts(message.content)),
    (Array.isArray(message.tool_calls) ? message.tool_calls : []).map((call) => folded(`${call.function?.name ?? call.name ?? "call"}(${shown(call.function?.arguments ?? call.arguments ?? "")})`, "call")))));
}

/** A text as one line, which opens if it has more. */
function folded(text, kind = "") {
  const [line] = text.split("\n", 1);
  if (line === text && line.length < 40) return h("div", { class: `text ${kind}` }, printable(text));
  return h("details", { class: kind }, h("summary", { class: "text" }, printable(line)), h("div", { class: "text" }, printable(text)));
}

const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const isImage = (part) => part?.type === "image" && /^[0-9a-f]{64}$/.test(part.sha256);
const content = (value) => (Array.isArray(value) ? value.map((part) => part?.text ?? `[${part?.type ?? "part"}]`).join("\n") : typeof value === "string" ? value : value === null || value === undefined ? "" : JSON.stringify(value));

function tokens(row, mode, all = false) {
  const figures = FIGURES[mode].of(row), ramp = FIGURES[mode].ramp(row), most = all ? Infinity : MOST_TOKENS;
  const spans = row.tokens.slice(0, most).map((token, at) => {
    const piece = row.pieces ? row.pieces[at] : `${token} `, value = row.loss_mask[at] ? figures?.[at] : null;
    const text = printable(piece).replaceAll("\n", "⏎\n");
    const known = value !== null && value !== undefined;
    return h("span", { class: `tok${row.loss_mask[at] ? "" : " off"}${text ? "" : " cut"}`, "data-at": at, tabindex: at ? "-1" : "0", style: known ? { "background-color": ramp(value) } : {} }, text);
  });
  const box = h("div", { class: "text tall", "data-part": "tokens" }, spans);
  const notes = [];
  if (!row.pieces) notes.push("This machine does not have the model's tokenizer, so these are token ids.");
  if (!figures) notes.push(row.step === null ? "Not trained: the trainer has computed nothing for it." : "Not kept for this sample.");
  if (row.tokens.length > most) notes.push(h("button", { type: "button", class: "small", onclick: () => box.parentElement.replaceChildren(tokens(row, mode, true)) }, `show all ${number(row.tokens.length)} tokens`));
  return h("div", {}, notes.map((each) => h("p", { class: "muted" }, each)), box);
}

function drawLegend(element, mode, rows) {
  const { label, ends, of, ramp } = FIGURES[mode];
  const values = rows.flatMap((row) => (of(row) ?? []).filter((value, at) => value !== null && row.loss_mask[at]));
  const low = values.reduce((one, other) => Math.min(one, other), Infinity), high = values.reduce((one, other) => Math.max(one, other), -Infinity);
  const colours = { logprob: [0, -0.5, -1.5, -3, -4.6], version: [0, 0.5, 1], advantage: [-2, 0, 2], mismatch: [-0.5, -0.1, 0, 0.1, 0.5], mask: [1, 1], weight: [0.5, 1, 2] }[mode];
  const paint = mode === "version" ? (share) => `rgb(40 110 220 / ${0.1 + 0.5 * share})` : ramp(rows[0] ?? { versions: [] });
  fill(element, h("span", {}, label), h("span", { class: "faint" }, ends[0]), h("span", { class: "ramp", style: { background: `linear-gradient(90deg, ${colours.map(paint).join(", ")})` } }), h("span", { class: "faint" }, ends[1]),
    values.length > 0 && h("span", { class: "faint" }, `here ${number(low)} to ${number(high)}`));
}

// Colours of figures. They are the same for all samples of a group, and readable in both themes.
const part = (share) => Math.min(1, Math.max(0, share));
function surprise() { return (logprob) => `rgb(230 110 20 / ${(0.75 * part(-logprob / 4.6) ** 0.7).toFixed(3)})`; }
function age(row) {
  const known = row.versions.filter((version, at) => row.loss_mask[at]), low = Math.min(...known), high = Math.max(...known);
  return (version) => `rgb(40 110 220 / ${(0.1 + 0.5 * (high > low ? (version - low) / (high - low) : 1)).toFixed(3)})`;
}
function sign() { return (advantage) => signedColour(advantage, Math.abs(advantage) / 2); }
function gap() { return (difference) => signedColour(difference, Math.sqrt(2 * Math.abs(difference))); }
const signedColour = (value, size) => `rgb(${value < 0 ? "220 100 20" : "40 120 220"} / ${(0.65 * part(size)).toFixed(3)})`;
function weight() { return (value) => { const size = Math.log2(Math.max(value, 1e-6)); return `rgb(${size < 0 ? "130 80 200" : "220 100 20"} / ${(0.65 * part(Math.abs(size))).toFixed(3)})`; }; }
