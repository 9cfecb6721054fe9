"""The clocks of kernel, bus, workers and serving: what a simulation replaces is in one place."""

from __future__ import annotations

import time


def now() -> float:
    """Seconds of the monotonic clock, for durations and deadlines. An event loop's time is the same clock."""
    return time.monotonic()


def wall() -> float:
    """Seconds since 1970, for people and records. It may jump."""
    return time.time()
