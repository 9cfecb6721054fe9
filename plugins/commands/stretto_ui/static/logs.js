// The newest lines of a log of a run: of its kernel, or of one of its workers.
import { debounce, fill, h, printable } from "./dom.js";
import { get } from "./api.js";

/** Lines that look different. At the time of an attempt, a kernel takes over the run: what follows belongs to it. */
const KINDS = [["bad", /^\S+ \[(error|critical)/], ["warn", /^\S+ \[warning/]];
const kindOf = (line, attempts) => KINDS.find(([, pattern]) => pattern.test(line))?.[0] ?? (attempts.includes(line.split(" ", 1)[0]) ? "begins" : "");

export async function logsTab({ id, facts, query }) {
  const parameters = { name: query.get("name") ?? "", text: "", problems: query.get("problems") ?? "", attempt: query.get("attempt") ?? "" };
  let answer = await get(`runs/${id}/logs`, parameters);
  const names = h("select", { class: "asks", "aria-label": "Log of", id: "log", onchange: () => { parameters.name = names.value; load(); } });
  const attempts = h("select", { class: "asks", "aria-label": "Attempt", id: "attempt", onchange: () => { parameters.attempt = attempts.value; load(); } });
  const search = h("input", { type: "search", class: "asks", placeholder: "Filter lines …", "aria-label": "Filter lines", "data-search": true, oninput: debounce(() => { parameters.text = search.value.trim(); load(); }, 200) });
  const problems = h("input", { type: "checkbox", id: "problems", checked: parameters.problems === "1", onchange: () => { parameters.problems = problems.checked ? "1" : ""; load(); } });
  const count = h("span", { class: "muted" }), lines = h("div", { class: "text log", id: "lines", tabindex: "0", role: "log", "aria-label": "Lines" });

  function draw() {
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 30;
    fill(names, answer.names.map((name) => h("option", { value: name }, printable(name))));
    names.value = answer.name;
    fill(attempts, h("option", { value: "" }, "all attempts"), answer.attempts.map((time, index) => h("option", { value: index + 1 }, `attempt ${index + 1}, from ${new Date(time).toLocaleString()}`)));
    attempts.value = parameters.attempt;
    attempts.hidden = answer.attempts.length < 2;
    fill(count, answer.lines.length === answer.most ? `the newest ${answer.most} lines` : `${answer.lines.length} lines`);
    fill(lines, answer.lines.map((line) => h("div", { class: kindOf(line, answer.attempts) }, printable(line))));
    if (!answer.lines.length) fill(lines, h("p", { class: "empty" }, answer.names.length ? "No line fits." : "This run has no logs: its folder was copied without `logs`, or the run has not begun."));
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  }

  async function load() {
    answer = await get(`runs/${id}/logs`, parameters);
    draw();
    lines.scrollTop = lines.scrollHeight;
  }

  draw();
  return {
    element: h("div", {}, h("div", { class: "tools" }, names, attempts, search, h("label", {}, problems, "warnings and errors"), count), h("div", { class: "panel" }, lines)),
    shown() { lines.scrollTop = lines.scrollHeight; },
    async update(changed) { if (!changed && facts().state !== "running") return; const before = JSON.stringify(answer.lines); answer = await get(`runs/${id}/logs`, parameters); if (JSON.stringify(answer.lines) !== before) draw(); },
  };
}
