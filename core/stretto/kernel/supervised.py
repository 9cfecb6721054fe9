"""The loop that restarts processes of the run: workers and the sample writer."""

import math
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from stretto.kernel.fleet.forks import ForkedProcess


@dataclass(frozen=True)
class Failure:
    """The unexpected end of a process, or a failed start."""

    why: str
    lasted: bool
    """Whether the process lived long enough, or did enough work, to reset the count of failures in a row."""


async def supervised(
    live: Callable[[], Awaitable[Failure | None]],
    restart: Callable[[float], Awaitable[bool]],
    *,
    first_pause_s: float,
    longest_pause_s: float,
    most: float = math.inf,
) -> Failure | None:
    """Run `live`, and again after each failure, until it returns None. After more than `most` failures in a
    row, return the last one. `restart` waits for a pause, which doubles, and returns whether to continue."""
    failures, pause_s = 0, 0.0
    while (failure := await live()) is not None:
        failures = 1 if failure.lasted else failures + 1
        if failures > most:
            return failure
        pause_s = first_pause_s if failures == 1 else min(2 * pause_s, longest_pause_s)
        if not await restart(pause_s):
            return None
    return None


async def ended(process: subprocess.Popen[bytes] | ForkedProcess, limit_s: float = math.inf) -> bool:
    """Wait for the end of a process, and return whether it came in time."""
    with anyio.move_on_after(limit_s):
        while process.poll() is None:
            await anyio.sleep(0.05)
    return process.poll() is not None
