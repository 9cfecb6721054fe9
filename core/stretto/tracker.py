"""The contract of trackers: they receive each step's figures and the end of the run, in the kernel.

`metrics.jsonl` and `summary.json` in the run's folder are written whether or not there is a tracker.
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
    """Made once in the kernel. An exception is logged with the tracker's name; the run goes on."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """One train step: the object that is also a line of `metrics.jsonl`. Must not block."""
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended; `summary` is what `summary.json` holds."""
        ...
