"""The clocks of kernel, bus, workers and serving: one module, so that a simulation can replace them."""

import time


def now() -> float:
    """Return the seconds of the monotonic clock, also an event loop's, for durations and deadlines."""
    return time.monotonic()


def wall() -> float:
    """Return the seconds since 1970, for people and records. The clock may jump."""
    return time.time()
