"""Limits of processor time and memory for one answer.

A fork of the scoring process scores the answers of a group one after another. The system ends the fork when
an answer passes a limit; that answer scores 0, and a new fork goes on with the next one. The fork shares what
the reward has loaded, so a new one costs milliseconds.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from stretto.children.protocol import HEAD, die_with_parent, framed
from stretto.errors import RewardError, place_of

__all__ = ["LIMIT_METRICS", "AnswerLimits", "LimitedScore", "score_within"]

Value = tuple[float, dict[str, float]]

LIMIT_METRICS = ("over_time", "over_memory", "crashed")
"""1 for an answer that scored 0 because it passed a limit or ended its process, else 0."""

_NO_MEMORY = 77
"""Exit status of a fork whose reward raised `MemoryError`."""

_printed: set[str] = set()
"""Errors of which a traceback is in the verifier's output; each appears there once."""


@dataclass(frozen=True)
class AnswerLimits:
    """What one answer may use; None for no limit."""

    cpu_s: float | None = None
    memory_mb: int | None = None
    """Beyond what the scoring process has already. Linux only."""

    def __bool__(self) -> bool:
        return self.cpu_s is not None or self.memory_mb is not None


class LimitedScore(msgspec.Struct, frozen=True, array_like=True):
    """Reward and metrics of one answer, or why the reward failed (`error`), or which limit it passed."""

    value: Value | None = None
    error: str = ""
    over: str = ""
    """Why the answer scored 0, in words; empty if it was scored."""


def score_within(limits: AnswerLimits, score: Callable[[int], Value], count: int) -> list[LimitedScore]:
    """`score(index)` of each of `count` answers, under limits.

    Raises:
        RewardError: if the reward raises for one of them; the text says what, and in which line.
    """
    scores: list[LimitedScore] = []
    while len(scores) < count:
        scores += _fork(limits, score, range(len(scores), count))
    return scores


def _fork(limits: AnswerLimits, score: Callable[[int], Value], indices: Sequence[int]) -> list[LimitedScore]:
    """Scores up to and including the first answer that passes a limit."""
    gc.freeze()  # a collection in the fork would copy every page that it shares
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _score_all(limits, score, indices, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        scores = list(_frames(pipe))
    _, status = os.waitpid(child, 0)
    for each in scores:
        if each.error:
            _printed.add(each.error)
            raise RewardError(each.error)
    if len(scores) < len(indices):
        scores.append(_passed(limits, status))
    return scores


def _score_all(
    limits: AnswerLimits, score: Callable[[int], Value], indices: Sequence[int], writing: int
) -> None:
    """Body of the fork. It never returns."""
    status = 1
    try:
        die_with_parent()
        _limit_memory(limits.memory_mb)
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            for index in indices:
                signal.setitimer(signal.ITIMER_PROF, limits.cpu_s or 0)  # its signal ends the process
                try:
                    scored = LimitedScore(score(index))
                except MemoryError:
                    status = _NO_MEMORY
                    return
                except RewardError as error:
                    scored = LimitedScore(error=str(error))
                except Exception as error:  # noqa: BLE001 - user code may raise anything; the reason is told
                    scored = LimitedScore(error=f"reward raised {place_of(error)}")
                    if scored.error not in _printed:
                        traceback.print_exc()
                signal.setitimer(signal.ITIMER_PROF, 0)
                pipe.write(framed(msgspec.msgpack.encode(scored)))
                if scored.error:
                    break
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def _limit_memory(memory_mb: int | None) -> None:
    if memory_mb is None or sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _frames(pipe: BinaryIO) -> list[LimitedScore]:
    """What the fork wrote; a frame that was cut off is left out."""
    data, found, start = pipe.read(), list[LimitedScore](), 0
    while len(data) >= start + HEAD.size:
        [size] = HEAD.unpack_from(data, start)
        start += HEAD.size
        if len(data) < start + size:
            break
        found.append(msgspec.msgpack.decode(data[start : start + size], type=LimitedScore))
        start += size
    return found


def _passed(limits: AnswerLimits, status: int) -> LimitedScore:
    """The score of the answer at which a fork ended."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGPROF:
        metric, why = "over_time", f"needs more than {limits.cpu_s:g} s of processor time"
    elif code == _NO_MEMORY:
        metric, why = "over_memory", f"needs more than {limits.memory_mb} MB of memory"
    else:
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        metric, why = "crashed", f"ended the process that scored it: {how}"
    return LimitedScore((0.0, {**dict.fromkeys(LIMIT_METRICS, 0.0), metric: 1.0}), over=why)
