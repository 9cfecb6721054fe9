"""What the schedulers of simulated runs were told and what they commanded: records to compare code with.

    python scheduler_records.py write FILE [--small 20] [--large 3]
    python scheduler_records.py check FILE

A rebuild of the scheduler, or of how it recovers, has to give the same commands in the same order. `check`
prints each kernel whose scheduler gives others today, with the first ones that differ.
"""

import argparse
import gzip
import hashlib
import inspect
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from stretto.algorithm import Group
from stretto.bus.messages.tickets import GroupDone, GroupFailed, Purpose, TicketStarted
from stretto.kernel.schedule.commands import SchedulerSettings
from stretto.kernel.schedule.draws import RecordedDraw
from stretto.kernel.schedule.scheduler import Scheduler, Snapshot
from stretto.simulation import Tape
from stretto.simulation.search import in_fork
from stretto.simulation.universe import Universe
from universes import large, small

CALLS: dict[str, Any] = {
    "restore": tuple[Snapshot, dict[int, RecordedDraw] | None],
    "fit": tuple[str],
    "owned": tuple[int],
    "start": tuple[tuple[TicketStarted, ...]],
    "close": tuple[()],
    "ticket_started": tuple[Purpose, int, int, str],
    "first_token": tuple[int, int, int],
    "group_done": tuple[GroupDone],
    "group_failed": tuple[GroupFailed],
    "worker_gone": tuple[str, bool],
    "step_finished": tuple[bool | float | None, ...],
    "release": tuple[()],
}
"""Methods by which a scheduler is told something, and their arguments."""


class Call(msgspec.Struct, array_like=True):
    """A call of a method, or of `commands`."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"\xc0")
    digest: bytes = b""
    """Of the commands, where the call has taken them."""


class Life(msgspec.Struct, array_like=True):
    """What the scheduler of one kernel was told."""

    settings: SchedulerSettings
    calls: list[Call]
    kept: list[bool]
    """What the algorithm's filter said of each group."""


class Record(msgspec.Struct, array_like=True):
    """The lives of a universe's kernels."""

    size: str
    seed: int
    lives: list[Life]


def digest_of(commands: Iterable[object]) -> bytes:
    named = [(type(command).__name__, command) for command in commands]
    return hashlib.blake2b(msgspec.msgpack.encode(named), digest_size=8).digest()


def record(tape: Tape) -> bytes:
    """Run a universe in a fork, and return what its schedulers were told, as a list of `Life`."""
    return in_fork(lambda: msgspec.msgpack.encode(lives_of(tape)))[0]


def lives_of(tape: Tape) -> list[Life]:
    """Run a universe in this process, which can run no other, and return what its schedulers were told."""
    lives: list[Life] = []
    of: dict[int, Life] = {}
    depth = 0

    def begin(scheduler: Scheduler, settings: SchedulerSettings, *args: Any, **options: Any) -> None:
        life = Life(settings, [], [])

        def keep(group: Group, decide: Callable[[Group], bool] = args[0]) -> bool:
            life.kept.append(decide(group))
            return life.kept[-1]

        original(scheduler, settings, keep, *args[1:], **options)
        lives.append(life)
        of[id(scheduler)] = life

    def noted(method: Any) -> Any:
        parameters = inspect.signature(method)

        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                bound = parameters.bind(self, *args, **options)
                bound.apply_defaults()
                if depth == 1 and (life := of.get(id(self))):  # not a copy of the simulation
                    _, *arguments = bound.arguments.values()
                    life.calls.append(Call(method.__name__, msgspec.Raw(msgspec.msgpack.encode(arguments))))
                return method(self, *args, **options)
            finally:
                depth -= 1

        return call

    def commands(scheduler: Scheduler) -> list[Any]:
        taken = taking(scheduler)
        if taken and (life := of.get(id(scheduler))):
            life.calls.append(Call("commands", digest=digest_of(taken)))
        return taken

    original, taking = Scheduler.__init__, Scheduler.commands
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        mock.patch.multiple(
            Scheduler,
            __init__=begin,
            commands=commands,
            **{name: noted(getattr(Scheduler, name)) for name in CALLS},
        ),
    ):
        Universe(tape, Path(folder)).run()
    return lives


def differences(life: Life) -> Iterator[str]:
    """Yield where a scheduler of today gives other commands."""
    kept = iter(life.kept)
    scheduler = Scheduler(life.settings, lambda group: next(kept))
    for number, call in enumerate(life.calls):
        if call.name == "commands":
            taken = scheduler.commands()
            if digest_of(taken) != call.digest:
                yield f"call {number} takes other commands: {taken}"
                return
            continue
        arguments = msgspec.msgpack.decode(call.arguments, type=CALLS[call.name])
        method = getattr(scheduler, call.name)
        parameters = islice(inspect.signature(method).parameters, len(arguments))  # newer ones have defaults
        method(**dict(zip(parameters, arguments, strict=True)))


def write(file: Path, tapes: Iterable[tuple[str, Tape]], jobs: int) -> None:
    named = [*tapes]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        found = pool.map(record, [tape for _, tape in named])
        decode = msgspec.msgpack.Decoder(list[Life]).decode
        records = [
            Record(size, tape.seed, decode(lives)) for (size, tape), lives in zip(named, found, strict=True)
        ]
    file.write_bytes(gzip.compress(msgspec.msgpack.encode(records), mtime=0))


def read(file: Path) -> list[Record]:
    return msgspec.msgpack.decode(gzip.decompress(file.read_bytes()), type=list[Record])


def check(records: Iterable[Record]) -> list[str]:
    return [
        f"{each.size} {each.seed}, kernel {number}: {difference}"
        for each in records
        for number, life in enumerate(each.lives)
        for difference in differences(life)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--small", type=int, default=20, help="number of small universes")
    parser.add_argument("--large", type=int, default=3, help="number of large universes")
    chosen = parser.parse_args()
    if chosen.action == "write":
        tapes = [("small", small(seed)) for seed in range(chosen.small)]
        tapes += [("large", large(seed)) for seed in range(chosen.large)]
        write(chosen.file, tapes, os.cpu_count() or 1)
    records = read(chosen.file)
    found = check(records)
    lives = [life for each in records for life in each.lives]
    calls = sum(len(life.calls) for life in lives)
    print(
        f"{len(records)} universes, {len(lives)} kernels, {calls} calls: {len(found)} differences",
        *found,
        sep="\n",
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
