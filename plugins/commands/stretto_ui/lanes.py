"""The timeline of a run in a window, as lanes of spans that fit the pixels of a screen.

Spans of one kind that are narrower than a pixel are joined to one span with their number and total time, and
steps narrower than 3 pixels to a stack of the parts of their time. So a whole long run takes about the same
time to send and to draw as one of its steps.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from stretto.records.charts import STEP_PARTS, part_texts
from stretto.records.run_folder import Attempt, RunFolder, RunHistory, StepSpan, is_figure

_MARGIN_S = 60.0
"""Seconds to read around the window, or its length if that is longer: spans are written at their end."""
_MOST_ROWS = 24
"""Maximum rows of tickets per worker."""
_MOST_TICKETS = 1500
"""Maximum tickets in a window to draw one by one. Above it, lanes show the number in flight."""
_STEPS_SHOWN = 12  # in the default window
_LEAST_PIXELS = 3  # of a step that is drawn by itself, and of a column of narrower steps
_SHARES = (
    "slots_used",
    "kv_used",
    "verifiers_used",
    "cores_idle",
    "memory_used",
)  # figures of steps with a lane

LaneKind = Literal["steps", "times", "evaluations", "calls", "swaps", "tickets", "flight", "share"]


class LaneSpan(msgspec.Struct, omit_defaults=True):
    """An activity with a start and an end."""

    start: float
    """Unix seconds, like `end`."""
    end: float
    kind: str
    """`step`, `wait`, `evaluation`, `call`, `swap`, `train` or `eval`; sets the colour."""
    text: str
    part: str = ""
    """Key of `STEP_PARTS`, for a step or a wait."""
    count: int = 1
    busy_s: float = 0.0
    """Total seconds of the `count` spans that were joined to this span."""
    row: int = 0
    ticket: int | None = None
    score: float = 0.0
    """Share of a ticket's time in which a verifier worked."""


class Lane(msgspec.Struct):
    """One named lane of the timeline, with one or more rows."""

    name: str
    kind: LaneKind
    spans: list[LaneSpan]
    rows: int = 1
    values: list[float] = []
    """At equal distances over the window: tickets in flight for a lane of kind `flight`, the figure `name` of
    the steps for one of kind `share`."""
    times: dict[str, list[float]] = {}
    """Key of `STEP_PARTS` -> its share of the time at equal distances, for a lane of kind `times`."""


class Mark(msgspec.Struct):
    """A moment with a text."""

    time: float
    text: str


class Lanes(msgspec.Struct):
    """The timeline in a window."""

    begun: float
    """`begun` and `ended`: bounds of the whole timeline, in Unix seconds."""
    ended: float
    start: float
    end: float
    lanes: list[Lane]
    marks: list[Mark]
    """Kernels that began or ended, and lost workers."""
    parts: list[tuple[str, str, float]]
    """(key, words, seconds) of the steps' time in the window, the longest part first."""


def lanes(run: RunFolder, start: float | None, end: float | None, width: int) -> Lanes | None:
    """Return the timeline in a window (Unix seconds; default: the newest steps); None if the run has none."""
    bounds = run.time_range()
    if bounds is None:
        return None
    begun, ended = bounds
    end = ended if end is None else end
    if start is None:
        start = float(run.steps[-_STEPS_SHOWN - 1]["time"]) if len(run.steps) > _STEPS_SHOWN else begun
    margin = max(_MARGIN_S, end - start)
    history = RunHistory.of(run.events(since=start - margin, until=end + margin))
    pixel = (end - start) / max(1, width)
    steps = _within(_steps(history.steps), start, end)
    is_narrow = (end - start) < _LEAST_PIXELS * pixel * sum(span.kind == "step" for span in steps)
    all_lanes = [
        Lane("steps", "times", [], times=_times(steps, start, end, max(1, width // _LEAST_PIXELS)))
        if is_narrow
        else Lane("steps", "steps", _merge(steps, pixel)),
        *_shares(run.steps, start, end, width),
    ]
    for (kind, name), spans in _spans(history).items():
        all_lanes.append(Lane(name, kind, _merge(_within(spans, start, end), pixel)))
    open_until = ended if end + margin >= ended else None
    all_lanes += _tickets(history.attempts, start, end, width, open_until)
    marks = [mark for mark in _marks(history) if start <= mark.time <= end]
    return Lanes(begun, ended, start, end, all_lanes, marks, part_texts(_totals(steps, start, end)))


def _steps(steps: Iterable[StepSpan]) -> list[LaneSpan]:
    spans: list[LaneSpan] = []
    for step in steps:
        for cause, start, end in step.waits():
            text = f"wait before step {step.version}: {cause}"
            spans.append(LaneSpan(start, end, "wait", text, f"wait/{cause.kind}_s"))
        text = f"step {step.version}: {len(step.figures.tickets)} tickets"
        spans.append(LaneSpan(step.began, step.trained, "step", text, "train_s"))
        if step.trained < step.ended:
            text = f"step {step.version}: publication of its weights"
            spans.append(LaneSpan(step.trained, step.ended, "wait", text, "wait/publication_s"))
    return spans


def _times(steps: Iterable[LaneSpan], start: float, end: float, count: int) -> dict[str, list[float]]:
    """Return part -> its share of the time in each of `count` columns of equal width."""
    column_s = (end - start) / count
    times = {part: [0.0] * count for part in STEP_PARTS}
    for span in steps:
        left, right = ((moment - start) / column_s for moment in (max(start, span.start), min(end, span.end)))
        for column in range(int(left), min(count, math.ceil(right))):
            times[span.part][column] += min(right, column + 1) - max(left, column)
    return {part: shares for part, shares in times.items() if any(shares)}


def _shares(lines: Sequence[Mapping[str, Any]], start: float, end: float, width: int) -> Iterator[Lane]:
    """Yield a lane for each figure that says how much of something is used; it is 0 after the last step."""
    moments = _moments(start, end, width)
    for key in _SHARES:
        known = [(float(line["time"]), float(line[key])) for line in lines if is_figure(line.get(key))]
        if known:
            ends, values = [time for time, _ in known], [*(value for _, value in known), 0.0]
            yield Lane(key, "share", [], values=[values[bisect_left(ends, moment)] for moment in moments])


def _totals(steps: Iterable[LaneSpan], start: float, end: float) -> list[tuple[str, float]]:
    totals: defaultdict[str, float] = defaultdict(float)
    for span in steps:
        totals[span.part] += min(end, span.end) - max(start, span.start)
    return sorted(((each, round(seconds, 3)) for each, seconds in totals.items()), key=lambda each: -each[1])


def _spans(history: RunHistory) -> dict[tuple[LaneKind, str], list[LaneSpan]]:
    """Return spans by kind and name of their lane, in the order of the lanes."""
    spans: defaultdict[tuple[LaneKind, str], list[LaneSpan]] = defaultdict(list)
    for span in history.evaluations:
        counts = f"{span.result.samples} samples, {span.result.failed} failed"
        text = f"evaluation of version {span.result.version}: {span.score}, {counts}"
        spans["evaluations", "evaluation"].append(LaneSpan(span.began, span.ended, "evaluation", text))
    for call in sorted(history.calls, key=lambda call: call.figures.group):
        facts = call.figures
        text = f"{facts.call} at version {facts.version}: {facts.seconds:.3f} s of work"
        spans["calls", facts.group].append(LaneSpan(facts.began, call.ended, "call", text))
    for swap in sorted(history.swaps, key=lambda swap: swap.figures.worker):
        facts = swap.figures
        text = f"swap to version {facts.version}: paused {facts.pause_s:.4f} s"
        spans["swaps", facts.worker].append(LaneSpan(facts.began, swap.ended, "swap", text))
    return spans


def _tickets(
    attempts: Iterable[Attempt], start: float, end: float, width: int, open_until: float | None
) -> list[Lane]:
    """Return a lane for each rollout worker: with its tickets one by one if they are few, else with their
    number in flight. Unfinished tickets are drawn up to `open_until`. None: the events end before the
    timeline, so unfinished tickets are not known."""
    named: defaultdict[str, list[LaneSpan]] = defaultdict(list)
    for attempt in attempts:
        span = _ticket(attempt, open_until)
        if span is not None and span.start < end and span.end > start:
            named[attempt.worker].append(span)
    if sum(map(len, named.values())) > _MOST_TICKETS:
        return [
            Lane(name, "flight", [], values=_flight(named[name], start, end, width)) for name in sorted(named)
        ]
    result: list[Lane] = []
    for name in sorted(named):
        spans = sorted(named[name], key=lambda span: span.start)
        result.append(Lane(name, "tickets", spans, rows=_pack(spans)))
    return result


def _ticket(attempt: Attempt, open_until: float | None) -> LaneSpan | None:
    """Return the span of an attempt that a worker has finished or is working on; None for others."""
    done, start, number = attempt.done, attempt.start, attempt.ticket
    if done is None or attempt.ended is None:
        if attempt.outcome != "open" or attempt.taken is None or open_until is None:
            return None
        return LaneSpan(start, open_until, attempt.purpose, f"ticket {number}: in flight", ticket=number)
    fate = f"; {attempt.outcome}: {attempt.reason}" if attempt.reason else ""
    text = (
        f"{'ticket' if attempt.purpose == 'train' else 'evaluation ticket'} {number}: {done.seconds:.3f} s, "
        f"generation {done.generate_s:.3f} s, scoring {done.score_s:.3f} s; {done.samples} samples, "
        f"{done.tokens} tokens, reward {done.reward:.4g}, oldest token of version {done.oldest}{fate}"
    )
    start = attempt.ended - done.seconds
    span = LaneSpan(start, attempt.ended, attempt.purpose, text, ticket=number)
    span.score = min(1.0, done.score_s / done.seconds) if done.seconds else 0.0
    return span


def _pack(spans: Sequence[LaneSpan]) -> int:
    """Assign the first free row to each span; return the number of rows."""
    ends: list[float] = []
    for span in spans:
        row = next((row for row, end in enumerate(ends) if end <= span.start), len(ends))
        if row == _MOST_ROWS:  # no more rows could be read: draw over the row that ends first
            row = min(range(_MOST_ROWS), key=ends.__getitem__)
        if row == len(ends):
            ends.append(span.end)
        ends[row] = max(ends[row], span.end)
        span.row = row
    return max(1, len(ends))


def _flight(spans: Sequence[LaneSpan], start: float, end: float, width: int) -> list[float]:
    starts, ends = sorted(span.start for span in spans), sorted(span.end for span in spans)
    moments = _moments(start, end, width)
    return [float(bisect_right(starts, moment) - bisect_right(ends, moment)) for moment in moments]


def _moments(start: float, end: float, width: int) -> list[float]:
    pixel = (end - start) / width
    return [start + (column + 0.5) * pixel for column in range(width)]


def _within(spans: Iterable[LaneSpan], start: float, end: float) -> list[LaneSpan]:
    return sorted(
        (span for span in spans if span.end > start and span.start < end), key=lambda span: span.start
    )


def _merge(spans: Sequence[LaneSpan], pixel: float) -> list[LaneSpan]:
    """Join spans of one kind and part that are narrower than a pixel and less than a pixel apart."""
    merged: dict[tuple[str, str], LaneSpan] = {}
    result: list[LaneSpan] = []
    for span in spans:
        key = span.kind, span.part
        last = merged.get(key)
        if span.end - span.start >= pixel:
            merged.pop(key, None)
            result.append(span)
        elif last is None or span.start - last.end >= pixel or last.end - last.start >= 8 * pixel:
            merged[key] = msgspec.structs.replace(span, busy_s=span.end - span.start)
            result.append(merged[key])
        else:
            last.end = max(last.end, span.end)
            last.count += 1
            last.busy_s += span.end - span.start
    return result


def _marks(history: RunHistory) -> Iterator[Mark]:
    for kernel in history.kernels:
        version, epoch = kernel.version, kernel.lease_epoch
        yield Mark(kernel.began, f"a kernel began at version {version} (lease epoch {epoch})")
        if kernel.ended is not None and kernel.status:
            yield Mark(kernel.ended, f"the run ended: {kernel.status}")
    for life in history.lives:
        if life.ended is not None and life.how:
            text = life.how if life.how.startswith("left: ") else f"was lost: {life.how}"
            yield Mark(life.ended, f"{life.worker} {text}")
