"""Advice: rules over a run's metrics. A rule says what goes wrong, since which step, and which key to change.

`Adviser` reads all lines of `metrics.jsonl` and evaluations, in order, and nothing else: a resumed run
replays them. docs/advice.md defines the `RULES`, which compare means over steps.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from stretto.assembly.compose import value_at
from stretto.bus.messages.events import Evaluation
from stretto.engine import MOST_SLOTS, default_canary_bound
from stretto.kernel.schedule.health import CLEARS, HOLDS, Window, held_out
from stretto.kernel.schedule.members import OF_SAMPLES
from stretto.kernel.step_meter import causes
from stretto.observe.bottleneck import bottleneck, late_alone, number, total, verifiers_used, works
from stretto.observe.newest_lines import KEPT, History


class Advice(msgspec.Struct, kw_only=True):
    """One piece of advice, as `summary.json` shows it."""

    rule: str
    since: int
    """First step with the problem."""
    said: int
    """Step at whose end it was given."""
    until: int | None = None
    """Step at whose end it was withdrawn; null while it is open."""
    message: str
    """Problem and suggested changes, with the figures of the last step at which the condition held."""


class Adviser:
    """Applies the rules to one run. With `quiet` it gives no advice: nobody can change a replay."""

    def __init__(self, document: Mapping[str, Any], *, quiet: bool = False) -> None:
        self._rules = () if quiet else RULES
        self.history = History()
        self._knobs = _Knobs(document)
        self._evaluations: list[Evaluation] = []
        self._true: Counter[str] = Counter()
        """Rule -> steps in a row at which its condition has held."""
        self._false: Counter[str] = Counter()
        self._since: dict[str, int] = {}
        self.given: list[Advice] = []

    @property
    def open(self) -> list[Advice]:
        """The advice that is not withdrawn."""
        return [advice for advice in self.given if advice.until is None]

    def evaluated(self, evaluation: Evaluation) -> None:
        """Add a complete evaluation."""
        self._evaluations.append(evaluation)
        self.history.evaluations = held_out(self._evaluations)

    def step(self, line: Mapping[str, Any]) -> list[Advice]:
        """Add a step's line. Return the advice that was given or withdrawn after this step."""
        self.history.add(line)
        changed = [self._apply(rule, line["step"]) for rule in self._rules]
        return [advice for advice in changed if advice is not None]

    def _apply(self, rule: Rule, step: int) -> Advice | None:
        finding = rule.judge(self.history, self._knobs)
        advice = next((candidate for candidate in self.open if candidate.rule == rule.name), None)
        if finding is None:
            self._true[rule.name] = 0
            self._false[rule.name] += 1
            if advice is None or self._false[rule.name] < CLEARS:
                return None
            advice.until = step
            return advice
        self._false[rule.name] = 0
        self._true[rule.name] += 1
        if self._true[rule.name] == 1:
            self._since[rule.name] = finding.since
        if advice is not None and self._explained(rule):
            advice.until = step
            return advice
        if advice is not None:
            advice.message = finding.message
        elif self._true[rule.name] >= rule.holds and not self._explained(rule):
            since = self._since[rule.name]
            self.given.append(Advice(rule=rule.name, since=since, said=step, message=finding.message))
            return self.given[-1]
        return None

    def _explained(self, rule: Rule) -> bool:
        return any(advice.rule in rule.unless for advice in self.open)


class _Knobs:
    """Suggests changes of the run file's values. An empty suggestion does not apply to the run."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def get(self, path: str) -> Any:
        return value_at(self._document, path)

    def number(self, path: str, otherwise: float) -> float:
        value = self.get(path)
        return value if isinstance(value, (int, float)) else otherwise

    def set(self, path: str, value: Any) -> str:
        """Suggest to set a key, if the run has such a key and another value."""
        parent, _, key = path.rpartition(".")
        section, now = self.get(parent), self.get(path)
        if not isinstance(section, Mapping) or key not in section or now == value:
            return ""
        are_numbers = isinstance(now, (int, float)) and isinstance(value, (int, float))
        if are_numbers and not isinstance(value, bool) and value > now:
            return f"raise `{path}` from {_text(now)} to {_text(value)}"
        return f"set `{path}` to {_text(value)} (now {_text(now)})"

    def more_threads(self, section: str) -> str:
        """Suggest one more thread, unless the engine has GPUs, or must be deterministic: its bits depend on
        the number of threads."""
        if self.number(f"{section}.gpus", 0) or self.get(f"{section}.deterministic"):
            return ""
        return self.add(f"{section}.threads", 1)

    def add(self, path: str, count: int) -> str:
        """Suggest to add `count` to the number at a key; a missing number counts as 1."""
        return self.set(path, int(self.number(path, 1)) + count)

    def scale(self, path: str, factor: float) -> str:
        """Suggest to multiply a number: an integer to an integer, a float to one significant digit."""
        now = self.get(path)
        if isinstance(now, bool) or not isinstance(now, (int, float)):
            return ""
        return self.set(path, round(now * factor) if isinstance(now, int) else float(f"{now * factor:.1g}"))


@dataclass(frozen=True)
class _Finding:
    since: int
    message: str


_Judge = Callable[[History, _Knobs], _Finding | None]
_Lines = Sequence[Mapping[str, Any]]
_Said = tuple[str, *tuple[str, ...]]  # (problem, suggestions)


def _finding(since: int, what: str, *suggestions: str) -> _Finding:
    applicable = [suggestion for suggestion in suggestions if suggestion]
    return _Finding(since, f"{what}; {', or '.join(applicable)}" if applicable else what)


# ---------------------------------------------------------------------------------- rules of learning


def _failure_bias(history: History, knobs: _Knobs) -> _Finding | None:
    del knobs
    line = history.lines[-1]
    for name, what in (("answer_bias", "answer"), ("prompt_bias", "prompt")):
        shift, error = number(line, name), number(line, f"{name}_error")
        length = history.window("length", 10)
        if shift is None or error is None or length is None:
            continue
        if abs(shift) > max(3 * error, 0.02 * length.mean):
            longer, shorter = ("longer", "shorter") if shift < 0 else ("shorter", "longer")
            return _finding(
                line["step"],
                f"samples with a {longer} {what} fail more often, so what is trained is {abs(shift):.3g} "
                f"tokens {shorter} than what was sampled (standard error {error:.2g}); see `failures` and "
                "`reasons` in summary.json",
                "correct what fails, or let it raise `PolicyError` where the answer itself is at fault",
            )
    return None


def _reward_collapse(history: History, knobs: _Knobs) -> _Finding | None:
    start, best = history.rewards.start, history.rewards.best
    fall = history.rewards.fall(history.evaluations)
    if fall is None:
        return None
    never_learnt = start and best and best.mean < start.mean + 0.1 * history.rewards.spread
    signs = ", ".join(history.broken())
    return _finding(
        fall.since,
        f"{fall.message}: the policy is broken: {signs}" if signs else fall.message,
        knobs.scale("training.lr", 1 / 10 if never_learnt else 1 / 3),
        knobs.set("queue.max_staleness", knobs.number("queue.max_staleness", 0) // 2),
        knobs.set("training.clip_norm", min(0.3, knobs.number("training.clip_norm", 1.0))),
        knobs.set("algorithm.correction.use", "behaviour"),
        knobs.set(
            "algorithm.correction.target_kl", min(0.01, knobs.number("algorithm.correction.target_kl", 1.0))
        ),
    )


def _shortened_steps(history: History, knobs: _Knobs) -> _Finding | None:
    scale, kl = history.window("lr_scale", 20), history.window("behaviour_kl", 20)
    start = history.rewards.start
    if scale is None or kl is None or start is None or scale.mean >= 0.5:
        return None
    now = history.window("reward", 10)
    if now is None or now.rise(start)[0] > 0:
        return None
    return _finding(
        scale.since,
        f"`target_kl` keeps the learning rate at {scale.mean:.2g} of the scheduled one (steps {scale.since}-"
        f"{scale.until}, behaviour_kl {kl.mean:.2g}), and the reward does not rise",
        knobs.scale("training.lr", max(0.03, scale.mean)),
        knobs.set("queue.max_staleness", knobs.number("queue.max_staleness", 0) // 2),
    )


def _plateau(history: History, knobs: _Knobs) -> _Finding | None:
    before, now = history.window("reward", 60, back=60), history.window("reward", 60)
    if before is None or now is None or not history.has_room():
        return None
    rise, error = now.rise(before)
    if rise > error or max(rise, 0.0) + 2 * error > 0.1 * history.rewards.spread:
        return None  # the reward rises, or the noise could hide a rise
    rate = history.window("lr", 20)
    if rate is not None and rate.mean < 0.5 * history.lr:
        return None  # the schedule or `target_kl` made the steps short
    if _evaluations_rise(history, before.since) or _near_limit(history, now):
        return None
    return _finding(
        before.since,
        f"mean reward has not risen for {now.until - before.since + 1} steps: {before.mean:.3g} (steps "
        f"{before.since}-{before.until}), {now.mean:.3g} (steps {now.since}-{now.until})",
        knobs.scale("training.lr", 2),
        knobs.scale("algorithm.group_size", 2),
    )


def _evaluations_rise(history: History, since: int) -> bool:
    """Return whether the newest evaluation is two standard errors above the first one since a step."""
    recent = [result for result in history.evaluations if result.version >= since]
    if len(recent) < 2:
        return False
    before, now = recent[0], recent[-1]
    return now.score - before.score > 2 * math.hypot(before.largest_error, now.largest_error)


def _near_limit(history: History, now: Window) -> bool:
    """Return whether held-out score or mean reward is 0.8 of the way from its start to `history.limit`."""
    start = history.rewards.start
    pairs = [(start.mean, now.mean)] if start else []
    if history.evaluations:
        pairs.append((history.evaluations[0].score, history.evaluations[-1].score))
    has_limit = math.isfinite(history.limit)
    return has_limit and any(newest - first >= 0.8 * (history.limit - first) for first, newest in pairs)


def _gradient_spikes(history: History, knobs: _Knobs) -> _Finding | None:
    readings = [(line["step"], number(line, "grad_norm")) for line in history.lines if "grad_norm" in line]
    norms = [(step, math.inf if norm is None else norm) for step, norm in readings]  # None: not finite
    logs = np.log([norm for _, norm in norms[:-20] if 0 < norm < math.inf])
    if len(logs) < 20:
        return None
    middle = float(np.median(logs))
    deviation = 1.4826 * float(np.median(np.abs(logs - middle)))  # standard deviation of the logs, if normal
    bound = max(math.exp(middle + max(math.log(10), 4 * deviation)), knobs.number("training.clip_norm", 0.0))
    spikes = [(step, norm) for step, norm in norms[-20:] if norm > bound]
    if len(spikes) < 3:
        return None
    median = float(f"{math.exp(middle):.1g}")
    return _finding(
        spikes[0][0],
        f"{len(spikes)} of the last 20 gradient norms are above {bound:.2g}, far from the usual {median:g}; "
        f"the largest is {max(norm for _, norm in spikes):.3g}",
        knobs.set("training.clip_norm", min(median, knobs.number("training.clip_norm", math.inf))),
        knobs.scale("training.lr", 1 / 3),
    )


def _masked_tokens(history: History, knobs: _Knobs) -> _Finding | None:
    masked = history.window("masked_fraction", 10)
    if masked is None or masked.mean - 2 * masked.error <= 0.25:
        return None
    staleness = int(knobs.number("queue.max_staleness", 0))
    return _finding(
        masked.since,
        f"the off-policy correction leaves out {masked.mean:.0%} of the tokens",
        knobs.set("queue.max_staleness", staleness // 2),
        knobs.scale("training.lr", 1 / 3),
        knobs.set("algorithm.correction.use", "behaviour"),
    )


def _entropy_collapse(history: History, knobs: _Knobs) -> _Finding | None:
    first, now = history.first.get("entropy"), history.window("entropy", 10)
    if first is None or now is None or first.mean < 0.02 or now.mean > 0.1 * first.mean:
        return None
    if not history.has_room() or history.rises("reward", 20):
        return None  # answers became certain because they became right
    return _finding(
        now.since,
        f"the policy's entropy fell from {first.mean:.2g} to {now.mean:.2g} nats per token while rewards "
        "stay mixed and do not rise: it explores no more",
        knobs.set("algorithm.entropy_coef", max(0.001, 2 * knobs.number("algorithm.entropy_coef", 0.0))),
        knobs.set("algorithm.eps_clip_high", 0.28),
        knobs.scale("training.lr", 1 / 3),
    )


def _zero_variance(history: History, knobs: _Knobs) -> _Finding | None:
    share = history.window("zero_variance_groups", 20)
    if share is None or not history.varied or history.gain("reward") is not None:
        return None  # equal rewards are expected when the policy has learned to answer right
    lines = list(history.lines)[-20:]
    filtered = sum(line.get("not_trained", {}).get("filtered: by the algorithm", 0) for line in lines)
    trained = 20 * knobs.number("queue.batch_size", 1)
    constant = (share.mean * trained + filtered) / (trained + filtered)
    if constant - 2 * share.error <= 0.75:
        return None
    reward = history.window("reward", 20)
    return _finding(
        share.since,
        f"{constant:.0%} of the groups give all answers the same reward, so nothing is left to compare (mean "
        f"reward {reward.mean if reward else math.nan:.3g}): rows are too hard or too easy, or the reward is "
        "too coarse; choose rows that the policy answers right now and then",
        knobs.scale("algorithm.group_size", 2),
    )


def _truncation(history: History, knobs: _Knobs) -> _Finding | None:
    now, before = history.window("truncated", 10), history.window("truncated", 10, back=10)
    if now is None or before is None or now.mean - 2 * now.error <= 0.2:
        return None
    if now.mean < 0.8 * before.mean:
        return None  # the policy is learning to end
    return _finding(
        now.since,
        f"{now.mean:.0%} of the answers end at the limit of tokens",
        knobs.scale("sampling.max_tokens", 2),
    )


def _mismatch(history: History, knobs: _Knobs) -> _Finding | None:
    bound = knobs.number("inference.canary.bound", default_canary_bound(knobs.get("inference.dtype")))
    for name, what in (("canary_mean", "the canary"), ("mismatch_mean", "tokens of that version")):
        values = history.known(name)
        if len(values) >= 3 and min(reading for _, reading in values[-3:]) > bound:
            return _finding(
                values[-3][0],
                f"logprobs of engine and trainer differ by {values[-1][1]:.2g} per token on {what}; expected "
                f"at most {bound:g}",
                knobs.set("inference.dtype", "float32"),
                knobs.set("training.dtype", "float32"),
                knobs.set("inference.on_swap", "recompute") if name == "mismatch_mean" else "",
            )
    return None


def _constant_reward(history: History, knobs: _Knobs) -> _Finding | None:
    rewards = history.known("reward")
    if history.varied or len(rewards) < 5 or len({reward for _, reward in rewards}) > 1:
        return None
    truncated = history.window("truncated", 5)
    return _finding(
        rewards[0][0],
        f"every answer so far has the reward {rewards[0][1]:g}, so nothing is learnt",
        "read some answers (`stretto samples`) and try the reward on them",
        knobs.scale("sampling.max_tokens", 2) if truncated and truncated.mean > 0.5 else "",
    )


def _failures(history: History, knobs: _Knobs) -> _Finding | None:
    lines, batch = list(history.lines)[-10:], knobs.number("queue.batch_size", 1)
    failed: dict[str, Counter[str]] = {"tickets": Counter(), "samples": Counter()}
    steps: dict[str, list[int]] = {"tickets": [], "samples": []}
    for line in lines:
        for reason, count in line.get("not_trained", {}).items():
            if not reason.startswith(("filtered: ", "expired: ")):
                kind = "samples" if reason.startswith(OF_SAMPLES) else "tickets"
                failed[kind][reason] += count
                steps[kind].append(line["step"])
    begun = {
        "tickets": len(lines) * batch + failed["tickets"].total(),
        "samples": len(lines) * batch * knobs.number("algorithm.group_size", 1),
    }
    # The reasons are of all groups that ended in these steps, also of groups that a later step trains.
    counts = {"tickets": failed["tickets"].total(), "samples": int(total(lines, "failed_members"))}
    for kind, reasons in failed.items():
        count = counts[kind]
        if not reasons or count < 3 or count < 0.02 * begun[kind]:
            continue
        worst = causes(reasons).most_common(3)
        cause_texts = (f"{number} x {reason.removeprefix('failed: ')}" for reason, number in worst)
        text = "; ".join(cause.replace("; ", ", ") for cause in cause_texts)  # the verdict shows the first
        return _finding(
            steps[kind][0],
            f"{count} of {begun[kind]:.0f} {kind} failed in {len(lines)} steps: {text}",
            *(knobs.scale(key, 2) for key in _TIME_LIMITS if any(f"{key}=" in reason for reason, _ in worst)),
        )
    return None


_TIME_LIMITS = ("reward.timeout_s", "workflow.timeout_s", "workflow.environment_timeout_s")


# ------------------------------------------------------------------------------------- rules of speed

_SPEED_STEPS = 20  # newest steps that rules of speed read
_FEWEST_READINGS = 5
"""Fewest lines with a figure for its mean: short steps may lack the figures of heartbeats."""


def _evaluation_waits(history: History, knobs: _Knobs) -> _Finding | None:
    """Find waits for evaluations of a fifth of the time, over a multiple of `evaluation.every` steps."""
    every = int(knobs.number("evaluation.every", 0))
    count = min(KEPT, every * math.ceil(_SPEED_STEPS / every)) if every else KEPT
    lines = list(history.lines)[-count:]
    if not every or len(lines) < count or lines[0]["step"] == 1:
        return None
    waited_s, total_s = total(lines, "wait/evaluation_s"), total(lines, "step_s")
    if waited_s < 0.2 * total_s:
        return None
    has_own = knobs.get("evaluation.own_engine")
    why = "are due faster than their engine samples" if has_own else "take all inference engines"
    return _finding(
        lines[0]["step"],
        f"training waits for evaluations in {waited_s:.3g} of the {total_s:.3g} s of steps "
        f"{lines[0]['step']}-{lines[-1]['step']} ({waited_s / total_s:.0%}), because they {why}",
        ""
        if has_own or knobs.get("inference.urls") or knobs.get("inference.sleep")
        else knobs.set("evaluation.own_engine", True),
        knobs.scale("evaluation.every", 2),
        knobs.scale("evaluation.rows", 1 / 2) or "evaluate fewer rows (`evaluation.rows`)",
        "" if _cores_are_full(lines, knobs) else knobs.add("inference.replicas", 1),
    )


def _checkpoint_waits(lines: _Lines, knobs: _Knobs) -> _Said | None:
    share = total(lines, "wait/checkpoint_s") / total(lines, "step_s")
    if share < 0.2:
        return None
    return (
        f"training waits for checkpoints {share:.0%} of the time",
        knobs.scale("checkpoint.every", math.ceil(share / 0.05)),
        knobs.scale("checkpoint.copy_gb", 2),
    )


def _late_tickets(lines: _Lines, knobs: _Knobs) -> _Said | None:
    share = late_alone(lines)
    if share < 0.2:
        return None
    return (
        f"training waits for late tickets {share:.0%} of the time: a few take much longer than the others, "
        "and would soon be too stale",
        knobs.add("queue.max_staleness", 1),
        "bound the tool, environment or answer that takes so long (`stretto ui` shows them on the timeline)",
    )


def _training_waits(lines: _Lines, knobs: _Knobs) -> _Said | None:
    part, share = bottleneck(lines)
    total_s, waited_s = total(lines, "step_s"), total(lines, "wait/evaluation_s")
    if part != "generation" or total(lines, "train_s") > 0.35 * (total_s - waited_s):
        return None
    full, synchronous = _cores_are_full(lines, knobs), knobs.get("queue.max_staleness") == 0
    if full and not synchronous:
        return None
    return (
        f"training waits for generation {share:.0%} of the time",
        knobs.set("queue.max_staleness", 1) if synchronous else "",
        "" if full else knobs.more_threads("inference"),
        "" if full else knobs.add("inference.replicas", 1),
    )


def _generation_waits(lines: _Lines, knobs: _Knobs) -> _Said | None:
    share = works(lines)
    busy = total(lines, "generate_busy_s") / total(lines, "step_s")
    if share < 0.9 or busy > 0.3 or _cores_are_full(lines, knobs):
        return None
    return (
        f"generation waits for training: training works {share:.0%} of the time, the engines {busy:.0%}",
        knobs.more_threads("training"),
        knobs.add("training.processes", 1),
        knobs.add("inference.replicas", -1) if knobs.number("inference.replicas", 1) > 1 else "",
    )


def _slot_bound(lines: _Lines, knobs: _Knobs) -> _Said | None:
    used, waiting = (_mean(lines, name) for name in ("slots_used", "samples_waiting"))
    if bottleneck(lines)[0] != "generation" or used is None or waiting is None or used < 0.85:
        return None
    if waiting < 0.5 * knobs.number("inference.slots", MOST_SLOTS) or _cores_are_full(lines, knobs):
        return None
    return (
        f"generation is bound by its slots: {used:.0%} are in use and {waiting:.0f} samples wait, while "
        f"training works {works(lines):.0%} of the time",
        knobs.scale("inference.slots", 2) or knobs.set("inference.slots", 2 * MOST_SLOTS),
        knobs.add("inference.replicas", 1),
    )


def _kv_bound(lines: _Lines, knobs: _Knobs) -> _Said | None:
    used, waiting, memory = (_mean(lines, name) for name in ("slots_used", "samples_waiting", "kv_used"))
    if bottleneck(lines)[0] != "generation" or used is None or waiting is None or memory is None:
        return None
    # If the memory is no fuller than the slots, it is not the reason why slots are empty.
    if used > 0.75 or memory < max(0.7, 1.2 * used):
        return None
    if waiting < 0.25 * knobs.number("inference.slots", MOST_SLOTS):
        return None
    return (
        f"generation is bound by memory for keys and values: {memory:.0%} of it is in use, so {waiting:.0f} "
        f"samples wait although only {used:.0%} of the slots are taken",
        knobs.scale("inference.cache_gb", 2),
        knobs.set("inference.dtype", "bfloat16"),
    )


def _lost_prefixes(lines: _Lines, knobs: _Knobs) -> _Said | None:
    lost, now = _mean(lines, "lost_per_token"), knobs.number("rollout.concurrency", 0)
    if bottleneck(lines)[0] != "generation" or lost is None or lost < 1:
        return None
    return (
        f"the engines compute {lost:.1f} tokens again for each token that they sample: the conversations "
        "under way do not fit into their memory",
        knobs.set("rollout.concurrency", {"min": max(1, int(now) // 8), "max": int(now)}) if now > 1 else "",
        knobs.scale("inference.cache_gb", 2),
    )


def _verifier_bound(lines: _Lines, knobs: _Knobs) -> _Said | None:
    if bottleneck(lines)[0] != "verification" or _cores_are_full(lines, knobs):
        return None
    score_s, generate_s = (
        total(lines, name) / len(lines) for name in ("ticket_score_s", "ticket_generate_s")
    )
    has_tools, used = knobs.get("workflow.tools") or knobs.get("workflow.mcp"), verifiers_used(lines)
    work = f", which work {used:.0%} of it" if used else ""
    return (
        f"training works {works(lines):.0%} of the time and waits for verifiers{work}: a ticket spends "
        f"{score_s:.2g} s with them and {generate_s:.2g} s in generation",
        knobs.scale("verifier.tool_children", 2) if has_tools else "",
        knobs.scale("verifier.children", 2),
        knobs.scale("verifier.processes", 2),
    )


def _slow_swaps(lines: _Lines, knobs: _Knobs) -> _Said | None:
    share = total(lines, "swap_pause_s") / total(lines, "step_s")
    if share < 0.1:
        return None
    return (
        f"swaps of weights stop the engines {share:.0%} of the time, for "
        f"{total(lines, 'swap_pause_s') / len(lines):.2g} s per step",
        knobs.scale("queue.batch_size", 2),
        knobs.set("training.dtype", "bfloat16"),
        knobs.set("inference.on_swap", "keep_cache"),
        knobs.set("training.lora.send", "adapter"),
    )


def _recoveries(history: History, knobs: _Knobs) -> _Finding | None:
    lines = list(history.lines)
    recovery_s, total_s = total(lines, "recovery_s"), total(lines, "step_s")
    recoveries = [recovery for line in lines for recovery in line.get("recoveries", ())]
    if len(lines) < _SPEED_STEPS or recovery_s < 0.05 * total_s:
        return None
    repeated = sum(recovery["repeated"] for recovery in recoveries)
    return _finding(
        next(line["step"] for line in lines if line.get("recoveries") or line.get("recovery_s")),
        f"trainers or the kernel were lost {len(recoveries)} times, and the recoveries took "
        f"{min(1.0, recovery_s / total_s):.0%} of the time, with {repeated} repeated steps; `recoveries` in "
        "summary.json says how they were lost",
        knobs.scale("checkpoint.every", 0.5) if repeated > len(recoveries) else "",
    )


def _lost_workers(history: History, knobs: _Knobs) -> _Finding | None:
    del knobs
    lines = list(history.lines)[-_LOST_STEPS:]
    lost = [(each["worker"], each["how"], line["step"]) for line in lines for each in line.get("lost", ())]
    [(worker, times)] = Counter(worker for worker, _, _ in lost).most_common(1) or [("", 0)]
    if times < _LOST_TIMES:
        return None
    ends = [(how, step) for each, how, step in lost if each == worker]
    return _finding(
        ends[0][1],
        f"{worker} was lost {times} times in {len(lines)} steps, at last {ends[-1][0]}",
        f"find out why: `stretto logs RUN --worker {worker}`",
    )


_LOST_STEPS = 60  # newest steps in which losses count
_LOST_TIMES = 3  # losses of one worker that are a problem


def _of_speed(judge: Callable[[_Lines, _Knobs], _Said | None]) -> _Judge:
    """Return the condition of a rule that reads only the newest lines of a run that samples. It does not hold
    if there are too few lines, or if they include the first step, which waits for the first groups."""

    def condition(history: History, knobs: _Knobs) -> _Finding | None:
        lines = list(history.lines)[-_SPEED_STEPS:]
        if len(lines) < _SPEED_STEPS or lines[0]["step"] == 1 or "ticket_generate_s" not in lines[-1]:
            return None
        problem = judge(lines, knobs)
        return None if problem is None else _finding(lines[0]["step"], *problem)

    return condition


def _cores_are_full(lines: Sequence[Mapping[str, Any]], knobs: _Knobs) -> bool:
    """Return whether a run without GPUs has no idle core, so that more parallel work would not help."""
    gpus = knobs.number("training.gpus", 0) + knobs.number("inference.gpus", 0)
    idle = _mean(lines, "cores_idle")
    return not gpus and idle is not None and idle < 0.15


@dataclass(frozen=True)
class Rule:
    """One rule of advice."""

    name: str
    judge: _Judge
    """Returns the finding if the condition holds."""
    holds: int
    """Steps in a row at which the condition must hold."""
    unless: tuple[str, ...] = ()
    """Rules above that explain this condition: while their advice is open, this rule gives none."""


RULES = (
    Rule("failures", _failures, holds=1),
    Rule("failure_bias", _failure_bias, holds=1),
    Rule("recoveries", _recoveries, holds=1),
    Rule("lost_workers", _lost_workers, holds=1),
    Rule("engine_mismatch", _mismatch, holds=1),
    Rule("reward_collapse", _reward_collapse, holds=HOLDS),
    Rule("constant_reward", _constant_reward, holds=1),
    Rule("shortened_steps", _shortened_steps, holds=5, unless=("reward_collapse",)),
    Rule("masked_tokens", _masked_tokens, holds=5),
    Rule("gradient_spikes", _gradient_spikes, holds=3, unless=("reward_collapse",)),
    Rule("truncation", _truncation, holds=5, unless=("reward_collapse",)),
    Rule("entropy_collapse", _entropy_collapse, holds=5, unless=("reward_collapse",)),
    Rule("zero_variance_groups", _zero_variance, holds=5, unless=("reward_collapse", "constant_reward")),
    Rule(
        "plateau", _plateau, holds=10, unless=("reward_collapse", "entropy_collapse", "zero_variance_groups")
    ),
    Rule("verifier_bound", _of_speed(_verifier_bound), holds=10, unless=("lost_workers",)),
    Rule("slow_swaps", _of_speed(_slow_swaps), holds=10),
    Rule("lost_prefixes", _of_speed(_lost_prefixes), holds=10),
    Rule("kv_bound", _of_speed(_kv_bound), holds=10),
    Rule("slot_bound", _of_speed(_slot_bound), holds=10, unless=("kv_bound",)),
    Rule("evaluation_waits", _evaluation_waits, holds=10),
    Rule("checkpoint_waits", _of_speed(_checkpoint_waits), holds=10),
    Rule("late_tickets", _of_speed(_late_tickets), holds=10, unless=("lost_workers",)),
    Rule(
        "training_waits",
        _of_speed(_training_waits),
        holds=10,
        unless=("lost_workers", "reward_collapse", "slow_swaps", "lost_prefixes", "kv_bound", "slot_bound"),
    ),
    Rule("generation_waits", _of_speed(_generation_waits), holds=10),
)


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    readings = [value for line in lines if (value := number(line, name)) is not None]
    return math.fsum(readings) / len(readings) if len(readings) >= _FEWEST_READINGS else None


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {item}' for key, item in value.items())}}}"
    return f"{value:g}" if isinstance(value, float) else str(value)
