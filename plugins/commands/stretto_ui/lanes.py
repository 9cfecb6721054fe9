"""The timeline of a run in a window, as lanes of spans that fit the pixels of a screen.

Spans of one kind that are narrower than a pixel become one span, which says how many they are and how long
they were busy. So the whole of a long run and one step of it take about the same time to send and to draw.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from stretto.charts import part_texts
from stretto.run_folder import (
    CallSpan,
    EvaluationSpan,
    Event,
    KernelEnded,
    KernelStarted,
    RunFolder,
    StepSpan,
    SwapSpan,
    TicketDone,
    TicketIssued,
    TicketRetired,
    TicketTaken,
    WorkerChanged,
)

_MARGIN_S = 60.0
"""Read this much before and beyond the window, or its length if that is more: a span is written down when it
is over, and the waits before a step are written down with the step."""
_MOST_ROWS = 24
"""Most rows of tickets that are drawn one by one for a worker; the others are counted."""
_MOST_TICKETS = 1500
"""Most tickets in a window that are drawn one by one. Beyond, the lane shows how many are in flight."""
_STEPS_SHOWN = 12
"""Number of newest steps of the window that is shown at first."""


LaneKind = Literal["steps", "evaluations", "calls", "swaps", "tickets", "flight"]


class LaneSpan(msgspec.Struct, omit_defaults=True):
    """Something that took time."""

    start: float
    """Unix seconds, like `end`."""
    end: float
    kind: str
    """What the page colours: `step`, `wait`, `evaluation`, `call`, `swap`, `train`, `eval`."""
    text: str
    """What it was, in words."""
    part: str = ""
    """Of a step or a wait: the part of a step's time, a key of `STEP_PARTS`."""
    count: int = 1
    """Number of spans that this one stands for."""
    busy_s: float = 0.0
    """Seconds of the spans that this one stands for, if they are several."""
    row: int = 0
    """Row of the lane."""
    ticket: int | None = None
    score: float = 0.0
    """Share of a ticket's time in which a verifier worked."""


class Lane(msgspec.Struct):
    """One line of the picture, of one or more rows."""

    name: str
    kind: LaneKind
    spans: list[LaneSpan]
    rows: int = 1
    flight: list[float] = []
    """Tickets in flight at equal distances over the window, for a lane of kind `flight`."""


class Mark(msgspec.Struct):
    """A moment."""

    time: float
    text: str


class Lanes(msgspec.Struct):
    """The timeline in a window."""

    begun: float
    """First and last moment of the whole timeline, in Unix seconds."""
    ended: float
    start: float
    end: float
    lanes: list[Lane]
    marks: list[Mark]
    """Kernels that began or ended, and workers that were lost."""
    parts: list[tuple[str, str, float]]
    """Where the time of the steps in the window went, the longest part first: key, words, seconds."""


def lanes(run: RunFolder, start: float | None, end: float | None, width: int) -> Lanes | None:
    """Return the timeline of a run in a window; None if it has none.

    Args:
        start, end: Unix seconds; by default the newest steps.
    """
    bounds = run.time_range()
    if bounds is None:
        return None
    begun, ended = bounds
    end = ended if end is None else end
    start = _newest_steps(run, ended, begun) if start is None else start
    margin = max(_MARGIN_S, end - start)
    events = list(run.events(since=start - margin, until=end + margin))
    pixel = (end - start) / max(1, width)
    steps = _within(_steps(events), start, end)
    found = [Lane("steps", "steps", _merge(steps, pixel))]
    for (kind, name), spans in _spans(events).items():
        found.append(Lane(name, kind, _merge(_within(spans, start, end), pixel)))
    open_until = ended if end + margin >= ended else None
    found += _tickets(events, start, end, width, open_until)
    marks = [mark for event in events if (mark := _mark(event)) and start <= mark.time <= end]
    return Lanes(begun, ended, start, end, found, marks, part_texts(_totals(steps, start, end)))


def _newest_steps(run: RunFolder, ended: float, begun: float) -> float:
    """Return the beginning of the newest steps: it looks back further until it finds enough of them."""
    back = 30.0
    while True:
        since = max(begun, ended - back)
        steps = [event for event in run.events(since=since) if isinstance(event, StepSpan)]
        if len(steps) > _STEPS_SHOWN:
            return steps[-_STEPS_SHOWN - 1].time
        if since == begun:
            return begun
        back *= 4


def _steps(events: Sequence[Event]) -> list[LaneSpan]:
    spans: list[LaneSpan] = []
    for event in events:
        if not isinstance(event, StepSpan):
            continue
        for cause, start, end in event.wait_spans():
            text = f"wait before step {event.version}: {cause}"
            spans.append(LaneSpan(start, end, "wait", text, f"wait/{cause.kind}_s"))
        text = f"step {event.version}: {len(event.tickets)} tickets"
        spans.append(LaneSpan(event.start, event.time, "step", text, "train_s"))
    return spans


def _totals(steps: Iterable[LaneSpan], start: float, end: float) -> list[tuple[str, float]]:
    """Add up the spans in the window by their part of a step, the longest first."""
    totals: defaultdict[str, float] = defaultdict(float)
    for span in steps:
        totals[span.part] += min(end, span.end) - max(start, span.start)
    return sorted(((each, round(seconds, 3)) for each, seconds in totals.items()), key=lambda each: -each[1])


def _spans(events: Iterable[Event]) -> dict[tuple[LaneKind, str], list[LaneSpan]]:
    """Return the evaluations, the calls of each worker group, and the swaps of each inference worker, by kind
    and name of the lane. The lanes are in the order of the picture."""
    spans: defaultdict[tuple[LaneKind, str], list[LaneSpan]] = defaultdict(list)
    for event in events:
        match event:
            case EvaluationSpan():
                counts = f"{event.samples} samples, {event.failed} failed"
                text = f"evaluation of version {event.version}: {event.score}, {counts}"
                span = LaneSpan(event.start, event.time, "evaluation", text)
                spans["evaluations", "evaluation"].append(span)
            case CallSpan():
                text = f"{event.call} at version {event.version}: {event.seconds:.3f} s of work"
                spans["calls", event.group].append(LaneSpan(event.start, event.time, "call", text))
            case SwapSpan():
                text = f"swap to version {event.version}: paused {event.pause_s:.4f} s"
                spans["swaps", event.worker].append(LaneSpan(event.start, event.time, "swap", text))
            case _:
                pass
    order: tuple[LaneKind, ...] = ("evaluations", "calls", "swaps")
    return dict(sorted(spans.items(), key=lambda each: (order.index(each[0][0]), each[0][1])))


def _tickets(
    events: Sequence[Event], start: float, end: float, width: int, open_until: float | None
) -> list[Lane]:
    """Return a lane for each rollout worker with its tickets: one by one if they are few, or else how many
    were in flight.

    Args:
        open_until: the end of the timeline, up to which tickets that are not done are drawn; None if the
            events end before it, so that it is not known which these are.
    """
    named: defaultdict[str, list[LaneSpan]] = defaultdict(list)
    retired = {
        (event.purpose, event.ticket): f"; {event.account}: {event.reason}"
        for event in events
        if isinstance(event, TicketRetired)
    }
    for event in events:
        if isinstance(event, TicketDone) and event.time - event.seconds < end and event.time > start:
            what = "ticket" if event.purpose == "train" else "evaluation ticket"
            text = (
                f"{what} {event.ticket}: {event.seconds:.3f} s, generation {event.generate_s:.3f} s, "
                f"scoring {event.score_s:.3f} s; {event.samples} samples, {event.tokens} tokens, "
                f"reward {event.reward:.4g}, oldest token of version {event.oldest}"
                f"{retired.get((event.purpose, event.ticket), '')}"
            )
            span = LaneSpan(event.time - event.seconds, event.time, event.purpose, text, ticket=event.ticket)
            span.score = min(1.0, event.score_s / event.seconds) if event.seconds else 0.0
            named[event.worker].append(span)
    for span, worker in _open_tickets(events, open_until) if open_until is not None else ():
        named[worker].append(span)
    if sum(map(len, named.values())) > _MOST_TICKETS:
        return [
            Lane(name, "flight", [], flight=_flight(named[name], start, end, width)) for name in sorted(named)
        ]
    found: list[Lane] = []
    for name in sorted(named):
        spans = sorted(named[name], key=lambda span: span.start)
        found.append(Lane(name, "tickets", spans, rows=_pack(spans)))
    return found


def _open_tickets(events: Iterable[Event], until: float) -> list[tuple[LaneSpan, str]]:
    """Return the tickets that workers have taken and not finished, with the worker of each."""
    taken: dict[tuple[str, int], TicketTaken] = {}
    for event in events:
        if isinstance(event, TicketTaken):
            taken[event.purpose, event.ticket] = event
        elif isinstance(event, (TicketDone, TicketRetired, TicketIssued)):
            taken.pop((event.purpose, event.ticket), None)
        elif isinstance(event, (KernelStarted, KernelEnded)):
            taken.clear()
    return [
        (
            LaneSpan(each.time, until, each.purpose, f"ticket {each.ticket}: in flight", ticket=each.ticket),
            each.worker,
        )
        for each in taken.values()
        if each.time < until
    ]


def _pack(spans: Sequence[LaneSpan]) -> int:
    """Give each span the first row that is free; return the number of rows."""
    ends: list[float] = []
    for span in spans:
        row = next((row for row, end in enumerate(ends) if end <= span.start), len(ends))
        if row == _MOST_ROWS:  # the fullest picture that can still be read: draw over the row that ends first
            row = min(range(_MOST_ROWS), key=ends.__getitem__)
        if row == len(ends):
            ends.append(span.end)
        ends[row] = max(ends[row], span.end)
        span.row = row
    return max(1, len(ends))


def _flight(spans: Sequence[LaneSpan], start: float, end: float, width: int) -> list[float]:
    """Return how many of the spans are open in the middle of each pixel."""
    starts, ends = sorted(span.start for span in spans), sorted(span.end for span in spans)
    pixel = (end - start) / width
    moments = [start + (place + 0.5) * pixel for place in range(width)]
    return [float(bisect_right(starts, moment) - bisect_right(ends, moment)) for moment in moments]


def _within(spans: Iterable[LaneSpan], start: float, end: float) -> list[LaneSpan]:
    return sorted(
        (span for span in spans if span.end > start and span.start < end), key=lambda span: span.start
    )


def _merge(spans: Sequence[LaneSpan], pixel: float) -> list[LaneSpan]:
    """Join spans of one kind and part that are narrower than a pixel and less than a pixel apart."""
    merged: dict[tuple[str, str], LaneSpan] = {}
    kept: list[LaneSpan] = []
    for span in spans:
        same = span.kind, span.part
        before = merged.get(same)
        if span.end - span.start >= pixel:
            merged.pop(same, None)
            kept.append(span)
        elif before is None or span.start - before.end >= pixel or before.end - before.start >= 8 * pixel:
            merged[same] = msgspec.structs.replace(span, busy_s=span.end - span.start)
            kept.append(merged[same])
        else:
            before.end = max(before.end, span.end)
            before.count += 1
            before.busy_s += span.end - span.start
    return kept


def _mark(event: Event) -> Mark | None:
    if isinstance(event, KernelStarted):
        return Mark(
            event.time, f"a kernel began at version {event.version} (lease epoch {event.lease_epoch})"
        )
    if isinstance(event, KernelEnded):
        return Mark(event.time, f"the run ended: {event.status}")
    if isinstance(event, WorkerChanged) and event.state == "lost":
        return Mark(event.time, f"{event.worker} was lost: {event.how}")
    if isinstance(event, WorkerChanged) and event.state == "left":
        return Mark(event.time, f"{event.worker} left: {event.how}")
    return None
