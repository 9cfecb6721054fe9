"""Limits of processor time and memory for one answer.

A fork of the scoring process scores a group's answers one by one. The system ends the fork when an answer
exceeds a limit: that answer scores 0, and a new fork, which costs milliseconds, continues with the next.
"""

import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stretto.errors import PolicyError, RewardError
from stretto.user_code.faults import SampleFault
from stretto.user_code.protocol import die_with_parent, framed, unframed

Value = tuple[float, dict[str, float]]

LIMIT_METRICS = ("over_time", "over_memory", "crashed")
"""Metrics that are 1 for an answer that scored 0 because it exceeded a limit or ended its process, else 0."""

_NO_MEMORY = 77
"""Exit status of a fork whose reward raised `MemoryError`."""

_printed: set[str] = set()
"""Errors whose traceback is already in the verifier's output; each is printed once."""


@dataclass(frozen=True)
class AnswerLimits:
    """Limits for scoring one answer; None for no limit."""

    cpu_s: float | None = None
    memory_mb: int | None = None
    """Address space in MiB beyond the scoring process's. Linux only."""

    def __bool__(self) -> bool:
        return self.cpu_s is not None or self.memory_mb is not None


class LimitedScore(msgspec.Struct, frozen=True, array_like=True):
    """Reward and metrics of one answer, or why the reward failed."""

    value: Value | None = None
    fault: SampleFault | None = None
    over: str = ""
    """How the answer exceeded a limit or ended the process: it scores 0. Empty if the reward scored it."""


def score_within(limits: AnswerLimits, score: Callable[[int], Value], count: int) -> list[LimitedScore]:
    """Call `score(index)` for each of `count` answers, each under the limits, and return the scores."""
    scores: list[LimitedScore] = []
    while len(scores) < count:
        scores += _fork(limits, score, range(len(scores), count))
    return scores


def _fork(limits: AnswerLimits, score: Callable[[int], Value], indices: Sequence[int]) -> list[LimitedScore]:
    """Score answers in a fork. Return the scores up to and including the first answer that ends the fork."""
    gc.freeze()  # without this, garbage collection in the fork would copy every shared page
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _score_all(limits, score, indices, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        frames = unframed(pipe.read(), indices[0])
        scores = [msgspec.msgpack.decode(frame, type=LimitedScore) for frame in frames]
    _, status = os.waitpid(child, 0)
    for result in scores:
        if result.fault:
            _printed.add(result.fault.error)
            raise result.fault.raised()
    if len(scores) < len(indices):
        scores.append(_score_at_limit(limits, status))
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
                    result = LimitedScore(score(index))
                except MemoryError:
                    status = _NO_MEMORY
                    return
                except Exception as error:  # noqa: BLE001 - user code may raise anything; the score reports it
                    fault = SampleFault.of(error, "reward")
                    result = LimitedScore(fault=fault)
                    if not isinstance(error, (RewardError, PolicyError)) and fault.error not in _printed:
                        traceback.print_exc()
                signal.setitimer(signal.ITIMER_PROF, 0)
                pipe.write(framed(index, msgspec.msgpack.encode(result)))
                if result.fault:
                    break
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def _limit_memory(memory_mb: int | None) -> None:
    if memory_mb is None:
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _score_at_limit(limits: AnswerLimits, status: int) -> LimitedScore:
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGPROF:
        metric, why = "over_time", f"needs more than {limits.cpu_s:g} s of processor time (answer_cpu_s)"
    elif code == _NO_MEMORY:
        metric, why = "over_memory", f"needs more than {limits.memory_mb} MiB of memory"
    else:
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        metric, why = "crashed", f"ended the process that scored it: {how}"
    return LimitedScore((0.0, {**dict.fromkeys(LIMIT_METRICS, 0.0), metric: 1.0}), over=why)
