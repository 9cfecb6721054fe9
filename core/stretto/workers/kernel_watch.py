"""A worker's view of its kernel: alive, standing still, or gone."""

from pathlib import Path

from stretto.bus.guard import has_owner
from stretto.bus.health import sleep_and_measure_delay
from stretto.bus.lock import KernelLock
from stretto.machine import clock

_SILENT_S = 2.0
"""Beacons come every second. After this many seconds without one, the watch looks at the lock."""


class KernelWatch:
    """Detects that the kernel is gone. A worker that sees the run's lock waits `grace_s` without beacon and
    lock, and so survives a hanging kernel or bus. Another worker waits `outage_s` without a beacon."""

    def __init__(self, lock: KernelLock, *, grace_s: float, outage_s: float) -> None:
        self._grace_s, self._outage_s = grace_s, outage_s
        self.follow(lock)

    def follow(self, lock: KernelLock) -> None:
        self._lock = lock
        self._sees_lock = lock.visible
        self._limit_s = self._grace_s if self._sees_lock else self._outage_s
        self._heard_at = clock.now()

    def hear(self) -> None:
        """Record that a beacon has arrived."""
        self._heard_at = clock.now()

    async def until_gone(self) -> str:
        """Wait until the kernel is gone, and return how the watch noticed it."""
        interval_s = min(0.5, self._limit_s / 4)
        while True:
            # Suspended processes receive no beacons, so the time of a suspension does not count. Not in one
            # statement with the await: the sum would forget a beacon that comes during the sleep.
            late = await sleep_and_measure_delay(interval_s)
            self._heard_at += late
            silent_s = clock.now() - self._heard_at
            if silent_s <= min(_SILENT_S, self._limit_s / 2):
                continue
            if self._sees_lock and self._lock.is_held():
                self.hear()
            elif silent_s > self._outage_s or (silent_s > self._limit_s and not self._has_successor):
                lock_text = " and its lock is free" if self._sees_lock else ""
                return f"no beacon from the kernel for {silent_s:.1f} s{lock_text}"

    @property
    def _has_successor(self) -> bool:
        """Whether another kernel owns the run or soon will: that kernel decides what the worker does."""
        return self._sees_lock and has_owner(Path(self._lock.path))
