// The first view of a run: figures, curves, ledger, workers, staleness, advice.
import { ago, duration, fill, h, number, printable, withCode } from "./dom.js";
import { get, saved } from "./api.js";
import { Board } from "./charts.js";
import { figure, figureText, hueOf, timeBar, timeLegend, tooltip } from "./figures.js";

/** From this many steps on, the curves of this view are smoothed. */
const MANY_STEPS = 150;
/** Lines of the log of a run that has failed. */
const TAIL = 20;
const ACCOUNTS = [["trained", "trained"], ["in_flight", "in flight"], ["filtered", "filtered"], ["expired", "expired"], ["failed", "failed"]];

export async function overviewTab({ id, name, facts }) {
  const smoothing = facts().step > MANY_STEPS && !saved ? 0.9 : 0;
  const board = new Board([{ ids: [id], name }], { smoothing, marks: () => adviceMarks(facts()) });
  const verdict = h("p", { class: "verdict", id: "verdict" }), tiles = h("div", { class: "tiles", id: "tiles" }), advice = h("div", { class: "advice" }), notes = h("div");
  const ledger = h("section", { class: "panel w6", id: "ledger" }), staleness = h("section", { class: "panel w6", id: "staleness" });
  const share = h("section", { class: "panel", id: "share" }), time = h("section", { class: "panel w12 scroll", id: "time", tabindex: "0" });
  const workers = h("section", { class: "panel w6 scroll", id: "workers" }), engines = h("section", { class: "panel w6", id: "speed" });
  const keys = facts().keys, has = (key) => keys.includes(key);
  const charts = [
    ["reward"], [facts().held_out], ["loss", ...(has("held_out/loss") ? ["held_out/loss"] : [])], ["entropy"], ["grad_norm"], ["staleness", "staleness_max"], ["slots_used", "kv_used", "verifiers_used", "cores_idle", "memory_used"],
  ].filter(([key]) => (key === facts().held_out ? facts().evaluations.length : has(key)));
  const element = h("div", {}, verdict, notes, tiles, h("p", { class: "faint" }, `Means of the newest 10 steps.${facts().evaluations.length ? ` ${figure(facts().held_out).title}: of the newest evaluation, on rows that are not trained.` : ""}`), share, advice,
    h("div", { class: "charts", style: { margin: "12px 0" } }, charts.map((wanted) => board.add(wanted))),
    smoothing > 0 && h("p", { class: "faint" }, `The lines are smoothed (${smoothing}); the faint lines behind them are not.`),
    h("div", { class: "grid" }, time, ledger, staleness, workers, engines));

  let tail = [];
  async function draw(changed = true) {
    const now = facts();
    if (changed) tail = await tailOf(id, now);
    drawNotes(notes, id, now, tail);
    drawVerdict(verdict, now);
    drawTiles(tiles, now);
    drawAdvice(advice, id, now);
    drawLedger(ledger, now);
    drawWorkers(workers, now);
    drawSpeed(engines, now);
    if (changed) drawTime(share, time, await get(`runs/${id}/time`));
    drawStaleness(staleness, await get(`runs/${id}/staleness`));
  }

  await draw();
  return {
    element,
    async update(changed) { if (changed) board.refresh(); await draw(changed); },
    redraw() { board.redraw(); },
    destroy() { board.destroy(); },
  };
}

/** The newest warnings and errors of the kernel of a run that has failed; without any, its newest lines. */
async function tailOf(id, { state }) {
  if (!["stopped", "failed"].includes(state)) return [];
  const worst = await get(`runs/${id}/logs`, { problems: 1 });
  if (worst.name !== "kernel") return [];
  return (worst.lines.length ? worst : await get(`runs/${id}/logs`)).lines.slice(-TAIL);
}

function drawNotes(element, id, { summary, status, standstill, state, fault, resume }, tail) {
  const notes = fault ? [["bad", fault]] : [];
  if (summary?.reason) notes.push(["bad", summary.reason]);
  if (state === "stopped") notes.push(["bad", "No kernel owns this run, and it has not ended."]);
  if (state === "running" && status && !status.connected) notes.push(["bad", "The kernel has no connection to nats-server."]);
  if (standstill) notes.push(["bad", standstill]);
  for (const problem of summary?.problems ?? []) notes.push(["", problem]);
  fill(element, notes.map(([kind, text]) => h("p", { class: `note ${kind}` }, printable(text))),
    tail.length > 0 && h("div", { class: "note bad" }, h("div", { class: "text log tail", id: "tail", tabindex: "0", role: "log", "aria-label": "Newest lines of the kernel's log" }, h("div", {}, tail.map((line) => h("div", {}, printable(line)))))),
    resume && h("p", { class: "note" }, state === "failed" ? "When the cause is mended, this continues the run: " : "This continues the run: ", h("code", { class: "whole", id: "go-on", title: "A click selects the command" }, printable(resume)), ". ", h("a", { href: `#/run/${id}/logs?problems=1` }, "Warnings and errors of its kernel"), state === "failed" && summary?.members?.missing > 0 && [", ", h("a", { href: `#/run/${id}/samples?outcome=failed&view=list` }, "samples that failed")], "."));
}

/** The first clause says whether the run learns; what goes with it follows. */
function drawVerdict(element, { verdict }) {
  const [, head, rest] = /^([^;]*)([^]*)$/.exec(verdict);
  fill(element, [h("strong", {}, printable(head)), printable(rest)]);
  element.hidden = !verdict;
}

function drawTiles(element, { last, recent, change, evaluations, held_out, status, state, keys }) {
  const scored = evaluations.filter((each) => typeof each[held_out] === "number"), newest = scored.at(-1);
  const best = scored.reduce((one, other) => (one && one[held_out] >= other[held_out] ? one : other), null);
  const sub = (key) => (recent[key] === null ? "" : `${figure(key).label} ${figureText(key, recent[key])}`);
  const tiles = [
    ["reward", recent.reward, change === null ? "" : `first 10 steps: ${figureText("reward", recent.reward - change)}`],
    [held_out, newest?.[held_out] ?? null, newest ? `version ${newest.step}; ${best[held_out] === newest[held_out] ? "the best so far" : `best ${figureText(held_out, best[held_out])} at version ${best.step}`}` : ""],
    ["zero_variance_groups", recent.zero_variance_groups, ""],
    ["loss", keys.includes("reward") ? null : recent.loss, ""],
    ["entropy", recent.entropy, sub("behaviour_kl")],
    ["staleness", recent.staleness, last.staleness_limit === undefined ? "" : `limit ${figureText("staleness_limit", last.staleness_limit)}`],
    ["length", recent.length, sub("truncated")],
    ["step_s", recent.step_s, sub("train_s")],
    ["step_tokens_per_s", recent.step_tokens_per_s, sub("train_tokens_per_s")],
  ];
  fill(element, tiles.filter(([, value]) => value !== null).map(([key, value, below]) => h("div", { class: "tile", "data-tile": key, title: tooltip(key) }, h("div", { class: "label" }, figure(key).name), h("div", { class: "value" }, figureText(key, value)), h("div", { class: "sub" }, below))));
  if (state !== "running" || !status) return;
  const { evaluating, now, generate_tokens_per_s } = status;
  const lines = [now, evaluating && `evaluating version ${evaluating.version}: ${number(evaluating.rows)} of ${number(evaluating.of)} rows`, generate_tokens_per_s ? `generating ${number(Math.round(generate_tokens_per_s))} tokens/s` : ""];
  element.append(h("div", { class: "tile wide", "data-tile": "Now" }, h("div", { class: "label" }, "Now"), lines.filter(Boolean).map((line) => h("div", { class: "sub" }, printable(line)))));
}

const adviceOf = ({ summary, status }) => summary?.advice ?? status?.advice ?? [];

/** The steps from which on advice says that something goes wrong, for curves. */
export const adviceMarks = (facts) => adviceOf(facts).map(({ since, rule }) => ({ at: since, text: rule.replaceAll("_", " ") }));

/** Advice, with links to the keys that it names and to the samples of the step from which on it holds. */
function drawAdvice(element, id, facts) {
  const advice = adviceOf(facts), samples = (step) => h("a", { href: `#/run/${id}/samples?purpose=train&step_from=${step}&step_to=${step}` }, "samples");
  const key = (text) => (/^[a-z_]+(\.[a-z_]+)+$/.test(text) ? h("a", { href: `#/run/${id}/config?filter=${encodeURIComponent(text)}` }, h("code", {}, text)) : h("code", {}, text));
  const open = advice.filter((each) => !each.until), past = advice.filter((each) => each.until);
  fill(element, open.length > 0 && h("p", { class: "faint" }, "Try the first suggestion first, and change one key at a time. The rules stand in docs/advice.md."),
    open.map((each) => h("article", { "data-rule": each.rule }, h("h3", {}, `${each.rule.replaceAll("_", " ")} `, h("span", { class: "muted" }, `since step ${each.since} · `), samples(each.since)), h("div", { class: "wrap" }, withCode(each.message, key)))),
    past.length > 0 && h("details", {}, h("summary", { class: "muted" }, `${past.length} withdrawn`), past.map((each) => h("article", { class: "past" }, h("h3", {}, `${each.rule.replaceAll("_", " ")} steps ${each.since} to ${each.until}`), h("div", { class: "wrap" }, withCode(each.message))))));
}

function drawLedger(element, { last, not_trained, summary, status, state }) {
  const running = state === "running" && status?.ledger?.issued !== undefined, counts = summary?.ledger ?? (running ? status.ledger : last.ledger);
  if (!counts) { fill(element, h("h2", {}, "Tickets"), h("p", { class: "muted" }, "No step yet.")); return; }
  fill(element, h("h2", {}, "Tickets ", h("span", { class: "muted" }, `${number(counts.issued)} issued`)),
    h("div", { class: "stack", role: "img", "aria-label": ACCOUNTS.map(([key, label]) => `${label} ${counts[key]}`).join(", ") },
      ACCOUNTS.filter(([key]) => counts[key]).map(([key]) => h("div", { class: `k-${key}`, style: { flex: String(counts[key]) } }))),
    h("div", { class: "legend" }, ACCOUNTS.map(([key, label]) => h("span", { "data-account": key }, h("span", { class: `key k-${key}` }), `${label} ${number(counts[key])}`)),
      running && h("span", {}, `${number(status.finished)} finished, waiting for a batch`)),
    summary?.members?.missing > 0 && h("p", { class: "muted" }, `${number(summary.members.missing)} of ${number(summary.members.sampled)} answers have no reward, because their workflow, environment or reward failed. A ticket whose group has failed begins again; it counts as failed when it has failed too often.`),
    not_trained.length > 0 && h("table", { style: { "margin-top": "8px" } }, h("tbody", {}, not_trained.map(([cause, count]) => h("tr", {}, h("td", { class: "number" }, number(count)), h("td", { class: "wrap" }, printable(cause)))))));
}

function drawWorkers(element, { status, state }) {
  if (!status) { fill(element, h("h2", {}, "Workers"), h("p", { class: "muted" }, "The kernel has not written its state.")); return; }
  const waits = new Map(status.waits.map((each) => [each.asker, each]));
  if (!status.workers.length) { fill(element, h("h2", {}, "Workers"), h("p", { class: "muted" }, state === "running" ? "No worker has joined yet." : "The run has ended, and its workers with it.")); return; }
  const now = state === "running" ? "" : `as of ${ago(status.written)}`;
  fill(element, h("h2", {}, "Workers and queue ", h("span", { class: "muted" }, now)),
    h("table", {}, h("thead", {}, h("tr", {}, ["worker", "state", "heard", "waits for"].map((each) => h("th", {}, each)))),
      h("tbody", {}, [...status.workers, ...(waits.has("kernel") ? [{ worker: "kernel", ready: true }] : [])].map((each) => {
        const wait = waits.get(each.worker), word = each.ready ? "ready" : (status.starting[each.worker] ?? "not ready");
        return h("tr", {}, h("td", {}, printable(each.worker)), h("td", {}, printable(each.blocked_s ? `${word}, stands still for ${duration(each.blocked_s)}` : word)),
          h("td", {}, each.silent_s === undefined ? "" : `${duration(each.silent_s)} before`), h("td", { class: "wrap" }, wait ? printable(`${wait.who} (${wait.verb}) for ${duration(wait.seconds)}`) : "–"));
      }))));
}

function drawSpeed(element, { last, recent, summary }) {
  const keys = ["generate_busy_s", "verify_busy_s", "train_s", "swap_pause_s", "slots_used", "kv_used", "verifiers_used", "samples_waiting"];
  const rows = [
    ...keys.map((key) => [figure(key).name, last[key], (value) => figureText(key, value), tooltip(key)]),
    ["overlap", summary?.overlap, (value) => number(value, 3)], ["swaps", summary?.swaps?.count, number], ["restarts", summary?.restarts, number],
  ];
  fill(element, h("h2", {}, "Speed ", h("span", { class: "muted" }, last.step ? `in step ${last.step}` : "")),
    h("dl", { class: "facts two" }, rows.filter(([, value]) => value !== undefined && value !== null).map(([label, value, format, title]) => [h("dt", { title }, label), h("dd", {}, format(value))])),
    recent.ticket_s > 0 && ticketTimes(recent));
}

/** Where the time of a ticket goes. Its samples run at once, so the parts overlap. */
function ticketTimes(recent) {
  const turns = recent["reward/turns"] ?? 1, all = recent.ticket_s, words = `${duration(all)}${turns > 1 ? `, ${number(turns, 2)} turns of ${duration(all / turns)}` : ""}, in the mean of the newest 10 steps`;
  const parts = ["ticket_generate_s", "ticket_score_s", "ticket_tool_s", "ticket_environment_s", "ticket_own_s"].filter((key) => recent[key] !== null);
  return [h("h2", { style: { "margin-top": "12px" } }, "Time of a ticket ", h("span", { class: "muted" }, words)),
    h("div", { class: "bars", id: "ticket" }, parts.map((key) => [h("span", { class: "muted", title: tooltip(key) }, figure(key).label), h("div", { class: "track" }, h("div", { class: "fill", style: { width: `${Math.min(100, (100 * recent[key]) / all)}%` } })),
      h("span", { class: "number", "data-part": key }, `${duration(recent[key])} · ${((100 * recent[key]) / all).toFixed(0)} %${turns > 1 ? ` · ${duration(recent[key] / turns)} a turn` : ""}`)]))];
}

/** Where the time of the steps went: in the mean of the newest ones, and of each step. */
function drawTime(share, each, times) {
  share.hidden = each.hidden = !times;
  if (!times) return;
  const { columns, head, parts } = times;
  fill(share, h("h2", {}, "Time of a step ", h("span", { class: "muted" }, head)), timeBar(parts));
  fill(each, h("h2", {}, "Time of each step"), timeColumns(columns), timeLegend(parts));
}

/** A column of the parts of the time for each step, or for equal numbers of steps, and what the lines behind the columns mean. */
function timeColumns(columns) {
  const top = Math.max(...columns.map(([, , parts]) => Object.values(parts).reduce((sum, seconds) => sum + seconds, 0))) || 1, every = Math.ceil(columns.length / 10);
  const power = 10 ** Math.floor(Math.log10(top / 4)), most = 4 * power * [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((each) => 4 * each * power >= top);
  return h("div", { class: "columns", role: "img", "aria-label": `Time of each step, at most ${duration(top)}` },
    h("div", { class: "axis" }, [1, 0.75, 0.5, 0.25, 0].map((share) => h("span", {}, duration(share * most)))),
    columns.map(([first, last, parts], place) => h("div", { class: "column", title: `${first === last ? `step ${first}` : `steps ${first} to ${last}`}: ${Object.entries(parts).map(([key, seconds]) => `${figure(key).label} ${duration(seconds)}`).join(", ")}` },
      Object.entries(parts).map(([key, seconds]) => h("div", { class: `k${hueOf(key)}`, style: { height: `${(100 * seconds) / most}%` } })), place % every === 0 && h("span", {}, number(first)))));
}

function drawStaleness(element, { counts, source }) {
  const total = counts.reduce((sum, [, count]) => sum + count, 0), most = Math.max(1, ...counts.map(([, count]) => count));
  fill(element, h("h2", {}, "Staleness ", h("span", { class: "muted" }, total ? `${number(total)} trained trajectories${source ? `, ${source}` : ""}` : "")),
    total ? h("div", { class: "bars" }, counts.map(([staleness, count]) => [h("span", { class: "muted" }, `${staleness} version${staleness === 1 ? "" : "s"}`),
      h("div", { class: "track" }, h("div", { class: "fill", style: { width: `${(100 * count) / most}%` } })), h("span", { class: "number", "data-staleness": staleness }, `${number(count)} · ${((100 * count) / total).toFixed(1)} %`)]))
      : h("p", { class: "muted" }, "Nothing was trained on samples yet."));
}
