"""The journal and the log of a run, as commands read them.

The store of a bundled server is copied, and a nats-server of the command's own reads the copy. The run's own
store stays as it is: a nats-server repairs and compacts the files that it opens. The store on a server of the
user's own (`bus.url`) is read there. A run whose store was removed has its journal as files, and no log.
"""

from __future__ import annotations

import json
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import nats
import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StreamState
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from stretto.assembly.trust import require_own_server
from stretto.bus.connection import open_once, without_logins
from stretto.bus.guard import is_locked
from stretto.bus.messages.base import Message
from stretto.bus.messages.subjects import Subjects
from stretto.bus.payloads import decoder, join_stored
from stretto.bus.server import STORE, Bootstrap, binary, configuration_text
from stretto.children.protocol import die_with_parent
from stretto.errors import BusError, RunError
from stretto.records.event_files import FOLDER as EVENTS
from stretto.records.files import open_record, read_record

M = TypeVar("M", bound=Message)
T = TypeVar("T")

_START_S = 60.0
_CONNECT_S = 5.0
_ANSWER_S = 4.0
_PAUSE_S = 0.2
_BATCH = 32
_GONE = 2**63 - 1
"""Sequence number of the first message of a log that is gone: nothing comes before it."""


@dataclass(frozen=True)
class StoredMessage:
    """One message of a stream."""

    sequence: int
    content: Message | None
    """None if the bytes are not a message of the kind that its subject carries."""
    in_file: bool = False
    """Whether a file of the run's folder has it."""


@asynccontextmanager
async def open_store(folder: Path) -> AsyncGenerator[StoredRun]:
    """Open the journal and the log of the run in `folder` for the duration of the block."""
    before = _last_owner(folder)
    bootstrap = folder / "bus" / "kernel.json"
    foreign = Bootstrap.read(bootstrap) if bootstrap.exists() else None
    if foreign is None or foreign.store_user:
        is_gone = (folder / EVENTS).is_dir() and not (folder / "bus" / "store").exists()
        async with nullcontext(StoredRun(None, _run_of(folder))) if is_gone else _open_copy(folder) as stored:
            yield stored
    else:
        require_own_server(folder, bootstrap)
        client = await _connect_to_any(foreign)
        try:
            yield StoredRun(client.jetstream(timeout=_ANSWER_S), foreign.run)
        finally:
            await client.close()
    if _last_owner(folder) != before:
        raise RunError(
            f"a kernel took over the run in {folder} while its store was read; try again when it has ended"
        )


@asynccontextmanager
async def _open_copy(folder: Path) -> AsyncGenerator[StoredRun]:
    with tempfile.TemporaryDirectory(prefix="stretto-copy-") as aside:
        copy = Path(aside)
        run = _copy_streams(folder, copy / "store")
        async with _serve(copy) as jetstream:
            yield StoredRun(jetstream, run)


class StoredRun:
    """The streams of one run.

    Args:
        jetstream: None if the store is gone. Its streams are then empty.
    """

    def __init__(self, jetstream: JetStreamContext | None, run: str) -> None:
        self._jetstream = jetstream
        self.run = run
        self.names = Subjects(run)

    async def span(self, stream: str) -> tuple[int, int]:
        """Return the sequence numbers of the first and the last message of a stream. The first is above the
        last in an empty stream.
        """
        if self._jetstream is None:
            return _GONE, 0
        state = await _state(self._jetstream, stream)
        return (state.first_seq, state.last_seq) if state.messages else (state.last_seq + 1, state.last_seq)

    async def messages(self, stream: str, kinds: Mapping[str, Any]) -> AsyncIterator[StoredMessage]:
        """Yield the messages of a stream in order, joined where they were stored in parts.

        Args:
            kinds: subject -> the kind of its messages. Messages of other subjects are skipped.
        """
        decoders = {subject: decoder(kind) for subject, kind in kinds.items()}
        parts: dict[int, bytes] = {}

        async def read(sequence: int) -> bytes:
            return parts.pop(sequence, b"")

        async for subject, sequence, data in self._raw(stream):
            if subject.endswith(".part") and subject.removesuffix(".part") in decoders:
                parts[sequence] = data
            elif subject in decoders:
                try:
                    content = decoders[subject](await join_stored(data, read))
                except (msgspec.DecodeError, ValueError):
                    content = None
                yield StoredMessage(sequence, content)

    async def newest(self, stream: str, subject: str, kind: type[M]) -> M | None:
        """Return the newest message of a subject; None if there is none, or if its bytes are not of this
        kind.
        """
        jetstream = self._jetstream
        if jetstream is None:
            return None

        async def read(sequence: int) -> bytes:
            return (await _answer(partial(jetstream.get_msg, stream, sequence), stream)).data or b""

        try:
            newest = await _answer(partial(jetstream.get_last_msg, stream, subject), subject)
            return decoder(kind)(await join_stored(newest.data or b"", read))
        except (NotFoundError, msgspec.DecodeError, ValueError):
            return None

    async def _raw(self, stream: str) -> AsyncIterator[tuple[str, int, bytes]]:
        """Yield subject, sequence number and bytes of every message of a stream."""
        if self._jetstream is None:
            return
        left = (await _state(self._jetstream, stream)).messages
        everything = ConsumerConfig(deliver_policy=DeliverPolicy.ALL, ack_policy=AckPolicy.NONE)
        consumer = await _answer(partial(self._jetstream.add_consumer, stream, everything), stream)
        subscription = await self._jetstream.pull_subscribe_bind(
            consumer=consumer.name, stream=stream, pending_bytes_limit=-1
        )
        while left:
            try:
                batch = await subscription.fetch(min(_BATCH, left), timeout=30)
            except (TimeoutError, nats.errors.Error) as error:
                raise BusError(f"{left} messages of {stream} cannot be read: {error}") from error
            left -= len(batch)
            for msg in batch:
                yield msg.subject, msg.metadata.sequence.stream, msg.data


# --------------------------------------------------------------------------------------- private


async def _state(jetstream: JetStreamContext, stream: str) -> StreamState:
    try:
        return (await _answer(partial(jetstream.stream_info, stream), stream)).state
    except NotFoundError as error:
        raise BusError(f"{stream} cannot be read: {error}") from error


async def _answer(question: Callable[[], Awaitable[T]], name: str) -> T:
    """Return the server's answer to a question about `name`. A cluster that has just lost a server may give
    the question to that one: what nobody answers is asked again.

    Raises:
        NotFoundError: if there is no such stream or message.
    """
    deadline = anyio.current_time() + _START_S
    while True:
        try:
            return await question()
        except NotFoundError:
            raise
        except (TimeoutError, ServiceUnavailableError, nats.errors.NoRespondersError) as error:
            if anyio.current_time() > deadline:
                raise BusError(f"{name} cannot be read: {error}") from error
        except (APIError, nats.errors.Error) as error:
            raise BusError(f"{name} cannot be read: {error}") from error
        await anyio.sleep(_PAUSE_S)


def _run_of(folder: Path) -> str:
    """Return the id of a run whose store was removed."""
    try:
        return str(json.loads(read_record(folder / "summary.json"))["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder} has neither bus/store nor a summary that can be read: {error}") from error


def _copy_streams(folder: Path, store: Path) -> str:
    """Copy the streams of the journal and the log, and return the run's id."""
    streams = folder / "bus" / "store" / "jetstream" / STORE / "streams"
    journals = sorted(streams.glob("JOURNAL_*"))
    if len(journals) != 1:
        raise RunError(
            f"{streams} has {len(journals)} journals, expected one, and bus/kernel.json names no other server"
        )
    run = journals[0].name.removeprefix("JOURNAL_")
    for name in (f"JOURNAL_{run}", f"LOG_{run}"):
        if (streams / name).is_dir():
            _copy_tree(streams / name, store / "jetstream" / STORE / "streams" / name)
    return run


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a stream without its consumers. Leave out files that its server removes in its grace time."""
    size = 0
    for path in (source, *source.rglob("*")):
        with suppress(FileNotFoundError):
            about = path.lstat()
            if not stat.S_ISDIR(about.st_mode) and not stat.S_ISREG(about.st_mode):
                raise RunError(f"{path} is neither a folder nor a regular file, and not part of a store")
            size += about.st_size
    target.mkdir(parents=True)
    if size > (free := shutil.disk_usage(target).free):
        raise RunError(
            f"{source} has {size} bytes, and {target} room for {free}; set TMPDIR to another folder"
        )

    def copy(file: str, to: str) -> None:
        with suppress(FileNotFoundError), open_record(Path(file), links=False) as opened:
            with Path(to).open("wb") as copied:
                shutil.copyfileobj(opened, copied)

    ignored = shutil.ignore_patterns("obs")
    shutil.copytree(source, target, copy_function=copy, ignore=ignored, dirs_exist_ok=True)


def _last_owner(folder: Path) -> tuple[str, int]:
    """Return the text of the run's lock and the time at which it was written. Each kernel rewrites it."""
    lock = folder / "bus" / "kernel.lock"
    if not lock.exists():
        return "", 0
    owner = read_record(lock).decode().strip()
    if is_locked(lock):
        raise RunError(f"the run in {folder} is owned by {owner}; try again when it has ended")
    return owner, lock.stat().st_mtime_ns


async def _connect_to_any(bootstrap: Bootstrap) -> Client:
    """Connect to one of the servers that hold the run's store."""
    faults: list[str] = []
    for address in bootstrap.url.split(","):
        try:
            return await open_once(bootstrap, address, _CONNECT_S)
        except BusError as error:
            faults.append(f"nats-server at {without_logins(address)}: {error}")
    raise BusError(f"the run's journal is on a server of your own; {'; '.join(faults)}")


@asynccontextmanager
async def _serve(folder: Path) -> AsyncGenerator[JetStreamContext]:
    """Run a nats-server on `folder / "store"`, which only this process can log in to."""
    password = secrets.token_urlsafe(24)
    configuration = {
        "host": "127.0.0.1",
        "port": -1,
        "ports_file_dir": str(folder),
        "log_file": str(folder / "nats.log"),
        "jetstream": {"store_dir": str(folder / "store")},
        "accounts": {STORE: {"jetstream": "enabled", "users": [{"user": "audit", "password": password}]}},
    }
    (folder / "nats.conf").write_text(configuration_text(configuration), "utf-8")
    server = subprocess.Popen(
        [binary(), "-c", str(folder / "nats.conf")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    try:
        url = await _address(folder, server)
        client = await nats.connect(url, user="audit", password=password, allow_reconnect=False)
        try:
            yield client.jetstream(timeout=_START_S)
        finally:
            await client.close()
    finally:
        server.kill()  # its store is a copy
        server.wait()


async def _address(folder: Path, server: subprocess.Popen[bytes]) -> str:
    """Return the server's address, once the server has written its port to a file."""
    deadline = anyio.current_time() + _START_S
    while server.poll() is None and anyio.current_time() < deadline:
        for file in folder.glob("*.ports"):
            if text := file.read_text():
                return json.loads(text)["nats"][0]
        await anyio.sleep(0.01)
    log = folder / "nats.log"
    tail = "\n".join(log.read_text().splitlines()[-5:]) if log.exists() else "it wrote no log"
    raise BusError(f"no nats-server started on the copy of the store: {tail}")
