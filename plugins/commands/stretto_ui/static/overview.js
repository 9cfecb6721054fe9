// The first view of a run: figures, curves, ledger, workers, staleness, advice.
import { ago, duration, fill, h, number, printable, signed, withCode } from "./dom.js";
import { get } from "./api.js";
import { Board } from "./charts.js";
import { ACCURACY, figure, figureText, tooltip } from "./figures.js";

/** From this many steps on, the curves of this view are smoothed. */
const MANY_STEPS = 150;
const ACCOUNTS = [["trained", "trained"], ["in_flight", "in flight"], ["filtered", "filtered"], ["expired", "expired"], ["failed", "failed"]];

export async function overviewTab({ id, name, facts }) {
  const smoothing = facts().step > MANY_STEPS ? 0.9 : 0;
  const board = new Board([{ id, name }], { smoothing });
  const tiles = h("div", { class: "tiles", id: "tiles" }), advice = h("div", { class: "advice" }), notes = h("div");
  const ledger = h("section", { class: "panel w6", id: "ledger" }), staleness = h("section", { class: "panel w6", id: "staleness" });
  const workers = h("section", { class: "panel w6 scroll", id: "workers" }), engines = h("section", { class: "panel w6", id: "speed" });
  const keys = facts().keys, has = (key) => keys.includes(key);
  const charts = [
    ["reward"], [ACCURACY], ["loss"], ["entropy"], ["grad_norm"], ["staleness", "staleness_max"],
  ].filter(([key]) => (key === ACCURACY ? facts().evaluations.length : has(key)));
  const element = h("div", {}, notes, tiles, h("p", { class: "faint" }, `${figure("reward").title} and ${figure("zero_variance_groups").label} are means of the newest 10 steps, the other figures those of the newest step.`), advice,
    h("div", { class: "charts", style: { margin: "12px 0" } }, charts.map((wanted) => board.add(wanted))),
    smoothing > 0 && h("p", { class: "faint" }, `The lines are smoothed (${smoothing}); the faint lines behind them are not.`),
    h("div", { class: "grid" }, ledger, staleness, workers, engines));

  async function draw() {
    const now = facts();
    drawNotes(notes, now);
    drawTiles(tiles, now);
    drawAdvice(advice, now);
    drawLedger(ledger, now);
    drawWorkers(workers, now);
    drawSpeed(engines, now);
    drawStaleness(staleness, await get(`runs/${id}/staleness`));
  }

  await draw();
  return {
    element,
    async update(changed) { if (changed) board.refresh(); await draw(); },
    redraw() { board.redraw(); },
    destroy() { board.destroy(); },
  };
}

function drawNotes(element, { summary, status, standstill, state, fault }) {
  const notes = fault ? [["bad", fault]] : [];
  if (summary?.reason) notes.push(["bad", summary.reason]);
  if (state === "stopped") notes.push(["bad", "No kernel owns this run, and it has not ended. `stretto resume` continues it."]);
  if (state === "running" && status && !status.connected) notes.push(["bad", "The kernel has no connection to nats-server."]);
  if (standstill) notes.push(["bad", standstill]);
  for (const problem of summary?.problems ?? []) notes.push(["", problem]);
  fill(element, notes.map(([kind, text]) => h("p", { class: `note ${kind}` }, printable(text))));
}

function drawTiles(element, { last, headline, evaluations, status, state, keys }) {
  const accuracies = evaluations.filter((each) => typeof each[ACCURACY] === "number"), newest = accuracies.at(-1);
  const best = accuracies.reduce((one, other) => (one && one[ACCURACY] >= other[ACCURACY] ? one : other), null);
  const text = (key) => figureText(key, last[key]), sub = (...keys) => keys.filter((key) => last[key] !== undefined).map((key) => `${figure(key).label} ${text(key)}`).join(", ");
  const tiles = [
    ["reward", headline.reward.recent, headline.reward.change === null ? "" : `${signed(headline.reward.change)} from the first 10 steps`, keys.includes("reward")],
    [ACCURACY, newest?.[ACCURACY], newest ? `version ${newest.step}; best ${figureText(ACCURACY, best[ACCURACY])} at ${best.step}` : "", newest],
    ["zero_variance_groups", headline.zero_variance_groups.recent, "", keys.includes("zero_variance_groups")],
    ["loss", last.loss, "", last.loss !== undefined && !keys.includes("reward")],
    ["entropy", last.entropy, sub("behaviour_kl")],
    ["staleness", last.staleness, last.staleness === undefined ? "" : `max ${text("staleness_max")}${last.staleness_limit === undefined ? "" : `, limit ${text("staleness_limit")}`}`],
    ["length", last.length, sub("truncated")],
    ["step_s", last.step_s, sub("train_s")],
    ["step_tokens_per_s", last.step_tokens_per_s, sub("train_tokens_per_s")],
  ];
  fill(element, tiles.filter(([, value, , there]) => there ?? value !== undefined).map(([key, value, below]) => h("div", { class: "tile", "data-tile": key, title: tooltip(key) }, h("div", { class: "label" }, figure(key).name), h("div", { class: "value" }, figureText(key, value)), h("div", { class: "sub" }, below))));
  if (state !== "running" || !status) return;
  const { evaluating, bottleneck, now, generate_tokens_per_s } = status;
  const lines = [bottleneck ? `the bottleneck is ${bottleneck}` : now, evaluating && `evaluating version ${evaluating.version}: ${number(evaluating.rows)} of ${number(evaluating.of)} rows`, generate_tokens_per_s ? `generating ${number(Math.round(generate_tokens_per_s))} tokens/s` : ""];
  element.append(h("div", { class: "tile wide", "data-tile": "Now" }, h("div", { class: "label" }, "Now"), lines.filter(Boolean).map((line) => h("div", { class: "sub" }, printable(line)))));
}

function drawAdvice(element, { summary, status }) {
  const advice = summary?.advice ?? status?.advice ?? [];
  const open = advice.filter((each) => !each.until), past = advice.filter((each) => each.until);
  fill(element,
    open.map((each) => h("article", { "data-rule": each.rule }, h("h3", {}, `${each.rule.replaceAll("_", " ")} `, h("span", { class: "muted" }, `since step ${each.since}`)), h("div", { class: "wrap" }, withCode(each.message)))),
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

function drawSpeed(element, { last, summary }) {
  const keys = ["generate_busy_s", "verify_busy_s", "train_s", "swap_pause_s", "ticket_generate_s", "ticket_score_s", "slots_used", "kv_used", "samples_waiting"];
  const rows = [
    ...keys.map((key) => [figure(key).name, last[key], (value) => figureText(key, value), tooltip(key)]),
    ["overlap", summary?.overlap, (value) => number(value, 3)], ["swaps", summary?.swaps?.count, number], ["restarts", summary?.restarts, number],
  ];
  fill(element, h("h2", {}, "Speed ", h("span", { class: "muted" }, last.step ? `in step ${last.step}` : "")),
    h("dl", { class: "facts two" }, rows.filter(([, value]) => value !== undefined && value !== null).map(([label, value, format, title]) => [h("dt", { title }, label), h("dd", {}, format(value))])));
}

function drawStaleness(element, { counts, source }) {
  const total = counts.reduce((sum, [, count]) => sum + count, 0), most = Math.max(1, ...counts.map(([, count]) => count));
  fill(element, h("h2", {}, "Staleness ", h("span", { class: "muted" }, total ? `${number(total)} trained trajectories${source ? `, ${source}` : ""}` : "")),
    total ? h("div", { class: "bars" }, counts.map(([staleness, count]) => [h("span", { class: "muted" }, `${staleness} version${staleness === 1 ? "" : "s"}`),
      h("div", { class: "track" }, h("div", { class: "fill", style: { width: `${(100 * count) / most}%` } })), h("span", { class: "number", "data-staleness": staleness }, `${number(count)} · ${((100 * count) / total).toFixed(1)} %`)]))
      : h("p", { class: "muted" }, "Nothing was trained on samples yet."));
}
