"""`stretto mirror`: a copy of the records of a run that is elsewhere.

The copy is a folder that all commands which only look at runs can read. While it is kept, it looks owned, as
the run's own folder does, and commands to the run go to its kernel.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec

from stretto.assembly.logs import log_nothing
from stretto.base.private_file import write_private
from stretto.bus.client import Bus, connect
from stretto.bus.messages.base import Message
from stretto.bus.messages.operation import AskRecord, AskRecords, RecordPart, Records
from stretto.bus.messages.subjects import Subjects
from stretto.bus.server import OPERATOR, Bootstrap, lock_run
from stretto.cli.start.folders import is_free
from stretto.errors import BusError, ConfigError, NoAnswer, one_error, printable
from stretto.records.files import MIRROR
from stretto.records.shared import is_record, record_sizes

_LOOK_S = 1.0
_ANSWER_S = 20.0
_APPENDED = (".jsonl", ".out", ".txt")
"""Files that only grow, or begin again."""

A = TypeVar("A", bound=Message)
Ask = Callable[[str, int], Awaitable[bytes]]
"""Ask for a part of a record: its name and an offset."""


def mirror_run(bootstrap: Bootstrap, folder: Path) -> str:
    """Copy the records of a run into a folder until the run ends or the user interrupts. Return what is in
    the folder then.

    Raises:
        ConfigError: if the folder is not free and holds no copy of this run, or if somebody else keeps it.
        BusError: if the server cannot be reached, refuses the login, or is lost.
        NoAnswer: if the kernel does not answer any more.
    """
    _claim(folder, bootstrap.run)
    log_nothing()
    with lock_run(folder / "bus") as lock:
        # Commands to the run go to its kernel with these credentials.
        write_private(folder / "bus" / f"{OPERATOR}.json", msgspec.json.encode(bootstrap))

        def own(text: str) -> None:
            lock.seek(0)
            lock.truncate()
            lock.write(text)
            lock.flush()

        with one_error():
            return anyio.run(_until_interrupted, bootstrap, folder, own)


def _claim(folder: Path, run: str) -> None:
    """Make the folder, or see that it holds a copy of the run."""
    mark = folder / MIRROR
    if mark.exists():
        if (found := mark.read_text().strip()) != run:
            raise ConfigError(f"{folder} holds a copy of the run {printable(found)}, not of {run}")
        return
    if not is_free(folder):
        raise ConfigError(f"{folder} is not empty, and holds no copy of a run; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(f"{run}\n")


async def _until_interrupted(bootstrap: Bootstrap, folder: Path, own: Callable[[str], None]) -> str:
    outcome = f"{folder} has the records up to now; the run continues"
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with anyio.create_task_group() as tasks:

            async def follow() -> None:
                nonlocal outcome
                outcome = await _follow(bootstrap, folder, own)
                tasks.cancel_scope.cancel()

            tasks.start_soon(follow)
            await anext(signals)
            tasks.cancel_scope.cancel()
    return outcome


async def _follow(bootstrap: Bootstrap, folder: Path, own: Callable[[str], None]) -> str:
    names, copy = Subjects(bootstrap.run), secrets.token_hex(8)
    async with connect(bootstrap) as bus:
        question = AskRecords(bootstrap.token, copy)
        while True:
            try:
                records = await _ask(bus, names, "records", question, Records)
                own(records.owner)
                await _copy(partial(_part, bus, names, bootstrap.token), records, folder)
            except (BusError, NoAnswer) as error:
                return f"{folder} has the records up to the last answer of the run's kernel: {error}"
            if records.over:
                done = msgspec.structs.replace(question, complete=True)
                await _ask(bus, names, "records", done, Records)
                return f"the run is over; {folder} has its records"
            await anyio.sleep(_LOOK_S)


async def _ask(bus: Bus, names: Subjects, verb: str, question: Message, answer: type[A]) -> A:
    subject = names.kernel("operator", verb)
    return await bus.request(subject, question, answer, who="kernel", deadline_s=_ANSWER_S)


async def _part(bus: Bus, names: Subjects, token: str, name: str, offset: int) -> bytes:
    part = await _ask(bus, names, "record", AskRecord(token, name, offset), RecordPart)
    return part.data


async def _copy(ask: Ask, records: Records, folder: Path) -> None:
    """Bring the copy up to date. Files that the run has no more go away.

    Raises:
        ConfigError: if the run names a file that is no record.
    """
    here = await anyio.to_thread.run_sync(record_sizes, folder)
    for name, (size, changed) in records.files.items():
        if not is_record(name):
            raise ConfigError(f"the run offers the file {printable(name)!r}, which is no record")
        if here.get(name) != (size, changed):
            await _copy_one(ask, folder / name, name, size, changed)
    for name in here.keys() - records.files.keys() - {MIRROR}:
        (folder / name).unlink(missing_ok=True)


async def _copy_one(ask: Ask, file: Path, name: str, size: int, changed: int) -> None:
    """Copy one record, or what was appended to it, and give it its time of change."""
    file.parent.mkdir(exist_ok=True)
    grows = name.endswith(_APPENDED)
    held = file.stat().st_size if file.exists() else 0
    continues = grows and 0 < held <= size
    target = file if continues else file.with_name(f".{file.name}")
    offset = held if continues else 0
    with target.open("ab" if continues else "wb") as copy:
        while offset < size and (part := await ask(name, offset)):
            copy.write(part)
            offset += len(part)
    if not continues:
        target.replace(file)
    os.utime(file, ns=(changed, changed))
