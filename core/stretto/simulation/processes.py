"""The processes of a simulated run: kernels, workers, and the parts of a machine that they use."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from stretto.bus.messages.membership import Heartbeat
from stretto.bus.server import Bootstrap
from stretto.component import Context
from stretto.errors import leaves
from stretto.launcher import Job, LauncherConfig, Resources, Role
from stretto.simulation.loop import SimulatedProcess
from stretto.simulation.patches import World, replaced
from stretto.user_code import environment, reward
from stretto.user_code.faults import SampleFault
from stretto.workers.heartbeats import Heartbeats
from stretto.workers.process import HostProcess
from stretto.workers.scoring.child_pool import ChildEnded, Program
from stretto.workers.worker import work

log = structlog.get_logger()

_START_S = (0.2, 1.0)
"""Shortest and longest time that a worker needs to start, in seconds."""
_END_S = 0.05
"""Seconds that a worker's process needs to end. Its last messages arrive before."""
_CHILD_S = (0.1, 0.5)  # shortest and longest start of a process that scores
_SCORE_S = 0.01  # mean time of a score


class SimulatedMachine:
    """The machine of a simulation: it starts workers and finds processes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loop = world.loop
        self.busy_until = 0.0
        """Virtual time until which the machine is so busy that no worker starts."""

    def start_worker(self, bootstrap: Bootstrap) -> SimulatedProcess:
        """Start a worker, which then loads for a drawn time."""
        process = SimulatedProcess(self.loop, bootstrap.worker)

        async def main() -> None:
            structlog.contextvars.bind_contextvars(worker=bootstrap.worker)
            status = 0
            try:
                await work(bootstrap, _SimulatedHostProcess(self, process))
            except Exception as error:  # noqa: BLE001 - like the process's `main`, which logs it
                status = 1
                for cause in leaves(error):
                    log.error("worker failed", error=f"{type(cause).__name__}: {cause}")
            await anyio.sleep(_END_S)
            process.end(status)

        def start() -> None:
            self.loop.note("start", bootstrap.worker)
            process.task = self.loop.create_task(main(), context=process.context())  # type: ignore[attr-defined]

        begin_s = max(self.loop.time(), self.busy_until)
        self.loop.call_at(begin_s + self.world.costs.uniform(*_START_S), start, context=process.context())
        return process

    def alive(self, role: str = "") -> list[SimulatedProcess]:
        """Return the running processes whose names begin with `role`; all running processes by default."""
        return [each for each in self.loop.processes if each.status is None and each.name.startswith(role)]


class SimulatedConfig(LauncherConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the launcher `simulated`."""


class SimulatedHandle:
    """The handle of a simulated worker."""

    def __init__(self, process: SimulatedProcess) -> None:
        self.place, self._process = process.place, process
        self.name = process.name

    async def wait(self) -> int:
        while self._process.status is None:
            await asyncio.wait([self._process.ended])
        return self._process.status

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s` seconds."""
        self._process.signal(signal.SIGTERM)
        with anyio.move_on_after(grace_s):
            await self.wait()
            return
        self._process.end(-signal.SIGKILL)

    async def dump_stacks(self) -> None:
        """Do nothing: there are no threads to show."""


class SimulatedLauncher:
    """Starts workers as processes of the simulation."""

    machine: SimulatedMachine

    def __init__(self, config: SimulatedConfig, context: Context) -> None:
        del config, context
        self._places: dict[str, str] = {}

    def check(self, jobs: Sequence[Job]) -> Iterator[Any]:
        """Find no problems: the machine is large enough."""
        return iter(())

    async def launch(self, jobs: Sequence[Job]) -> list[SimulatedHandle]:
        await anyio.sleep(0.01)
        machine = self.machine
        files = [Path(job.command[-1]) for job in jobs]
        handles = [SimulatedHandle(machine.start_worker(Bootstrap.read(file))) for file in files]
        self._places |= {handle.name: handle.place for handle in handles}
        return handles

    def record(self, worker: str) -> str:
        return self._places[worker]

    async def adopt(self, job: Job, record: str) -> SimulatedHandle | None:
        """Return a handle of the worker with this place if it still runs, else None."""
        self._places[job.worker] = record
        alive = self.machine.alive(job.worker)
        matches = (process for process in alive if process.name == job.worker and process.place == record)
        return next(map(SimulatedHandle, matches), None)


class _InlineExecutor(Executor):
    """Takes the place of a thread pool with one thread: jobs run in order, and take virtual time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._jobs: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._busy = False

    def submit(self, function: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, partial(function, **keywords), args))
        self._next()
        return future

    def _next(self) -> None:
        if self._busy or not self._jobs:
            return
        if unfinished := [needed for needed in _futures(self._jobs[0][2]) if not needed.done()]:
            # With one thread, a job must run after the jobs that it waits for.
            unfinished[0].add_done_callback(lambda _: self.world.loop.call_soon(self._next))
            return
        self._busy = True
        future, function, args = self._jobs.popleft()
        result, seconds = self.world.call(function, *args)
        host = self.world.host
        if host is not None and host.sleep_is_work:
            host.compute(seconds, partial(self._finish, future, result), "trainer", host.training_threads)
        else:
            self.world.loop.call_later(seconds, self._finish, future, result)

    def _finish(self, future: Future[Any], result: Any) -> None:
        self._busy = False
        if not future.cancelled():  # asyncio cancels it if the task that awaits it is cancelled
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        self._next()


def _futures(args: tuple[Any, ...]) -> Iterator[Future[Any]]:
    for arg in args:
        if isinstance(arg, partial):
            yield from (inner for inner in arg.args if isinstance(inner, Future))


class _SimulatedHostProcess(HostProcess):
    """Takes the place of a worker's process: threads, children and signals of the simulation."""

    def __init__(self, machine: SimulatedMachine, process: SimulatedProcess) -> None:
        self._world, self._process = machine.world, process

    @property
    def place(self) -> str:
        return self._process.place

    @contextmanager
    def heartbeats(self, bootstrap: Bootstrap, role: Role, first: Heartbeat) -> Generator[Heartbeats]:
        """Send heartbeats from another thread of the simulated process."""
        process, beats = self._process, Heartbeats(bootstrap, role, first)
        context = process.context(process.new_thread("heartbeats"))
        context.run(structlog.contextvars.bind_contextvars, worker=bootstrap.worker)
        task = process.loop.create_task(beats.send(), context=context)
        try:
            yield beats
        finally:
            task.cancel()

    @contextmanager
    def signals(self) -> Generator[AsyncIterator[signal.Signals]]:
        send, receive = anyio.create_memory_object_stream[signal.Signals](16)

        def handle(number: int) -> None:
            send.send_nowait(signal.Signals(number))

        self._process.on_signal.append(handle)
        try:
            yield receive
        finally:
            self._process.on_signal.remove(handle)

    def limit_threads(self, resources: Resources) -> None:
        """Do nothing: there are no threads."""

    def executor(self, name: str) -> _InlineExecutor:  # type: ignore[override]
        return _InlineExecutor(self._world)

    def children(self, program: Program, count: int) -> _InlineChildPool:  # type: ignore[override]
        return _InlineChildPool(self._world, program, count)

    def end_after(self, seconds: float) -> None:
        self._process.loop.call_later(seconds, self._process.end, 0)


class _ChildExit(BaseException):
    """Raised where a reward ends its process; the text is the exit status."""


_exit, _process_id = os._exit, os.getpid  # the real ones, before the simulation replaces them


def _end_child(parent: int, status: int) -> None:
    """Replace `os._exit` in a process that scores. A process that the reward has forked really exits."""
    if _process_id() != parent:
        _exit(status)
    raise _ChildExit(status)


class _InlineChildPool:
    """Takes the place of processes that run rewards and environments: these run inline, on virtual time."""

    def __init__(self, world: World, program: Program, count: int) -> None:
        self.world, self._program = world, program
        self.calls, self.busy_s = 0, 0.0
        self._free = anyio.Semaphore(count)

    async def open(self, tasks: TaskGroup) -> bytes:
        await anyio.sleep(self.world.costs.uniform(*_CHILD_S))
        self._what = "reward"
        if environment.COMMAND[-1] in self._program.argv:
            self._what = "environment"
            loaded = environment.load(self._program.setup)
            self._answer: Callable[[bytes], Any] = lambda data: environment.react(loaded, data)
        else:
            self._answer = reward.Scorer(self._program.setup).answer
        return b""

    async def ask(self, question: msgspec.Struct, answer: Any, timeout_s: float) -> Any:
        self.calls += 1
        try:
            async with self._free:
                with replaced([(os, "_exit", partial(_end_child, _process_id()))]):
                    result, seconds = self.world.call(self._answer, msgspec.msgpack.encode(question))
                seconds += self.world.costs.expovariate(1 / _SCORE_S)
                self.busy_s += min(seconds, timeout_s)
                with anyio.fail_after(timeout_s):
                    await anyio.sleep(seconds)
        except _ChildExit as exit:
            raise ChildEnded(f"exit status {exit}") from exit
        finally:
            self.calls -= 1
        if isinstance(result, Exception):
            return answer(fault=SampleFault.of(result, self._what))
        return result

    async def close(self) -> None:
        """Do nothing: there are no processes."""
