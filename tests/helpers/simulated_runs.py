"""Whole runs in the simulation, with faults at moments that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stretto.records.timeline import WorkerChanged, read_timeline
from stretto.testing.simulation import Fault, Outcome, Tape, run_tape, story
from universes import small


class SimulatedRun:
    """A run that has ended: its outcome, and its folder."""

    def __init__(self, tape: Tape, outcome: Outcome, folder: Path) -> None:
        self.tape, self.outcome, self.folder = tape, outcome, folder

    def said(self, text: str) -> list[str]:
        """Lines of the log with this text, in order."""
        return [line for line in self.outcome.log if text in line]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` that are of steps."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "train_s" in line]

    def changes(self) -> list[tuple[str, str]]:
        """(worker, new state) of the run's workers, in order."""
        events = read_timeline(self.folder)
        return [(each.worker, each.state) for each in events if isinstance(each, WorkerChanged)]

    def assert_completed(self, steps: int) -> dict[str, Any]:
        """It has passed all oracles, with each step once in its metrics. Returns the summary."""
        assert not self.outcome.failed, "\n".join(story(self.tape, self.outcome, last=60))
        summary = self.summary()
        assert (summary["status"], summary["version"]) == ("completed", steps)
        assert [line["step"] for line in self.metrics()] == list(range(1, steps + 1))
        return summary


def simulate(
    folder: Path,
    *faults: Fault,
    between: Callable[[Path], None] = lambda folder: None,
    **sections: Any,
) -> SimulatedRun:
    """Run a small run of the mocks with these faults. Keys of `sections` replace those of its sections.

    Args:
        folder: gets the run's folder.
        between: called before each kernel but the first, with the run's folder.
    """
    calm = small(2, faults=0)
    run = dict(calm.run)
    for key, value in sections.items():
        before = run.get(key)
        run[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    tape = msgspec.structs.replace(calm, run=run, faults=faults)
    return SimulatedRun(tape, run_tape(tape, folder, between), folder)
