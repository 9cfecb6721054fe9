"""Many universes: each in a process of its own, and the failing ones with as few faults as possible."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stretto.testing.simulation.faults import Fault, Tape
from stretto.testing.simulation.universe import Outcome, Universe

__all__ = ["run_tape", "search", "shrink", "warm_up"]

_CPU_S = 60
"""Processor seconds after which a universe is killed."""
_PR_SET_PDEATHSIG = 1


def warm_up() -> None:
    """Import what universes share before they are forked, and keep the garbage collector away from it."""
    import torch

    import stretto_mock.inference
    import stretto_mock.training

    del stretto_mock
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def run_tape(tape: Tape) -> Outcome:
    """Run a universe in a forked process, with an own folder, and return what became of it. Nothing of it is
    left afterwards."""
    memory = Path("/dev/shm")  # noqa: S108 - only where nothing has to survive
    folder = Path(tempfile.mkdtemp(prefix="universe-", dir=memory if memory.is_dir() else None))
    reading, writing = os.pipe()
    try:
        pid = os.fork()
        if not pid:
            os.close(reading)
            _child(tape, folder, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(pid, 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not data:
        return Outcome(status="died", reason=f"exit status {os.waitstatus_to_exitcode(status)}")
    return msgspec.msgpack.decode(data, type=Outcome)


def _child(tape: Tape, folder: Path, writing: int) -> None:
    """Body of the fork. It does not return: what is left of the universe's coroutines never runs."""
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
        try:
            outcome = Universe(tape, folder).run()
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            outcome = Outcome(status="crashed", reason="".join(traceback.format_exception(error)))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(outcome))
    finally:
        os._exit(0)


def search(
    tapes: Iterable[Tape], run: Callable[[Tape], Outcome] = run_tape
) -> Iterator[tuple[Tape, Outcome]]:
    """Yield each tape with what became of its universe."""
    for tape in tapes:
        yield tape, run(tape)


def shrink(tape: Tape, run: Callable[[Tape], Outcome] = run_tape) -> tuple[Tape, Outcome]:
    """Return the failing tape with as few faults as possible, each removal of which lets the run succeed.

    Raises:
        ValueError: if the tape does not fail.
    """
    outcome = run(tape)
    if not outcome.failed:
        raise ValueError(f"the universe of seed {tape.seed} does not fail")
    faults, index = tape.faults, 0
    while index < len(faults):
        fewer: tuple[Fault, ...] = faults[:index] + faults[index + 1 :]
        found = run(msgspec.structs.replace(tape, faults=fewer))
        if found.failed:
            faults, outcome = fewer, found
            index = 0  # what was needed before may not be needed any more
        else:
            index += 1
    return msgspec.structs.replace(tape, faults=faults), outcome


def story(tape: Tape, outcome: Outcome) -> Iterator[str]:
    """Yield the lines that tell what happened in a universe."""
    yield f"seed {tape.seed}: {outcome.status}: {outcome.reason}"
    for fault in tape.faults:
        fields: dict[str, Any] = msgspec.to_builtins(fault)
        yield "fault " + ", ".join(f"{key} {value}" for key, value in fields.items())
    yield from (f"violation: {each}" for each in outcome.violations)
    yield from (f"error: {each}" for each in outcome.errors)
    yield from outcome.log
