"""What the bus knows of its own health: requests without an answer, refused messages, and late wake-ups."""

from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from typing import Any

import anyio
import structlog

from stretto.bus.messages.membership import Wait
from stretto.machine import clock

log = structlog.get_logger()

_LOGGED_REFUSALS = 100  # the later ones are only counted


class Unanswered:
    """Requests and store operations of this process that wait for an answer."""

    def __init__(self) -> None:
        self._ids = count()
        self._waits: dict[int, tuple[str, str, float]] = {}
        """Id of a wait -> process that has to answer, verb, time of the start."""

    @contextmanager
    def waiting(self, who: str, verb: str, *, waited_s: float = 0.0) -> Generator[None]:
        """Record a wait for `who` during the block. It may have begun `waited_s` seconds before the block."""
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
    """Sleep, and return by how many seconds this process woke up late. A delay of up to `seconds` is returned
    as 0: it is normal on a busy machine.

    During a longer delay this process was stopped or blocked, and its peers were not necessarily silent.
    """
    start = clock.now()
    await anyio.sleep(seconds)
    late = clock.now() - start - seconds
    return late if late > seconds else 0.0
