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
_GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.IncompleteRead)


@dataclass(frozen=True)
class Program:
    """What a child runs."""

    name: str
    """For messages."""
    argv: Sequence[str]
    told: bytes
    """What it is for: its first frame."""
    env: Mapping[str, str] | None = None
    """None for this process's own."""
    folder: Path | None = None


class ChildEnded(Exception):
    """A child has ended while it was asked something; the text says how."""


class ChildPool:
    """Up to `count` processes of one program, started as they are needed."""

    def __init__(self, program: Program, count: int) -> None:
        self._program = program
        self._missing = count
        self._children: set[_Child] = set()
        self._free: list[_Child] = []
        self._freed = anyio.Semaphore(0)
        self._waiting = 0
        self.busy_s = 0.0
        """Seconds that they were asked something, all together."""

    async def open(self, tasks: TaskGroup) -> bytes:
        """Start the first one; what it found at its start.

        Args:
            tasks: the task group that more are started in, and which an error there ends.

        Raises:
            RewardError: if there cannot be one.
        """
        self._tasks = tasks
        self._missing -= 1
        return await self._start()

    async def ask(self, question: msgspec.Struct, timeout_s: float) -> bytes:
        """A child's answer.

        Raises:
            TimeoutError: if it takes too long; the child is killed. Waiting for a child does not count.
            ChildEnded: if the child ends instead.
        """
        async with self._child() as child:
            began = time.perf_counter()
            try:
                with anyio.fail_after(timeout_s):
                    return await child.ask(msgspec.msgpack.encode(question))
            except _GONE as error:
                raise ChildEnded(await child.last_status()) from error
            finally:
                self.busy_s += time.perf_counter() - began

    async def close(self) -> None:
        """End them all at once. To be called when the task group has ended: until then it replaces them."""
        for child in self._children:
            await child.end()

    @asynccontextmanager
    async def _child(self) -> AsyncGenerator[_Child]:
        """A child that nobody else uses; one that was killed is replaced."""
        if self._missing and self._waiting >= len(self._free):
            self._missing -= 1
            self._tasks.start_soon(self._start)
        self._waiting += 1
        try:
            await self._freed.acquire()
        finally:
            self._waiting -= 1
        child = self._free.pop()
        try:
            yield child
        except BaseException:
            child.kill()  # it may still be at the question that nobody waits for any more
            raise
        finally:
            if child.alive:
                self._free.append(child)
                self._freed.release()
            else:
                self._children.discard(child)
                self._tasks.start_soon(self._start)
                await child.end()

    async def _start(self) -> bytes:
        """One more. That there cannot be one ends the worker, which is started again."""
        child, found = await _Child.start(self._program)
        self._children.add(child)
        self._free.append(child)
        self._freed.release()
        return found


class _Child:
    """One process, spoken to over its pipes."""

    def __init__(self, process: Process) -> None:
        self._process = process
        assert process.stdout is not None
        self._answers = BufferedByteReceiveStream(process.stdout)
        self.alive = True

    @classmethod
    async def start(cls, program: Program) -> tuple[_Child, bytes]:
        """Start one and wait until it is ready; and what it found.

        Raises:
            RewardError: if it does not get ready.
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
                started = msgspec.msgpack.decode(await child.ask(program.told), type=Started)
        except TimeoutError as error:
            await child.end()
            raise RewardError(f"{program.name} did not start within {_START_S:g} s") from error
        except _GONE as error:
            how = await child.last_status()
            await child.end()
            raise RewardError(f"{program.name} did not start: {how}") from error
        except BaseException:
            await child.end()
            raise
        if started.error:
            await child.end()
            raise RewardError(started.error)
        return child, started.data

    async def ask(self, data: bytes) -> bytes:
        """Its answer to a frame."""
        assert self._process.stdin is not None
        await self._process.stdin.send(framed(data))
        [size] = HEAD.unpack(await self._answers.receive_exactly(HEAD.size))
        return await self._answers.receive_exactly(size)

    def kill(self) -> None:
        """End it at once, with all that it has started."""
        self.alive = False
        kill(self._process)

    async def end(self) -> None:
        """The same, and let go of its pipes."""
        self.kill()
        with anyio.CancelScope(shield=True), anyio.move_on_after(_END_S):
            await self._process.aclose()

    async def last_status(self) -> str:
        """How it ended, for an error message, once it has closed its pipes. To be asked before it is killed:
        who kills looks first whether it has ended, and then nobody else is told how."""
        self.alive = False
        with anyio.move_on_after(5):
            code = await self._process.wait()
            return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return "still running"
