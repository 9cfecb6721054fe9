"""Child processes of a verifier worker, each with one question at a time, killed if it takes too long."""

from __future__ import annotations

import secrets
import signal
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
import structlog
from anyio.abc import Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

from stretto.errors import RewardError
from stretto.machine import clock
from stretto.user_code.protocol import HEAD, MAX_FRAME, Started, framed
from stretto.user_code.sandbox import kill
from stretto.workers.output import ChildOutput

T = TypeVar("T")

log = structlog.get_logger()

_START_S = 120.0  # user code that downloads or waits in its import would hold the worker for ever
_END_S = 2.0  # a killed child may leave a process behind that keeps its pipes open
_ATTEMPTS = 2
"""Attempts for a question, or for the start of a child, if children are lost to outside causes."""
_PIPE_ERRORS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.IncompleteRead)
_NOT_AN_ANSWER = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_KILLS = (signal.SIGKILL, signal.SIGTERM)


@dataclass(frozen=True)
class Program:
    """How to start a child."""

    name: str
    argv: Sequence[str]
    """The command: in the sandbox, or under a guard (see `stretto.user_code.guard`)."""
    setup: bytes
    """Content of the child's first frame."""
    env: Mapping[str, str] | None = None
    """Environment variables; None for those of this process."""
    folder: Path | None = None
    """Working folder; None for that of this process."""
    max_answer: int = MAX_FRAME
    repeats: bool = True
    """Whether another child may get the question of a killed child. False for questions with effects."""


class ChildEnded(Exception):
    """A child ended before it answered a question; the text says how it ended."""


class _Blameless(ChildEnded):
    """A child was lost, and the question may not be the cause: another child may answer it."""


class ChildPool:
    """Up to `count` processes of one program, started when needed and after each loss. After the first loss
    the pool keeps a spare, which has started Python but not loaded the user's code."""

    def __init__(self, program: Program, count: int) -> None:
        self._program = program
        self._missing = count
        self._children: set[_Child] = set()
        self._free: list[_Child] = []
        self._spare: _Child | None = None
        self._preparing = anyio.Lock()
        self._available = anyio.Semaphore(0)
        self._waiting = 0
        self._output = ChildOutput()
        self.calls = 0
        self.busy_s = 0.0
        """Seconds that the children spent on questions, summed over all children."""

    async def open(self, tasks: TaskGroup) -> bytes:
        """Start the first child; return its report. Others start in `tasks`, which fail if one cannot."""
        self._tasks = tasks
        self._missing -= 1
        return await self._start()

    async def ask(self, question: msgspec.Struct, answer: type[T], timeout_s: float) -> T:
        """Ask a child, and a second child if the first is killed from outside or answers another question.
        Raise TimeoutError, and kill the child, if the answer takes longer than `timeout_s` after a child is
        free. Raise ChildEnded if the child ends before it answers, or its answer is not an `answer`."""
        data = msgspec.msgpack.encode(question)
        if len(data) > MAX_FRAME:
            raise RewardError(
                f"a question to {self._program.name} has {len(data)} bytes; at most {MAX_FRAME} "
                "are allowed; make rows or `state` smaller"
            )
        self.calls += 1
        try:
            for _ in range(_ATTEMPTS - 1 if self._program.repeats else 0):
                try:
                    return await self._ask_one(data, answer, timeout_s)
                except _Blameless as error:
                    log.warning(
                        "child lost, its question is asked again", child=self._program.name, why=str(error)
                    )
            return await self._ask_one(data, answer, timeout_s)
        finally:
            self.calls -= 1

    async def _ask_one(self, question: bytes, answer: type[T], timeout_s: float) -> T:
        async with self._child() as child:
            start = clock.now()
            try:
                with anyio.fail_after(timeout_s):
                    return msgspec.msgpack.decode(await child.ask(question), type=answer)
            except _NOT_AN_ANSWER as error:
                raise ChildEnded(f"killed, because its answer is not valid: {error}") from error
            finally:
                self.busy_s += clock.now() - start

    async def close(self) -> None:
        """Kill all children. Call this after the task group has ended: until then the pool replaces them."""
        for child in (*self._children, *([self._spare] if self._spare else [])):
            await child.end()
        self._output.close()

    @asynccontextmanager
    async def _child(self) -> AsyncGenerator[_Child]:
        """Yield a child for one caller at a time. If it ends or is killed, start another in its place."""
        if self._missing and self._waiting >= len(self._free):
            self._missing -= 1
            self._tasks.start_soon(self._start)
        while (child := await self._free_child()).has_ended:
            log.warning("child lost before its next question", child=self._program.name)
            await self._remove(child)
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
                await self._remove(child)

    async def _free_child(self) -> _Child:
        self._waiting += 1
        try:
            await self._available.acquire()
        finally:
            self._waiting -= 1
        return self._free.pop()

    async def _remove(self, child: _Child) -> None:
        self._children.discard(child)
        self._tasks.start_soon(self._replace)
        await child.end()

    async def _replace(self) -> None:
        await self._start()
        async with self._preparing:
            if self._spare is None:
                self._spare = await _Child.start(self._program, self._output)

    async def _start(self) -> bytes:
        """Start one more child. If that fails, the error ends the worker, and the worker is restarted."""
        for _ in range(_ATTEMPTS):
            child, self._spare = self._spare, None
            child = child or await _Child.start(self._program, self._output)
            try:
                data = await child.set_up()
            except _Blameless as error:
                log.warning("child lost at its start", child=self._program.name, why=str(error))
                continue
            self._children.add(child)
            self._free.append(child)
            self._available.release()
            return data
        raise RewardError(
            f"{self._program.name} did not start: it was killed {_ATTEMPTS} times; if memory is "
            "short, lower verifier.children"
        )


class _Child:
    def __init__(self, program: Program, process: Process) -> None:
        self._program = program
        self._process = process
        assert process.stdout is not None
        self._answers = BufferedByteReceiveStream(process.stdout)
        self._max_answer = MAX_FRAME
        self.alive = True

    @classmethod
    async def start(cls, program: Program, output: ChildOutput) -> _Child:
        with anyio.CancelScope(shield=True):  # asyncio leaks the pipes of a start that is cancelled
            process = await anyio.open_process(
                program.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output.pipe,
                env=program.env,
                cwd=program.folder,
            )
            return cls(program, process)
        raise AssertionError("nobody cancels the shield")

    async def set_up(self) -> bytes:
        name = self._program.name
        try:
            with anyio.fail_after(_START_S):
                report = msgspec.msgpack.decode(await self.ask(self._program.setup), type=Started)
            if report.error:
                raise RewardError(report.error)
        except BaseException as error:
            await self.end()
            if isinstance(error, TimeoutError):
                raise RewardError(
                    f"{name} did not start within {_START_S:g} s; move downloads and waiting "
                    "out of its import"
                ) from error
            if isinstance(error, ChildEnded) and not isinstance(error, _Blameless):
                raise RewardError(f"{name} did not start: {error}") from error
            raise
        self._max_answer = self._program.max_answer
        return report.data

    async def ask(self, data: bytes) -> bytes:
        assert self._process.stdin is not None
        question_id = secrets.randbits(64)
        try:
            await self._process.stdin.send(framed(question_id, data))
            size, answered = HEAD.unpack(await self._answers.receive_exactly(HEAD.size))
            if answered != question_id:
                raise _Blameless("killed, because it wrote an answer to another question")
            if size > self._max_answer:
                raise ChildEnded(
                    f"killed, because it announced an answer of {size} bytes; at most {self._max_answer} are "
                    "allowed"
                )
            return await self._answers.receive_exactly(size)
        except _PIPE_ERRORS as error:
            raise await self._ending() from error

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended, so that a question would not reach it."""
        return self._process.returncode is not None

    def kill(self) -> None:
        self.alive = False
        kill(self._process)

    async def end(self) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with anyio.CancelScope(shield=True):
            # If bubblewrap is killed while it starts, its processes live on: they end with their input.
            with anyio.move_on_after(_END_S), suppress(*_PIPE_ERRORS):
                await self._process.stdin.aclose()
                while True:
                    await self._process.stdout.receive()
            with anyio.move_on_after(_END_S):
                await self._process.aclose()

    async def _ending(self) -> ChildEnded:
        """Return how the child ended, once it has closed its pipes."""
        self.alive = False
        with anyio.move_on_after(5):
            status = await self._process.wait()
            # bubblewrap, like a shell, ends with 128 + n when signal n has ended its command.
            signal_number = -status if status < 0 else status - 128
            if signal_number in _KILLS:
                return _Blameless(f"killed by signal {signal_number}")
            return ChildEnded(f"killed by signal {-status}" if status < 0 else f"exit status {status}")
        return ChildEnded("it closed its pipes")
