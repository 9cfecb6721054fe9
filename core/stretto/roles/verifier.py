"""The verifier worker: runs the reward in child processes that can be killed, each with a time limit."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import msgspec
import structlog
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from stretto.bus.messages import Heartbeat, Score, Scored
from stretto.errors import RewardError
from stretto.roles.scoring import HEAD, Answer, Task
from stretto.roles.setting import Setting

__all__ = ["VerifierWork"]

log = structlog.get_logger()

_START_S = 120.0


class VerifierWork:
    """One verifier worker with its children."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        reward = setting.composed.config.reward
        assert reward is not None, "nothing is scored in this run"
        self._timeout_s = reward.timeout_s
        self._children: set[_Child] = set()
        self._free: list[_Child] = []
        self._freed = anyio.Semaphore(0)
        self._busy_s = 0.0

    async def run(self, ready: Callable[[], None]) -> None:
        """Start the children, then score until cancelled."""
        count = self._setting.composed.config.verifier.children
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                for _ in range(count):
                    await self._start()
                await self._setting.bus.serve(self._setting.subject("score"), Score, self._score)
                ready()
                await anyio.sleep_forever()
        finally:
            for child in self._children:
                child.kill()

    def beat(self, beat: Heartbeat) -> Heartbeat:
        """Busy: seconds spent scoring."""
        return Heartbeat(beat.worker, beat.nonce, beat.ready, self._busy_s, refused=beat.refused)

    async def _score(self, message: Score) -> Scored:
        task = Task(message.row, message.completions)
        async with self._child() as child:
            began = time.perf_counter()
            try:
                with anyio.fail_after(self._timeout_s):
                    answer = await child.ask(task)
            except TimeoutError:
                child.kill()
                return Scored((), f"reward took longer than reward.timeout_s={self._timeout_s:g}")
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.IncompleteRead):
                child.kill()
                return Scored((), f"reward ended its process: {await child.status()}")
            finally:
                self._busy_s += time.perf_counter() - began
        return Scored(answer.scores, answer.error)

    @asynccontextmanager
    async def _child(self) -> AsyncGenerator[_Child]:
        """A child that nobody else uses; one that was killed is replaced."""
        await self._freed.acquire()
        child = self._free.pop()
        try:
            yield child
        except BaseException:
            child.kill()  # it may still be at the task that nobody waits for any more
            raise
        finally:
            if child.alive:
                self._free.append(child)
                self._freed.release()
            else:
                self._children.discard(child)
                self._tasks.start_soon(self._start)

    async def _start(self) -> None:
        """One more child. That there cannot be one ends the worker, which is started again."""
        child = await _Child.start(self._setting)
        self._children.add(child)
        self._free.append(child)
        self._freed.release()


class _Child:
    """One scoring process (`stretto.roles.scoring`), spoken to over its pipes."""

    def __init__(self, process: Process) -> None:
        self._process = process
        assert process.stdout is not None
        self._answers = BufferedByteReceiveStream(process.stdout)
        self.alive = True

    @classmethod
    async def start(cls, setting: Setting) -> _Child:
        """Start one and wait until its reward is made.

        Raises:
            RewardError: if the reward cannot be made.
        """
        process = await anyio.open_process(
            [sys.executable, "-m", "stretto.roles.scoring"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
        )
        child = cls(process)
        document = msgspec.to_builtins(setting.composed.config)
        try:
            with anyio.fail_after(_START_S):
                await child._send(msgspec.msgpack.encode((document, setting.context)))
                answer = await child._receive()
        except (TimeoutError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.IncompleteRead) as error:
            child.kill()
            raise RewardError(f"the scoring process did not start: {await child.status()}") from error
        if answer.error:
            child.kill()
            raise RewardError(answer.error)
        return child

    async def ask(self, task: Task) -> Answer:
        """Score one group."""
        await self._send(msgspec.msgpack.encode(task))
        return await self._receive()

    def kill(self) -> None:
        """End it at once."""
        self.alive = False
        with suppress(ProcessLookupError):
            self._process.kill()

    async def status(self) -> str:
        """How it ended, for an error message."""
        with anyio.move_on_after(5):
            code = await self._process.wait()
            return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return "still running"

    async def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        await self._process.stdin.send(HEAD.pack(len(data)) + data)

    async def _receive(self) -> Answer:
        [size] = HEAD.unpack(await self._answers.receive_exactly(HEAD.size))
        return msgspec.msgpack.decode(await self._answers.receive_exactly(size), type=Answer)
