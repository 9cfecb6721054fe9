// Kept samples: a list with filters, a group side by side, conversations, and tokens coloured by a figure.
import { choice, debounce, duration, fill, h, number, printable } from "./dom.js";
import { get } from "./api.js";

const PAGE = 50;
const RANGES = [["step", "trained at step"], ["reward", "reward"], ["length", "tokens with the prompt"], ["staleness", "staleness"]];
const OUTCOMES = ["trained", "filtered", "expired", "failed", "evaluated", "pending"];
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
  // The newest samples of a run are those of its last evaluation; a run that samples opens with its training.
  if (!query.size && facts().keys.includes("reward")) query = new URLSearchParams({ purpose: "train" });
  let offset = Number(query.get("offset") ?? 0), asked = null;
  const inputs = {};
  const input = (name, attributes) => (inputs[name] = h("input", { type: "number", step: "any", value: query.get(name) ?? "", "aria-label": attributes.label, ...attributes, id: `f-${name}`, oninput: soon }));
  const select = (name, options, first) => (inputs[name] = h("select", { id: `f-${name}`, onchange: apply, "aria-label": name }, first !== null && h("option", { value: "" }, first), options.map(([value, text]) => h("option", { value }, text))));
  const soon = debounce(apply, 400);
  const note = h("div"), count = h("span", { class: "muted", id: "count", role: "status" }), body = h("tbody");
  const before = h("button", { type: "button", onclick: () => move(-PAGE) }, "← Previous"), after = h("button", { type: "button", id: "next", onclick: () => move(PAGE) }, "Next →");
  const form = h("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); apply(); } },
    h("div", {}, h("span", { class: "label" }, "text"), inputs.text = h("input", { type: "search", id: "f-text", value: query.get("text") ?? "", placeholder: "in prompt or answer", "data-search": true, oninput: soon, "aria-label": "Text in prompt or answer" })),
    RANGES.map(([name, label]) => h("fieldset", {}, h("legend", {}, label), h("div", { class: "pair" }, input(`${name}_from`, { placeholder: "from", label: `${label} from` }), input(`${name}_to`, { placeholder: "to", label: `${label} to` })))),
    h("div", {}, h("span", { class: "label" }, "ticket"), input("ticket", { min: "0", step: "1", label: "Ticket" })),
    h("div", {}, h("span", { class: "label" }, "outcome"), select("outcome", OUTCOMES.map((each) => [each, each]), "any")),
    h("div", {}, h("span", { class: "label" }, "purpose"), select("purpose", [["train", "training"], ["eval", "evaluation"]], "any")),
    h("div", {}, h("span", { class: "label" }, "stop reason"), inputs.finish = h("input", { type: "text", id: "f-finish", value: query.get("finish") ?? "", placeholder: "stop, length, …", oninput: soon, "aria-label": "Stop reason" })),
    h("div", {}, h("span", { class: "label" }, "worker or engine"), inputs.worker = h("input", { type: "text", id: "f-worker", value: query.get("worker") ?? "", placeholder: "rollout-0", oninput: soon, "aria-label": "Worker or engine" })),
    h("div", {}, h("span", { class: "label" }, "order"), select("order", ORDERS, null)),
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => { location.hash = link(id, {}); } }, "Clear")));
  for (const name of ["outcome", "purpose", "order"]) inputs[name].value = query.get(name) ?? (name === "order" ? "-sequence" : "");
  const element = h("div", {}, h("details", { class: "fold", open: innerWidth > 600 }, h("summary", {}, "Filters and order"), form), note,
    h("div", { class: "panel scroll" }, h("table", { id: "samples" }, h("thead", {}, h("tr", {}, ["sample", "outcome", "step", "reward", "tokens", "stale", "stop", "seconds", "prompt", "answer"].map((each, index) => h("th", { class: index > 1 && index < 8 && each !== "stop" ? "number" : "", scope: "col" }, each)))), body)),
    h("div", { class: "tools", style: { "margin-top": "12px" } }, before, after, count));

  const conditions = () => Object.fromEntries(Object.entries(inputs).map(([name, each]) => [name, each.value]).filter(([name, value]) => value && !(name === "order" && value === "-sequence")));
  const address = () => ({ purpose: "", ...conditions(), ...(offset ? { offset } : {}) });
  function apply() { offset = 0; remember(); load(); }
  function move(by) { offset = Math.max(0, offset + by); remember(); load(); }
  function remember() { history.replaceState(null, "", link(id, address())); }

  async function load() {
    asked?.abort();
    const mine = (asked = new AbortController());
    fill(count, "searching …");
    try {
      const page = await get(`runs/${id}/samples`, { ...conditions(), order: inputs.order.value, limit: PAGE, offset }, mine.signal);
      fill(note);
      draw(page);
    } catch (error) {
      if (error.name === "AbortError") return;
      fill(note, h("p", { class: "note bad", role: "alert" }, error.message));
      fill(count);
    }
  }

  function draw({ rows, more, total }) {
    before.disabled = offset === 0;
    after.disabled = !more;
    fill(count, rows.length ? `${number(offset + 1)} to ${number(offset + rows.length)}${total === null ? (more ? " of more" : "") : ` of ${number(total)}`}` : "");
    fill(body, rows.map((row) => h("tr", { class: "link", tabindex: "0", "data-id": row.id, onclick: () => { location.hash = groupLink(id, row); }, onkeydown: (event) => { if (event.key === "Enter") location.hash = groupLink(id, row); } },
      h("td", {}, h("a", { href: groupLink(id, row) }, row.id)), h("td", {}, h("span", { class: `pill ${row.outcome}` }, row.outcome)),
      h("td", { class: "number" }, number(row.step)), h("td", { class: "number" }, number(row.reward)), h("td", { class: "number" }, number(row.length)), h("td", { class: "number" }, number(row.staleness)),
      h("td", {}, printable(row.finish ?? "–")), h("td", { class: "number" }, number(row.seconds, 3)),
      h("td", { class: "clip mono" }, preview(row.prompt_text)), h("td", { class: "clip mono" }, row.reason ? h("span", { class: "muted" }, preview(row.reason)) : preview(row.text)))));
    if (!rows.length) fill(body, h("tr", {}, h("td", { colspan: 10, class: "empty" }, Object.keys(conditions()).length ? "No sample fits these conditions." : "This run keeps no samples yet. The key `samples` of the run file says which ones it keeps.")));
  }

  await load();
  return { element, update: () => (offset === 0 ? load() : null), destroy() { asked?.abort(); } };
}

const preview = (text) => printable(text ?? "–").replace(/\s*\n\s*/g, " ⏎ ");

// ------------------------------------------------------------------------------------------------ group

const FIGURES = {
  logprob: { label: "logprob", of: (row) => row.logprobs, ramp: surprise, ends: ["certain (p = 1)", "unlikely (p ≤ 0.01)"] },
  version: { label: "version", of: (row) => row.versions, ramp: age, ends: ["oldest", "newest"] },
  advantage: { label: "advantage", of: (row) => row.advantages, ramp: sign, ends: ["negative", "positive"] },
  weight: { label: "importance weight", of: (row) => row.importance_weights, ramp: weight, ends: ["≤ 0.5", "≥ 2"] },
};

async function groupView(id, facts, query) {
  const ticket = Number(query.get("ticket")), purpose = query.get("purpose") ?? "train";
  const rows = await get(`runs/${id}/group`, { ticket, purpose });
  const neighbour = (step) => link(id, { ticket: ticket + step, purpose, group: 1 });
  const nav = h("div", { class: "tools" }, h("h2", {}, `Ticket ${number(ticket)}`), rows.length > 0 && h("span", { class: `pill ${rows[0].outcome}` }, rows[0].outcome),
    h("span", { class: "grow" }), h("a", { class: "button", href: neighbour(-1) }, "← Previous"), h("a", { class: "button", href: neighbour(1) }, "Next →"), h("a", { class: "button", href: link(id, {}) }, "List of samples"));
  const key = (event) => {
    if (event.key === "[" && ticket > 0) location.hash = neighbour(-1);
    else if (event.key === "]") location.hash = neighbour(1);
    else return false;
    return true;
  };
  if (!rows.length) return { element: h("div", {}, nav, h("p", { class: "empty" }, "No sample of this ticket is kept.")), key };

  const loaded = new Map(), abort = new AbortController(), talks = rows.some((row) => row.messages);
  let mode = localStorage.getItem("tokens") ?? "text";
  if (mode === "conversation" && !talks) mode = "text";
  const legend = h("div", { class: "legend", id: "legend" }), detail = h("p", { class: "detail mono", id: "token", "aria-live": "polite" });
  const modes = [["text", "text"], ...(talks ? [["conversation", "conversation"]] : []), ...Object.entries(FIGURES).map(([name, { label }]) => [name, label])];
  const cards = rows.map((row) => {
    const content = h("div");
    return { row, content, element: h("article", { class: `panel ${row.id === query.get("sample") ? "here" : ""}`, "data-sample": row.id }, sampleHead(row), content) };
  });
  const element = h("div", {}, nav, context(id, rows[0], purpose),
    h("div", { class: "tools", style: { "margin-top": "14px" } }, choice("What to show", modes, mode, (value) => { mode = value; localStorage.setItem("tokens", value); draw(); }), legend), detail,
    h("div", { class: "group" }, cards.map((card) => card.element)));

  async function draw() {
    fill(detail);
    if (!(mode in FIGURES)) {
      fill(legend);
      for (const { row, content } of cards) fill(content, mode === "conversation" && row.messages ? conversation(id, row, purpose) : plain(row));
      return;
    }
    const now = mode;
    for (const { row, content } of cards) {
      if (!row.sampled) { fill(content, plain(row)); continue; }
      try {
        if (!loaded.has(row.id)) loaded.set(row.id, await get(`runs/${id}/tokens`, { sample: row.id, ticket, purpose }, abort.signal));
      } catch (error) {
        if (error.name !== "AbortError") fill(content, h("p", { class: "note bad" }, error.message));
        continue;
      }
      if (now !== mode) return;
      fill(content, tokens(loaded.get(row.id), now));
    }
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
  if (row.importance_weights) facts.push(`importance weight ${number(row.importance_weights[at])}`);
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
  const image = h("img", { src: `/api/runs/${id}/image?${new URLSearchParams(wanted)}`, alt: name, title: name, onerror: () => image.replaceWith(h("p", { class: "muted" }, `${name} cannot be read here.`)) });
  return image;
}

function context(id, row, purpose) {
  const columns = Object.entries(row.dataset_row ?? {}).filter(([key, value]) => !(key === "prompt" && row.prompt_text?.includes(value)));
  const expected = columns.map(([key, value]) => [h("dt", {}, printable(key)), h("dd", { class: "mono" }, printable(typeof value === "string" ? value : JSON.stringify(value)))]);
  return h("div", { class: "grid" },
    h("section", { class: "panel w8" }, h("h2", {}, "Prompt"), h("div", { class: "images" }, images(id, row, purpose)), h("div", { class: "text tall", id: "prompt" }, printable(row.prompt_text ?? "not kept"))),
    h("section", { class: "panel w4" }, h("h2", {}, `Row ${number(row.row)} of the ${purpose === "eval" ? "held-out rows" : "dataset"}`), row.dataset_row ? h("dl", { class: "facts", id: "row" }, expected) : h("p", { class: "muted" }, "The row was not kept.")));
}

function sampleHead(row) {
  const parts = Object.entries(row.metrics ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const facts = [["tokens", row.length ? `${number(row.sampled)} of ${number(row.length)} sampled` : null], ["stop", row.finish], ["staleness", row.staleness], ["versions", row.oldest === row.newest ? row.oldest : `${row.oldest} to ${row.newest}`], ["step", row.step],
    ["worker", row.worker], ["engine", row.engine], ["took", row.seconds === null ? null : duration(row.seconds)], ["generation", row.generate_s === null ? null : duration(row.generate_s)], ["scoring", row.score_s === null ? null : duration(row.score_s)]];
  return [h("h2", { class: "sample" }, row.id, h("span", { class: `pill ${row.outcome}` }, row.outcome), h("span", { class: "grow" }), row.reward !== null && `reward ${number(row.reward)}`),
    h("div", { class: "facts-line" }, facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([label, value]) => h("span", {}, `${label} `, h("b", { "data-fact": label }, printable(value)))), parts && h("span", {}, printable(parts))),
    row.reason && h("p", { class: "note bad" }, printable(row.reason))];
}

const plain = (row) => h("div", { class: "text tall", "data-part": "answer" }, printable(row.text ?? "not kept"));

function conversation(id, row, purpose) {
  const parts = (value) => (Array.isArray(value) ? value.map((part, at) => (isImage(part) ? h("div", { class: "images" }, picture(id, { ticket: row.ticket, purpose, sha256: part.sha256 }, `image ${part.sha256.slice(0, 8)}…`)) : `${at && !isImage(value[at - 1]) ? "\n" : ""}${printable(content([part]))}`)) : printable(content(value)));
  return h("div", {}, row.messages.map((message) => h("div", { class: `turn ${/^(assistant|user|tool|system)$/.test(message.role) ? message.role : ""}` },
    h("div", { class: "who" }, printable(message.role), message.name && ` ${printable(message.name)}`),
    h("div", { class: "text" }, parts(message.content)),
    (Array.isArray(message.tool_calls) ? message.tool_calls : []).map((call) => h("div", { class: "call text" }, printable(`${call.function?.name ?? call.name ?? "call"}(${shown(call.function?.arguments ?? call.arguments ?? "")})`))))));
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
  const colours = { logprob: [0, -0.5, -1.5, -3, -4.6], version: [0, 0.5, 1], advantage: [-2, 0, 2], weight: [0.5, 1, 2] }[mode];
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
function sign() { return (advantage) => `rgb(${advantage < 0 ? "220 100 20" : "40 120 220"} / ${(0.65 * part(Math.abs(advantage) / 2)).toFixed(3)})`; }
function weight() { return (value) => { const size = Math.log2(Math.max(value, 1e-6)); return `rgb(${size < 0 ? "130 80 200" : "220 100 20"} / ${(0.65 * part(Math.abs(size))).toFixed(3)})`; }; }
