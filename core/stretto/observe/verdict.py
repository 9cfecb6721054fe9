"""The verdict: one line that says whether a run learns, and what it waits for.

The kernel writes it into `status.json` and `summary.json` for every view. docs/seeing.md defines its words.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stretto.bus.messages.events import CAUSES, CauseKind
from stretto.kernel.schedule.health import HeldOutScore
from stretto.observe.advice import Adviser
from stretto.observe.bottleneck import bottleneck, late_alone, total, verifiers_used
from stretto.observe.newest_lines import History
from stretto.records.accuracy import estimate_score
from stretto.records.figures import FIGURES, SCORE, VERDICT_STEPS, duration_text
from stretto.records.intervals import Z
from stretto.records.metrics import ACCURACY, HELD_OUT_LOSS
from stretto.records.status import State, Verdict

_FEWEST = 10
"""Fewest steps for a trend."""
_APART = 30
"""Number of steps from which on the first 10 and the newest 20 do not overlap."""
_ERRORS = 2.3
"""Standard errors from which on a change counts as real: a two-sided test at 2 %. Of runs that do not change,
about 1 % get each wrong verdict by their rewards, and 1 % by their evaluations."""
_RANK_ERRORS, _CORRELATION = 1.645, 0.5
"""The same for ranks: a two-sided test at 10 % for steps of this correlation, since few steps do not show
theirs; at 1 % for independent ones."""
_PATIENCE = 3
"""Number of newest held-out losses above the lowest one that count as overfitting."""
_LEAST_RISE = 0.1
"""Share of the fall from the first to the lowest held-out loss by which these are above the lowest."""
_LEAST_SHARE = 0.1
"""Share of the time from which on the verdict names a wait."""
_LEAST_AFTER_S = 10.0
"""Fewest seconds after an ended run's last step that the verdict names; also `_LEAST_SHARE` of its time."""
_LEAST_WITHOUT_SIGNAL = 0.3  # share of the groups
_MOST_ADVICE = 2  # pieces of advice that the verdict names
_SAID = frozenset(
    {
        *("reward_collapse", "constant_reward", "zero_variance_groups", "plateau", "evaluation_waits"),
        *("training_waits", "generation_waits", "verifier_bound", "failure_bias"),
        *("late_tickets", "checkpoint_waits"),
    }
)
"""Rules whose problem another clause of the verdict names."""
_WHY_GENERATION = frozenset({"slot_bound", "kv_bound", "lost_prefixes"})  # why generation is slow
_OF_TIME = _WHY_GENERATION | {"slow_swaps"}
"""Rules whose problem takes a share of the time."""
_WAITS: tuple[CauseKind, ...] = tuple(cause for cause in CAUSES if cause != "groups")
"""Causes of waits that are named from `_LEAST_SHARE` on. For groups, the verdict names the bottleneck."""
_PAST = {
    "learning": "learned",
    "flat": "no change",
    "falling": "fell",
    "collapsing": "collapsed",
    "broken": "broken",
    "unknown": "not known whether it learned",
}

Trend = Literal["unknown", "learning", "flat", "falling", "collapsing", "broken"]


@dataclass(frozen=True)
class RunState:
    """Facts that the verdict uses besides the figures."""

    status: State
    steps: int
    trains: bool = True
    """True if the run has steps to train, False if it only evaluates."""
    restarts: int = 0
    """Number of lost workers that were started again."""
    rows_change: bool = False
    """True if a curriculum chooses the rows: rewards of steps are then not comparable."""
    wall_s: float = 0.0
    after_s: float = 0.0
    """Part of `wall_s` after the newest step."""


def verdict(adviser: Adviser, state: RunState) -> Verdict:
    """Return the verdict about a run after its newest step. Views show why a run ended beside the verdict."""
    history = adviser.history
    ended = state.status in ("completed", "interrupted", "failed")
    direction, detail = _trend(adviser, state.rows_change, ended=ended)
    trend_text = f"{_PAST[direction] if ended else direction}: {detail}" if history.lines else ""
    if ended:
        how = "finished" if state.status == "completed" else f"{state.status} at step {state.steps}"
        head = ", ".join(filter(None, [how, trend_text]))
    else:
        head = trend_text or ("waiting for the first step" if state.trains else "")
    named = any(advice.rule == "lost_workers" for advice in adviser.open)
    lost = f"lost workers started again {state.restarts} times" if state.restarts and not named else ""
    is_late = ended and history.lines and state.after_s >= max(_LEAST_AFTER_S, _LEAST_SHARE * state.wall_s)
    after_text = f"it went on for {duration_text(state.after_s)} after its last step" if is_late else ""
    text = "; ".join(filter(None, [head, lost, *_clauses(adviser), after_text]))
    return Verdict(direction if history.lines else "waiting", text)


def _trend(adviser: Adviser, rows_change: bool, *, ended: bool) -> tuple[Trend, str]:
    history = adviser.history
    for advice in adviser.open:
        problem = advice.message.partition("; ")[0]
        if advice.rule == "constant_reward" and not history.varied:  # advice stays open for some steps
            return "broken", problem
        if advice.rule == "reward_collapse":
            return "broken" if history.broken() else "collapsing", problem
    if (rise := _overfitting(history)) is not None:
        return "falling", rise
    losses = history.known(HELD_OUT_LOSS)
    if rows_change and len(losses) > 1:
        change = losses[-1][1] - losses[0][1]
        text = f"held-out loss {_signed(HELD_OUT_LOSS, change)} since step {losses[0][0]}"
        return "learning" if change < 0 else "flat", text
    if rows_change or _left_out(history):
        return _by_evaluations(history.evaluations, "the rows of two steps cannot be compared")
    name = "reward" if history.known("reward") else "loss"
    known = history.known(name)
    change_text = _change(name, known[-VERDICT_STEPS:])
    if len(known) < _FEWEST:
        return "unknown", f"{change_text}, too few to tell"
    direction = trend(known[-VERDICT_STEPS:]) * (1 if name == "reward" else -1)  # 1: better, -1: worse
    has_gained = len(known) >= _APART and history.gain(name) is not None
    if direction < 0:
        return "falling", change_text
    if has_gained and (ended or len(known) <= VERDICT_STEPS):
        return "learning", _change(name, known, history.first[name].mean)
    if direction > 0:
        return "learning", change_text
    held_out_trend, held_out_text = _by_evaluations(history.evaluations, "")
    if held_out_trend in ("learning", "falling"):
        return held_out_trend, f"{held_out_text}, {change_text}"
    gain = (history.recent(name) or 0.0) - history.first[name].mean
    return "flat", f"{change_text}{f', {_signed(name, gain)} since the start' if has_gained else ''}"


def _overfitting(history: History) -> str | None:
    """Return how far the held-out loss is above its lowest value, if it has been so at the newest
    `_PATIENCE` measurements; otherwise None. This is the usual rule of early stopping."""
    losses = history.known(HELD_OUT_LOSS)
    if len(losses) <= _PATIENCE:
        return None
    step, lowest = min(losses, key=lambda each: each[1])
    newest = [loss for later, loss in losses if later > step][-_PATIENCE:]
    # A loss that has come to rest goes up and down a little.
    margin = max(_LEAST_RISE * (losses[0][1] - lowest), 0.01 * abs(lowest))
    if len(newest) < _PATIENCE or min(newest) <= lowest + margin:
        return None
    return f"held-out loss {_signed(HELD_OUT_LOSS, losses[-1][1] - lowest)} since step {step}: it overfits"


def trend(known: Sequence[tuple[int, float]]) -> int:
    """Return whether a figure rises (1), falls (-1) or neither (0).

    `known` has at least 3 (step, figure) pairs, in order. Below 30, ranks decide: few steps are often a curve
    that saturates. Then the least-squares slope counts from 2.3 standard errors on. The error is that for
    independent residuals times √((1 + ρ) / (1 - ρ)), where ρ is their correlation from step to step (Bayley
    and Hammersley 1946). With few steps, more standard errors are needed, as in Student's distribution.
    """
    steps, values = np.array(known, np.float64).T
    if len(steps) < _APART:
        return _trend_by_rank(values)
    count, centred = len(steps), steps - steps.mean()
    slope = float(centred @ values / (centred @ centred))
    residuals = values - values.mean() - slope * centred
    squares = float(residuals @ residuals)
    if squares <= 1e-18 * float(values @ values):  # all on one line
        return int(np.sign(slope)) if abs(slope) > 1e-9 * float(np.abs(values).max()) else 0
    # A fitted line lowers the correlation of its residuals by about 2/n.
    correlation = min(0.9, max(0.0, float(residuals[1:] @ residuals[:-1]) / squares + 2 / count))
    variance = squares / (count - 2) * (1 + correlation) / (1 - correlation)
    error = math.sqrt(variance / float(centred @ centred))
    return int(np.sign(slope)) if abs(slope) > _ERRORS * (1 + 2.2 / (count - 2)) * error else 0


def _trend_by_rank(values: NDArray[np.float64]) -> int:
    """Return the trend by the test of Mann (1945) and Kendall (1975), with its variance for ties times n / n*
    of Yue and Wang (2004) for correlated steps. The last value has to differ from the first one likewise."""
    count, lags = len(values), np.arange(1, len(values))
    values = np.round(values / (np.abs(values).max() or 1.0), 9)  # errors of rounding are no order
    score = float(np.triu(np.sign(values - values[:, None])).sum())  # later values above earlier ones − below
    _, ties = np.unique(values, return_counts=True)
    variance = float(count * (count - 1) * (2 * count + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum()) / 18
    variance *= 1 + 2 * float(((1 - lags / count) * _CORRELATION**lags).sum())
    is_clear = abs(score) > _RANK_ERRORS * math.sqrt(variance) and score * (values[-1] - values[0]) > 0
    return int(np.sign(score)) if is_clear else 0


def _change(name: str, known: Sequence[tuple[int, float]], first: float | None = None) -> str:
    """Return the first and the last figure in words; from 30 steps on, the means of the first and newest 10.
    `first` replaces the former."""
    if not known:
        return f"no finite {name}"
    values = [value for _, value in known]
    count = _FEWEST if len(values) >= _APART else 1
    ends = (fmean(values[:count]) if first is None else first, fmean(values[-count:]))
    steps = known[-1][0] - (0 if first is not None else known[0][0] - 1)
    texts = dict.fromkeys(map(FIGURES[name].text, ends))
    return f"{name} {' → '.join(texts)} in {steps} step{'s' * (steps != 1)}"


def _left_out(history: History) -> bool:
    """Return whether so many groups are filtered that the reward of the rest says little of the policy."""
    lines = list(history.lines)[-VERDICT_STEPS:]
    filtered = sum(
        count
        for line in lines
        for reason, count in line.get("not_trained", {}).items()
        if reason.startswith("filtered: ")
    )
    trained = sum(line.get("ledger", {}).get("trained", 0) for line in lines[-1:])
    trained_before = lines[0].get("ledger", {}).get("trained", 0) if lines else 0
    return filtered > 0 and filtered > 0.1 * (filtered + trained - trained_before)


def _by_evaluations(evaluations: Sequence[HeldOutScore], why: str) -> tuple[Trend, str]:
    """Return the trend to the newest evaluation from an evaluation 60 steps before, or from the first. `why`:
    the reason why the reward shows no trend."""
    if len(evaluations) < 2:
        return "unknown", f"{why}, and there are no two held-out evaluations"
    now, earlier = evaluations[-1], reversed(evaluations[:-1])
    before = next((each for each in earlier if each.version <= now.version - VERDICT_STEPS), evaluations[0])
    estimates = [estimate_score(each.score, each.samples, each.deviation) for each in (now, before)]
    halves = [math.inf if each.ci95 is None else each.ci95 for each in estimates]
    rise, error = now.score - before.score, math.hypot(*halves) / Z
    direction: Trend = "flat" if abs(rise) <= _ERRORS * error else "learning" if rise > 0 else "falling"
    return direction, f"held out {_signed(ACCURACY, rise)} since version {before.version}"


def _clauses(adviser: Adviser) -> Iterator[str]:
    """Yield the verdict's other clauses: the held-out score, groups without a signal, waits, and advice."""
    history = adviser.history
    yield from _held_out(history.evaluations)
    yield from _held_out_loss(history.known(HELD_OUT_LOSS))
    problems = {advice.rule: advice.message.partition("; ")[0] for advice in adviser.open}
    no_signal = history.recent("zero_variance_groups") or 0.0
    if history.varied and no_signal >= _LEAST_WITHOUT_SIGNAL and "truncation" not in problems:
        yield f"{no_signal:.0%} of the groups without signal"
    other_rules = _SAID | _OF_TIME | {"failures"}
    yield from [problem for rule, problem in problems.items() if rule not in other_rules][:_MOST_ADVICE]
    lines = list(history.lines)[-VERDICT_STEPS:]
    costs = [(_failed(lines), problems["failures"])] if "failures" in problems else []
    lines = [line for line in lines if line["step"] > 1]  # step 1 waits for the first groups
    if not lines or "ticket_generate_s" not in lines[-1]:
        yield from (text for _, text in costs)
        return
    part, share = bottleneck(lines)
    total_s = max(total(lines, "step_s"), 1e-9)
    shares: dict[CauseKind, float] = {cause: total(lines, f"wait/{cause}_s") / total_s for cause in CAUSES}
    costs += _times(shares, total(lines, "swap_pause_s") / total_s, problems)
    is_late = shares["late_ticket"] >= 0.005 and not late_alone(lines)
    waited = shares["groups"] + (shares["late_ticket"] if is_late else 0.0)
    late = ", late tickets among them" if is_late else ""
    waits = f"training waits {waited:.0%} of the time for groups{late}"
    if part == "verification":
        used = verifiers_used(lines)
        work = f"they work {used:.0%} of the time, and " if used else ""
        costs.append((share, f"bound by verifiers (rewards and tools): {work}{waits}"))
    yield from (text for _, text in sorted(costs, key=lambda cost: -cost[0]))
    if part == "training":
        yield f"bound by training, which works {share:.0%} of the time"
    elif part == "workflow":
        own_s, ticket_s = (total(lines, name) / len(lines) for name in ("ticket_own_s", "ticket_s"))
        yield f"bound by the workflow's own work, {own_s:.2g} of the {ticket_s:.2g} s of a ticket: {waits}"
    elif part == "generation" and not _WHY_GENERATION & problems.keys():
        yield f"bound by generation: {waits}"


def _held_out(evaluations: Sequence[HeldOutScore]) -> Iterator[str]:
    if evaluations:
        newest, best = evaluations[-1], max(evaluations, key=lambda each: each.score)
        interval = estimate_score(newest.score, newest.samples, newest.deviation).ci95
        text = f"held out {SCORE.text(newest.score)}"
        text += "" if interval is None else f" ± {SCORE.text(interval)}"
        if len(evaluations) == 1:
            yield f"{text} at version {newest.version}"
        elif best.score == newest.score:
            yield f"{text}, the best so far"
        else:
            yield f"{text}, best at version {best.version}"


def _held_out_loss(losses: Sequence[tuple[int, float]]) -> Iterator[str]:
    if losses:
        step, _ = min(losses, key=lambda each: each[1])
        which = "the lowest so far" if losses[-1][0] == step else f"lowest after step {step}"
        text = f"held-out loss {FIGURES[HELD_OUT_LOSS].text(losses[-1][1])}"
        yield text if len(losses) == 1 else f"{text}, {which}"


def _failed(lines: Sequence[Mapping[str, Any]]) -> float:
    first, last = (line.get("ledger", {}) for line in (lines[0], lines[-1]))
    failed, trained = (last.get(name, 0) - first.get(name, 0) for name in ("failed", "trained"))
    return failed / max(1, failed + trained)


def _times(
    shares: Mapping[CauseKind, float], paused: float, problems: Mapping[str, str]
) -> Iterator[tuple[float, str]]:
    """Yield what takes time, with its share. `paused`: share of the time in which swaps stop the engines; a
    wait that it causes may count as one for an evaluation, to which the engine is lent."""
    for cause in _WAITS:
        if cause == "swap" and "slow_swaps" in problems:
            yield max(shares[cause], paused), problems["slow_swaps"]
        elif shares[cause] >= _LEAST_SHARE:
            words = FIGURES[f"wait/{cause}_s"].label.removeprefix("wait for ")
            yield shares[cause], f"{words} took {shares[cause]:.0%} of the time"
    for rule in sorted(_WHY_GENERATION & problems.keys()):
        yield shares["groups"], problems[rule]


def _signed(name: str, value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{FIGURES[name].text(abs(value))}"
