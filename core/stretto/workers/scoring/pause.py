"""Pauses the calls of user code while a service that the code needs does not answer."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import structlog

from stretto.machine import clock
from stretto.user_code.faults import SampleFault

log = structlog.get_logger()

T = TypeVar("T")

_FAILED_IN_A_ROW = 10
_FIRST_S, _LONGEST_S = 1.0, 30.0
"""First and longest time between two calls of a pause. The time doubles after each call."""


class Pause:
    """Pauses the calls of a reward or environment after 10 calls in a row without an answer. In a pause, one
    call at a time tries again. After `limit_s` seconds (0: no pause) calls fail. The log names `what`."""

    def __init__(self, what: str, limit_s: float) -> None:
        self._what = what
        self._limit_s = limit_s
        self._failed = 0
        self._since = 0.0
        self._is_over = False
        """Whether a pause has ended without an answer."""
        self._turn = anyio.Lock()
        self.reason = ""
        """Why calls pause now; empty if they do not."""

    async def call(self, ask: Callable[[], Awaitable[T | SampleFault]]) -> T | SampleFault:
        """Call `ask`, and return its result. In a pause, repeat it until it is answered or the pause ends."""
        if not self.reason:
            result = self._note(await ask())
            if not self.reason or not _is_lost(result):
                return result
        async with self._turn:
            pause_s = _FIRST_S
            while self.reason:
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)
                result = self._note(await ask())
                if not self.reason:
                    return result
        return self._note(await ask())

    def _note(self, result: T | SampleFault) -> T | SampleFault:
        now = clock.now()
        if not isinstance(result, SampleFault) or not _is_lost(result):
            if self.reason:
                log.info("calls go on", what=self._what, paused_s=round(now - self._since, 1))
            self._failed, self.reason, self._is_over = 0, "", False
            return result
        self._failed += 1
        if self.reason and now - self._since >= self._limit_s:
            log.warning("calls fail after a pause", what=self._what, paused_s=round(now - self._since, 1))
            self.reason, self._is_over = "", True
        elif not self.reason and not self._is_over and self._failed >= _FAILED_IN_A_ROW and self._limit_s:
            self.reason, self._since = result.error, now
            log.warning("calls pause", what=self._what, failed=self._failed, reason=result.error)
        return result


def _is_lost(result: object) -> bool:
    """Return whether a result is the fault of a process or a service that did not answer."""
    return isinstance(result, SampleFault) and result.kind == "infrastructure"
