"""Replace time, threads, randomness and network by simulated ones, library by library."""

import asyncio
import contextlib
import contextvars
import datetime
import os
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from functools import partial
from random import Random
from typing import Any, TypeVar
from unittest import mock

import anyio
import nats.aio.client
import nats.js.client
import nats.nuid
import numpy.random.bit_generator
from anyio._backends import _asyncio as backend

from stretto.kernel.fleet import adoption
from stretto.simulation.files import SimulatedFiles
from stretto.simulation.host import Host
from stretto.simulation.loop import Escaped, SimulatedLoop, current_process
from stretto.simulation.transport import SimulatedTransport

T = TypeVar("T")

_EPOCH = 1_800_000_000.0
"""Unix time at the virtual time 0."""
_THREAD_S = 1e-3
"""Mean virtual time of a function in a thread."""
_UNSEEDED = Random()
"""Replaces the system's randomness. All universes share it: an imported module may keep a reference."""


class World:
    """The state that the patches share: loop, clocks, randomness. The seed also draws the time of threads."""

    def __init__(self, loop: SimulatedLoop, seed: int) -> None:
        self.loop = loop
        self.costs = Random(f"costs {seed}")
        self.random = Random(f"random {seed}")
        _UNSEEDED.seed(f"unseeded {seed}")
        self.files = SimulatedFiles()
        self.host: Host | None = None
        """The cores of the machine; None if processor time does not matter."""
        self.wall_offset_s = 0.0
        """Seconds by which faults have moved the wall clock."""
        self._slept_s: float | None = None
        """Seconds that the function in a thread has slept so far; None while no such function runs."""

    def now(self) -> float:
        """Return the time of the monotonic clock."""
        return self.loop.time() + (self._slept_s or 0.0)

    def wall(self) -> float:
        return _EPOCH + self.wall_offset_s + self.now()

    def sleep(self, seconds: float) -> None:
        """Let the thread sleep. Raises Escaped outside of threads: a sleep would stop the event loop."""
        if self._slept_s is None:
            raise Escaped("time.sleep outside of a thread stops the event loop")
        self._slept_s += seconds

    def call(self, function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
        """Call a function as a thread does. Return its result or exception, and its virtual seconds."""
        outer_slept_s, self._slept_s = self._slept_s, 0.0
        try:
            result = function(*args)
        except Exception as error:  # noqa: BLE001 - the caller raises it when the time has passed
            result = error
        finally:
            slept_s, self._slept_s = self._slept_s, outer_slept_s
        return result, slept_s + self.costs.expovariate(1 / _THREAD_S)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Replace `asyncio.run` in a thread: run a new loop. The thread sleeps for the loop's time."""
        loop, outer_loop = SimulatedLoop(self.costs.getrandbits(32)), asyncio._get_running_loop()
        began = loop.time()
        asyncio._set_running_loop(None)
        try:
            return contextvars.Context().run(loop.run_until_complete, coroutine)
        finally:
            asyncio._set_running_loop(outer_loop)
            self.sleep(loop.time() - began)

    async def in_thread(
        self, func: Any, args: Any, abandon_on_cancel: bool = False, limiter: object = None
    ) -> Any:
        """Replace the method of anyio's backend behind `anyio.to_thread.run_sync`."""
        await anyio.lowlevel.checkpoint()
        result, seconds = self.call(func, *args)
        with anyio.CancelScope(shield=not abandon_on_cancel):
            await anyio.sleep(seconds)
        if isinstance(result, Exception):
            raise result
        return result


class _OrderedSet(dict[Any, None]):
    """A set that iterates in the order of insertion, not in the order of addresses."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    def remove(self, item: Any) -> None:
        del self[item]


class _CancelScope(backend.CancelScope):
    """anyio's cancel scope, whose tasks, inner scopes and sets have the same order in each run."""

    count = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        _CancelScope.count += 1
        self._number = _CancelScope.count
        super().__init__(*args, **options)
        self._child_scopes: Any = _OrderedSet()
        self._tasks: Any = _OrderedSet()

    def __hash__(self) -> int:
        return self._number


class _DatetimeType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _REAL_DATETIME)


_REAL_DATETIME = datetime.datetime


class _Datetime(datetime.datetime, metaclass=_DatetimeType):
    """Replaces `datetime.datetime`, whose methods read the real clock without `time.time`."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return _REAL_DATETIME(*args, **options)

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return _REAL_DATETIME.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> Any:
        return cls.now(datetime.UTC).replace(tzinfo=None)

    today = now


def _seed(generator: Random, seed: Any = None, version: int = 2) -> None:
    _REAL_SEED(generator, _UNSEEDED.getrandbits(64) if seed is None else seed, version)


_REAL_SEED = Random.seed


def _process_id() -> int:
    process = current_process()
    return process.pid if process is not None else 1


def _always(value: object) -> Callable[..., object]:
    return lambda *_: value


_DISK_USAGE = shutil.disk_usage("/")._replace(total=2**40, used=2**39, free=2**39)


def _escape(*args: object, **options: object) -> Any:
    raise Escaped(f"{args[:1]}: sockets, threads and processes are not there in the simulation")


def _clocks(world: World) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements of the clocks: (module, name, function)."""

    def in_ns(clock: Callable[[], float]) -> Callable[[], int]:
        return lambda: round(clock() * 1e9)

    def at_wall(function: Callable[[float], Any]) -> Callable[..., Any]:
        def convert(seconds: float | None = None) -> Any:
            return function(world.wall() if seconds is None else seconds)

        return convert

    def strftime(form: str, moment: time.struct_time | None = None) -> str:
        return real_strftime(form, moment or time.gmtime())

    real_strftime = time.strftime
    clocks = {"time": world.wall} | dict.fromkeys(("monotonic", "perf_counter", "process_time"), world.now)
    for name, clock in clocks.items():
        yield time, name, clock
        yield time, f"{name}_ns", in_ns(clock)
    for name in ("gmtime", "localtime"):
        yield time, name, at_wall(getattr(time, name))
    yield time, "strftime", strftime
    yield time, "sleep", world.sleep
    yield datetime, "datetime", _Datetime


@contextlib.contextmanager
def patched(world: World) -> Generator[None]:
    """Put the simulated world in the place of the real one for the duration of the block."""

    def bytes_of(stream: Random, number: int = 32) -> bytes:
        return stream.randbytes(number)

    def hex_of(stream: Random, number: int = 32) -> str:
        return stream.randbytes(number).hex()

    # Each library has its own stream, so that a draw which only the first universe makes, such as at an
    # import, moves no other stream.
    tokens, numbers, names, nats_tokens = (Random(world.random.random()) for _ in range(4))
    places: list[tuple[Any, str, Any]] = [
        *_clocks(world),
        (asyncio, "run", world.run),
        (os, "getpid", _process_id),
        (shutil, "disk_usage", _always(_DISK_USAGE)),  # error texts name the free space
        (adoption, "folder_id", _always("a folder")),  # it contains an inode, which differs each time
        (tempfile, "_get_candidate_names", lambda: iter(lambda: hex_of(names, 4), None)),
        (uuid, "_generate_time_safe", None),
        (uuid, "_node", 1),
        (uuid, "_last_timestamp", None),
        (os, "urandom", _UNSEEDED.randbytes),
        (random, "_urandom", _UNSEEDED.randbytes),
        (random.Random, "seed", _seed),
        (numpy.random.bit_generator, "randbits", _UNSEEDED.getrandbits),
        (secrets, "token_bytes", partial(bytes_of, tokens)),
        (secrets, "token_hex", partial(hex_of, tokens)),
        (secrets, "randbits", numbers.getrandbits),
        (secrets, "randbelow", numbers.randrange),
        (nats.nuid, "token_bytes", nats_tokens.randbytes),
        (nats.nuid, "randbelow", nats_tokens.randrange),
        (nats.aio.client, "token_hex", partial(hex_of, nats_tokens)),
        (nats.js.client, "token_hex", partial(hex_of, nats_tokens)),
        (nats.aio.client, "TcpTransport", SimulatedTransport),
        (backend, "CancelScope", _CancelScope),
        (backend.AsyncIOBackend, "run_sync_in_worker_thread", world.in_thread),
        (threading.Thread, "start", _escape),
        (subprocess, "Popen", _escape),
        *((os, name, _escape) for name in ("posix_spawn", "system")),
        (socket, "socket", _escape),
        *world.files.places(),
    ]
    state, state_of_numpy = random.getstate(), numpy.random.get_state()
    _CancelScope.count = 0
    try:
        with replaced(places):
            random.seed(world.random.random())
            numpy.random.seed(_UNSEEDED.getrandbits(32))
            yield
    finally:
        random.setstate(state)
        numpy.random.set_state(state_of_numpy)


@contextlib.contextmanager
def replaced(places: Iterable[tuple[Any, str, Any]]) -> Generator[None]:
    """Replace attributes (owner, name, value) for the duration of the block."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in places:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
