"""The tracker `my_name`: the newest figures of the run in one text file, for a status page or a shell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stretto import Component, Context, Tracker, TrackerConfig, hookimpl
from stretto.tracker import figures, tracker_folder


class MyName(Tracker):
    """Overwrites `RUN/trackers/my_name/latest.txt`. What it does not define, it does not need."""

    def __init__(self, config: TrackerConfig, context: Context) -> None:
        self._file = tracker_folder(config, context) / "latest.txt"

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Write one line for each figure of the step."""
        lines = [
            f"step {metrics['step']}",
            *(f"{name} {value:g}" for name, value in figures(metrics).items()),
        ]
        self._file.write_text("\n".join(lines) + "\n")


@hookimpl
def stretto_tracker() -> Iterator[Component[TrackerConfig]]:
    """The component of this package."""
    yield Component("my_name", MyName, TrackerConfig, "the newest figures in one text file")
