"""Where the milliseconds of a step go: the parts of a real run's steps, from its own trace.

    python benchmarks/step_parts.py [--file RUN.yaml] [--skip 5] [key=value ...]
    python benchmarks/step_parts.py --run FOLDER

The benchmark runs a run file (the quickstart with 30 steps) with `tracing.share: 0`, which traces the steps
and no tickets, and prints a table. `--run` reads the folder of a run that was traced so. A part's time is
without the parts below it. The time of a step is from its beginning to the beginning of the next one. Parts
that run while the next step computes are listed apart. `rest` is the share of a step's time that is neither
forward nor backward. The medians over the steps count. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from whole_runs import QUICKSTART, summary_of

__all__ = ["Parts", "parts_of"]

ARITHMETIC = "forward and backward"
SWAPS = ("swap", "engine swap")
"""Spans of a step's trace that are about its version, in other processes."""
FIRST = 5


@dataclass(frozen=True)
class _Span:
    name: str
    id: str
    parent: str
    start: int
    """Unix time in ns, as `end`."""
    end: int


@dataclass(frozen=True)
class Parts:
    """The parts of a typical step, in ms."""

    step: float
    """From the beginning of a step to the beginning of the next one."""
    within: Mapping[str, float]
    """Part -> its time within the step, without the parts below it; they add up to `step`, more or less."""
    beside: Mapping[str, float]
    """Part -> the time that it takes beside the next step."""

    @property
    def rest(self) -> float:
        """Share of the step that is neither forward nor backward."""
        return 1 - self.within[ARITHMETIC] / self.step

    def table(self) -> str:
        """Return the parts, longest first."""
        lines = [f"{'part of a step':32} {'ms':>8} {'share':>7}"]
        lines += [
            f"{name:32} {ms:>8.2f} {ms / self.step:>7.3f}"
            for name, ms in sorted(self.within.items(), key=lambda part: -part[1])
        ]
        lines.append(f"{'a step':32} {self.step:>8.2f} {1:>7.3f}")
        lines += [f"{'beside the next: ' + name:32} {ms:>8.2f}" for name, ms in self.beside.items()]
        return "\n".join(lines)


def parts_of(run: Path, skip: int = FIRST) -> Parts:
    """Return the parts of the steps of a traced run.

    Args:
        run: the run's folder.
        skip: number of first steps to leave out.
    """
    spans = list(_spans(run / "traces"))
    steps = sorted((span for span in spans if span.name == "step"), key=lambda span: span.start)[skip:]
    below: dict[str, list[_Span]] = {}
    for span in spans:
        below.setdefault(span.parent, []).append(span)
    within: list[dict[str, float]] = []
    beside: list[dict[str, float]] = []
    periods: list[float] = []
    for step, following in pairwise(steps):
        periods.append((following.start - step.start) / 1e6)
        own: dict[str, float] = {"between steps": (following.start - step.end) / 1e6}
        after: dict[str, float] = {}
        _add(step, below, following.start, own, after)
        within.append(own)
        beside.append(after)
    return Parts(statistics.median(periods), _medians(within), _medians(beside))


def _add(
    span: _Span,
    below: Mapping[str, Sequence[_Span]],
    limit: int,
    own: dict[str, float],
    after: dict[str, float],
) -> None:
    """Add the span's time and those of the spans below it to `own`, each without the spans below it. What is
    after `limit`, the beginning of the next step, goes to `after`."""
    children = [child for child in below.get(span.id, ()) if child.name not in SWAPS]
    covered = sum(min(child.end, span.end) - child.start for child in children if child.start < span.end)
    late = max(0, span.end - max(span.start, limit))
    own[span.name] = own.get(span.name, 0.0) + max(0, span.end - span.start - late - covered) / 1e6
    if late:
        after[span.name] = after.get(span.name, 0.0) + late / 1e6
    for child in children:
        _add(child, below, limit, own, after)


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def _spans(folder: Path) -> Iterator[_Span]:
    for file in folder.glob("*.jsonl"):
        for line in file.open():
            for resource in json.loads(line)["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    yield from map(_span, scope["spans"])


def _span(data: Mapping[str, Any]) -> _Span:
    return _Span(
        data["name"],
        data["spanId"],
        data.get("parentSpanId", ""),
        int(data["startTimeUnixNano"]),
        int(data["endTimeUnixNano"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--file", type=Path, default=QUICKSTART, help="run file")
    parser.add_argument("--run", type=Path, help="folder of a run that was traced")
    parser.add_argument("--skip", type=int, default=FIRST, help="first steps to leave out")
    parser.add_argument("overrides", nargs="*", help="key=value of the run file")
    options = parser.parse_args()
    if options.run is not None:
        parts, overlap = parts_of(options.run, options.skip), None
    else:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "run")
            given = ("tracing.share=0", "steps=30", "evaluation=null", *options.overrides)
            overlap = summary_of(options.file, out, *given)["overlap"]
            parts = parts_of(out, options.skip)
    print(parts.table())
    figures: dict[str, Any] = {
        "step_ms": round(parts.step, 1),
        "forward_backward_ms": round(parts.within[ARITHMETIC], 1),
        "rest": round(parts.rest, 3),
        "overlap": overlap,
        "parts_ms": {name: round(ms, 2) for name, ms in parts.within.items()},
        "beside_ms": {name: round(ms, 2) for name, ms in parts.beside.items()},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
