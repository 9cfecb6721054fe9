"""Child processes of a verifier worker: each answers one question at a time, and is killed if it takes too
long."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec
from anyio.abc import Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

from stretto.children.protocol import HEAD, Started, framed
from stretto.errors import RewardError
from stretto.user_code.sandbox import kill

__all__ = ["ChildEnded", "ChildPool", "Program"]

_START_S = 120.0
_END_S = 2.0
_PIPE_ERRORS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.IncompleteRead)


@dataclass(frozen=True)
class Program:
    """How to start a child."""

    name: str
    """Name of the child in messages."""
    argv: Sequence[str]
    setup: bytes
    """Content of the child's first frame."""
    env: Mapping[str, str] | None = None
    """Environment variables; None for those of this process."""
    folder: Path | None = None
    """Working folder; None for that of this process."""


class ChildEnded(Exception):
    """A child ended before it answered a question; the text says how it ended."""


class ChildPool:
    """Up to `count` processes of one program. The pool starts each when it is needed."""

    def __init__(self, program: Program, count: int) -> None:
        self._program = program
        self._missing = count
        self._children: set[_Child] = set()
        self._free: list[_Child] = []
        self._available = anyio.Semaphore(0)
        self._waiting = 0
        self.busy_s = 0.0
        """Seconds that the children spent on questions, summed over all children."""

    async def open(self, tasks: TaskGroup) -> bytes:
        """Start the first child, and return the data that it reports at its start.

        Args:
            tasks: the task group in which the pool starts more children. A child that cannot start ends it.

        Raises:
            RewardError: if the child does not start.
        """
        self._tasks = tasks
        self._missing -= 1
        return await self._start()

    async def ask(self, question: msgspec.Struct, timeout_s: float) -> bytes:
        """Ask a child, and return its answer.

        Raises:
            TimeoutError: if the child does not answer within `timeout_s`; it is killed. Waiting for a free
                child does not count.
            ChildEnded: if the child ends before it answers.
        """
        async with self._child() as child:
            start = time.perf_counter()
            try:
                with anyio.fail_after(timeout_s):
                    return await child.ask(msgspec.msgpack.encode(question))
            except _PIPE_ERRORS as error:
                raise ChildEnded(await child.last_status()) from error
            finally:
                self.busy_s += time.perf_counter() - start

    async def close(self) -> None:
        """Kill all children. Call this after the task group has ended: until then the pool replaces them."""
        for child in self._children:
            await child.end()

    @asynccontextmanager
    async def _child(self) -> AsyncGenerator[_Child]:
        """Yield a child for one caller at a time. If it ends or is killed, start another in its place."""
        if self._missing and self._waiting >= len(self._free):
            self._missing -= 1
            self._tasks.start_soon(self._start)
        self._waiting += 1
        try:
            await self._available.acquire()
        finally:
            self._waiting -= 1
        child = self._free.pop()
        try:
            yield child
        except BaseException:
            child.kill()  # it may still work on a question whose caller no longer waits
            raise
        finally:
            if child.alive:
                self._free.append(child)
                self._available.release()
            else:
                self._children.discard(child)
                self._tasks.start_soon(self._start)
                await child.end()

    async def _start(self) -> bytes:
        """Start one more child. If that fails, the error ends the worker, and the worker is restarted."""
        child, data = await _Child.start(self._program)
        self._children.add(child)
        self._free.append(child)
        self._available.release()
        return data


class _Child:
    """One child process and its pipes."""

    def __init__(self, process: Process) -> None:
        self._process = process
        assert process.stdout is not None
        self._answers = BufferedByteReceiveStream(process.stdout)
        self.alive = True

    @classmethod
    async def start(cls, program: Program) -> tuple[_Child, bytes]:
        """Start a child, wait until it is ready, and return it with the data that it reports.

        Raises:
            RewardError: if the child ends, fails, or is not ready within `_START_S`.
        """
        process = await anyio.open_process(
            program.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            env=program.env,
            cwd=program.folder,
        )
        child = cls(process)
        try:
            with anyio.fail_after(_START_S):
                report = msgspec.msgpack.decode(await child.ask(program.setup), type=Started)
        except TimeoutError as error:
            await child.end()
            raise RewardError(f"{program.name} did not start within {_START_S:g} s") from error
        except _PIPE_ERRORS as error:
            status = await child.last_status()
            await child.end()
            raise RewardError(f"{program.name} did not start: {status}") from error
        except BaseException:
            await child.end()
            raise
        if report.error:
            await child.end()
            raise RewardError(report.error)
        return child, report.data

    async def ask(self, data: bytes) -> bytes:
        """Send a frame, and return the content of the answer's frame."""
        assert self._process.stdin is not None
        await self._process.stdin.send(framed(data))
        [size] = HEAD.unpack(await self._answers.receive_exactly(HEAD.size))
        return await self._answers.receive_exactly(size)

    def kill(self) -> None:
        """Kill the child at once, with all processes that it has started."""
        self.alive = False
        kill(self._process)

    async def end(self) -> None:
        """Kill the child, and close its pipes."""
        self.kill()
        with anyio.CancelScope(shield=True), anyio.move_on_after(_END_S):
            await self._process.aclose()

    async def last_status(self) -> str:
        """Return how the child ended, for an error message. Call it when the child has closed its pipes.

        Read the exit status before killing the process: `kill` collects it, and then it is lost here.
        """
        self.alive = False
        with anyio.move_on_after(5):
            code = await self._process.wait()
            return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return "still running"
