"""What the bus knows of its own health: requests without an answer, refused messages, and late wake-ups."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from typing import Any

import anyio
import structlog

from stretto.bus.messages.membership import Wait
from stretto.machine import clock

log = structlog.get_logger()

_LOGGED_REFUSALS = 100


class Unanswered:
    """Requests of this process that are not answered yet, and operations on the store."""

    def __init__(self) -> None:
        self._ids = count()
        self._waits: dict[int, tuple[str, str, float]] = {}
        """Process, verb and time of each."""

    @contextmanager
    def waiting(self, who: str, verb: str, *, waited_s: float = 0.0) -> Generator[None]:
        """Count a wait for `who` for the duration of the block; it may have begun `waited_s` before."""
        id = next(self._ids)
        self._waits[id] = (who, verb, clock.now() - waited_s)
        try:
            yield
        finally:
            del self._waits[id]

    def longest(self) -> Wait | None:
        """Return the oldest wait, if it is older than a second."""
        if not self._waits:
            return None
        who, verb, since = min(self._waits.values(), key=lambda wait: wait[2])
        seconds = clock.now() - since
        return Wait(who, verb, seconds) if seconds > 1 else None


class Refusals:
    """Malformed messages, which no handler sees."""

    def __init__(self) -> None:
        self.count = 0

    def refuse(self, subject: str, kind: Any, error: Exception) -> None:
        """Count a malformed message. Log the first ones."""
        self.count += 1
        if self.count <= _LOGGED_REFUSALS:
            expected = getattr(kind, "__name__", str(kind))
            log.warning(
                "message refused", subject=subject, expected=expected, reason=str(error), refused=self.count
            )


async def sleep_and_measure_delay(seconds: float) -> float:
    """Sleep, and return the seconds by which this process woke up late; 0 if at most `seconds`, as on a busy
    machine.

    In that time the process was stopped or blocked, so the silence of its peers says nothing about them.
    """
    start = clock.now()
    await anyio.sleep(seconds)
    late = clock.now() - start - seconds
    return late if late > seconds else 0.0
