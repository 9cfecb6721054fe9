"""Telling a silent peer from a process that stood still itself: stopped, swapped out, or blocked."""

from __future__ import annotations

import time

import anyio

__all__ = ["oversleep"]


async def oversleep(seconds: float) -> float:
    """Sleep; returns how many seconds too long it took, during which nothing that arrived was read. 0 if
    that is no more than a busy machine explains."""
    began = time.monotonic()
    await anyio.sleep(seconds)
    late = time.monotonic() - began - seconds
    return late if late > seconds else 0.0
