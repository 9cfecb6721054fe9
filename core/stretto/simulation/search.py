"""Run many universes, each in a process of its own, and remove needless faults from failing ones."""

import atexit
import faulthandler
import gc
import hashlib
import math
import multiprocessing
import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from random import Random
from time import process_time  # the real clock: a universe replaces the one of `time`
from typing import Any

import msgspec

from stretto.assembly.compose import Composed, compose
from stretto.cli.start.check_models import source_problems
from stretto.errors import ConfigError, RunError
from stretto.machine.scratch import scratch_folder
from stretto.simulation.faults import Fault, Tape, draw
from stretto.simulation.run_file import simulated
from stretto.simulation.universe import Outcome, Universe
from stretto.user_code.guard import end_with_parent

LIMIT_S = 60.0
"""Default of a tape's `limit_s`."""
_MOST_RUNS = 3
"""Processor time that a universe may use without progress, in runs without faults."""
_FOLDER = 900
"""File descriptor of a universe's folder in its fork. Its path names the folder in all files of a universe,
so that these files, and digests of them, are the same in each universe."""


class CalmRunFails(RunError):
    """The simulated run does not complete although its tape has no faults."""

    def __init__(self, tape: Tape, outcome: Outcome) -> None:
        text = "\n".join(describe(tape, outcome))
        failed = outcome.status != "hung"
        what = "the simulated run fails" if failed else "a limit ended the simulated run; it did not fail"
        super().__init__(f"without any fault, {what}:\n{text}")
        self.tape = tape


def steps_within(seconds: float, file: Path, overrides: Sequence[str] = ()) -> tuple[int, int]:
    """Return the steps that a run makes in `seconds` of processor time without faults, and all its steps."""
    composed = _composed(file, overrides)
    outcome = run_tape(Tape(seed=0, run=dict(composed.document), faults=()), seconds)
    all_steps = composed.config.steps
    return max(1, outcome.steps) if outcome.status == "out of time" else all_steps, all_steps


def _composed(file: Path, overrides: Sequence[str]) -> Composed:
    """Raise ConfigError here, and not in a fork, for a run that cannot be simulated."""
    composed = compose(file, overrides)
    simulated(composed.document, Path())
    model = composed.config.model or ""
    for problem in source_problems("model", model) if model else ():
        if problem.severity == "error" or not Path(model).exists():  # the hub's client tries for minutes
            raise ConfigError(problem.message, path="model")
    return composed


def tapes_of(
    file: Path,
    seeds: Iterable[int],
    *,
    overrides: Sequence[str] = (),
    num_faults: int = 6,
    kinds: Collection[str] = (),
    limit_s: float = LIMIT_S,
) -> list[Tape]:
    """Return a tape of a run file for each seed. Its faults, of `kinds` or of all kinds, are drawn within the
    time that the run takes without faults. A run without staleness must end with the model of the run without
    faults, if two seeds gave the same model. The limit of a universe is `limit_s`, or more if the run
    without faults needs long on this machine.

    Raises ConfigError if the run cannot be composed or simulated, and CalmRunFails if it fails without
    faults.
    """
    composed = _composed(file, overrides)
    calm = Tape(seed=0, run=dict(composed.document), faults=(), limit_s=limit_s)
    outcome = run_tape(calm)
    if outcome.failed and outcome.status != "hung":  # a reward of the user's may fail for some rows
        outcome = run_tape(calm := msgspec.structs.replace(calm, may_fail=True))
    if outcome.failed:
        raise CalmRunFails(calm, outcome)
    model = ""
    if not composed.config.queue.max_staleness:  # another order may give another model: rewards may be random
        other_outcome = run_tape(msgspec.structs.replace(calm, seed=1))
        model = outcome.model if other_outcome.model == outcome.model else ""
    patience_s = calm.patience_s + outcome.longest_wait_s
    limit_s = max(limit_s, math.ceil(_MOST_RUNS * outcome.cpu_s))
    tape = msgspec.structs.replace(calm, patience_s=patience_s, model=model, limit_s=limit_s)
    until_s = 0.8 * outcome.virtual_s
    return [
        msgspec.structs.replace(
            tape, seed=seed, faults=draw(Random(f"faults {seed}"), num_faults, until_s, kinds)
        )
        for seed in seeds
    ]


def search(
    tapes: Iterable[Tape], jobs: int = 1, record: Path | None = None
) -> Iterator[tuple[Tape, Outcome]]:
    """Yield each tape with the outcome of its universe, in order; `jobs` universes run at the same time.

    The file `record` gets a line for each tape that has not failed (seed, digests of tape and events). Tapes
    in the file are skipped, so that an interrupted search continues.
    """
    done_digests = set[str]()
    if record is not None and record.exists():
        done_digests = {line.split()[1] for line in record.read_text().splitlines()}
    tapes = [tape for tape in tapes if _digest(tape) not in done_digests]
    if not tapes:
        return
    _root()  # before the forks, which then share it
    calm = msgspec.structs.replace(tapes[0], faults=())
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, fork, initializer=_warm_up, initargs=(calm,)) as pool:
        try:
            for tape, outcome in zip(tapes, pool.map(run_tape, tapes), strict=True):
                if record is not None and not outcome.failed:
                    with record.open("a") as file:
                        file.write(f"{tape.seed} {_digest(tape)} {outcome.digest}\n")
                yield tape, outcome
        finally:
            pool.shutdown(cancel_futures=True)


def _digest(tape: Tape) -> str:
    tape = msgspec.structs.replace(tape, limit_s=LIMIT_S)  # the other one is of this machine
    return hashlib.blake2b(msgspec.msgpack.encode(tape), digest_size=8).hexdigest()


def run_tape(tape: Tape, most_s: float = math.inf) -> Outcome:
    """Run a universe in a forked process and return its outcome: `out of time` after `most_s` processor
    seconds. Its files are removed afterwards."""
    with tempfile.TemporaryDirectory(dir=_root(), ignore_cleanup_errors=True) as folder:
        data, status = in_fork(partial(_run_in, Path(folder), tape, most_s))
    if status == -signal.SIGXCPU:
        return Outcome(status="hung", reason=f"{how_ended(status, tape.limit_s)}; --limit allows more")
    if not data:
        return Outcome(status="died", reason=how_ended(status, tape.limit_s))
    return msgspec.msgpack.decode(data, type=Outcome)


def shrink(tape: Tape, run: Callable[[Tape], Outcome] = run_tape) -> tuple[Tape, Outcome]:
    """Remove faults while the tape still fails; return it and its outcome. ValueError if it does not fail."""
    outcome = run(tape)
    if not outcome.failed:
        raise ValueError(f"the universe of seed {tape.seed} does not fail")
    faults, index = tape.faults, 0
    while index < len(faults):
        fewer: tuple[Fault, ...] = faults[:index] + faults[index + 1 :]
        new_outcome = run(msgspec.structs.replace(tape, faults=fewer))
        if new_outcome.failed:
            faults, outcome = fewer, new_outcome
            index = 0  # a fault that was needed before may not be needed any more
        else:
            index += 1
    return msgspec.structs.replace(tape, faults=faults), outcome


def describe(tape: Tape, outcome: Outcome, last: int = 0) -> Iterator[str]:
    """Yield lines that say what happened in a universe, with the `last` lines of its log; 0 for all."""
    yield f"seed {tape.seed}: {outcome.status}{outcome.reason and ': '}{outcome.reason}"
    for fault in tape.faults:
        fields: dict[str, Any] = msgspec.to_builtins(fault)
        yield "  fault: " + ", ".join(f"{key} {value}" for key, value in fields.items())
    yield from (f"  violation: {line}" for line in outcome.violations)
    yield from (f"  error: {line}" for line in outcome.errors)
    yield from (f"  waits: {line}" for line in outcome.waiting)
    if last and len(outcome.log) > last:
        yield f"the last {last} of {len(outcome.log)} lines of the log:"
    yield from outcome.log[-last:]


def _warm_up(calm: Tape) -> None:
    """Run a universe, so that forks inherit its imports and caches. The garbage collector skips these."""
    end_with_parent(signal.SIGKILL)
    with tempfile.TemporaryDirectory(dir=_root(), ignore_cleanup_errors=True) as folder:
        Universe(calm, Path(folder)).run()
    gc.collect()
    gc.freeze()


@cache
def _root() -> Path:
    """Make the folder of all universes of this process and its forks. It is removed when they have ended."""
    memory, stack = Path("/dev/shm"), ExitStack()  # noqa: S108 - only where nothing has to survive
    atexit.register(stack.close)
    return stack.enter_context(scratch_folder("universe-", memory if memory.is_dir() else None))[0]


def enter_fork() -> None:
    """Prepare a forked process for a universe: it ends with its parent; its processor time is limited."""
    end_with_parent(signal.SIGKILL)
    faulthandler.register(signal.SIGXCPU, file=2, chain=True)  # prints what a universe computes, and ends it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    allow(LIMIT_S)
    gc.disable()  # it would end forgotten coroutines at a moment that no seed decides


def allow(seconds: float) -> None:
    """End this process after another `seconds` of processor time."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(process_time() + seconds), hard))


def how_ended(status: int, limit_s: float) -> str:
    """Return what ended a fork that was allowed `limit_s` processor seconds at a time."""
    if status != -signal.SIGXCPU:
        return f"exit status {status}"
    return f"it reached its limit: {limit_s:g} processor seconds without progress (its stack is above)"


def in_fork(work: Callable[[], bytes]) -> tuple[bytes, int]:
    """Return the result of `work` in a fork, or no bytes if the fork ended before, and the exit status. The
    fork ends abruptly, so that unfinished coroutines of the universe never run."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reading)
            enter_fork()
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(work())
        except BaseException:  # noqa: BLE001 - nobody above it shows it
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    return data, os.waitstatus_to_exitcode(status)


class _OutOfTime(Exception):
    """A universe has used its processor time; the argument is the number of its steps."""


def _run_in(folder: Path, tape: Tape, most_s: float) -> bytes:
    def check_time(thread: object) -> None:
        if process_time() > most_s:
            raise _OutOfTime(universe.oracle.steps)

    try:
        os.dup2(os.open(folder, os.O_PATH), _FOLDER)
        universe = Universe(tape, Path(f"/proc/self/fd/{_FOLDER}"))
        universe.loop.on_ran = check_time if most_s < math.inf else None
        universe.on_progress = partial(allow, tape.limit_s)
        universe.on_progress()
        outcome = universe.run()
    except _OutOfTime as end:
        outcome = Outcome(status="out of time", reason="", steps=end.args[0])
    except BaseException as error:  # noqa: BLE001 - the parent reports it
        outcome = Outcome(status="crashed", reason="".join(traceback.format_exception(error)))
    return msgspec.msgpack.encode(outcome)
