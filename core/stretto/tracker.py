"""The contract of trackers: in the kernel, a tracker receives the metrics of each step and the run's summary.

The run writes `metrics.jsonl` and `summary.json` into its folder with or without a tracker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

__all__ = ["Tracker", "TrackerConfig"]


class TrackerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every tracker's section."""

    use: str
    """Name of the tracker."""


class Tracker(Protocol):
    """A tracker. The kernel makes it once. It logs an exception with the tracker's name, and the run goes
    on."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of one train step, the same object as in `metrics.jsonl`. Must not block."""
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the end of the run; `summary` is the content of `summary.json`."""
        ...
