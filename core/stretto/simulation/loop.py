"""The event loop of a simulated world: many processes in one thread, and a time of its own.

Time jumps to the next timer when no callback is ready. Each simulated thread has a first-in, first-out queue
of callbacks, as asyncio promises, and a seed draws the thread that runs next. Nothing else is reordered, so
each order could also occur between real processes. Code that would leave the simulation, for example by a
socket, raises `Escaped`.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import heapq
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

TICK_S = 1e-6
"""Virtual time of a callback. Without it, code that is woken exactly at its deadline would wait again."""
STANDSTILL = 20_000
"""The loop raises `Livelock` after about this many callbacks without a jump of the time."""
_NAMED = 40
"""Number of callbacks that a `Livelock` names."""
_CANCEL_AGAIN_S = 1e-3  # see `SimulatedLoop.call_soon`
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))

_THREAD: contextvars.ContextVar[SimulatedThread] = contextvars.ContextVar("simulated thread")


class Deadlock(Exception):
    """No callback is ready, and no timer is left: all processes wait for each other."""


class Livelock(Exception):
    """Callbacks follow each other without end, and no time passes. The text names the last callbacks."""


class ProcessEnded(BaseException):
    """Raised where the code of a killed process would change a file, for example in a `finally`."""


class Escaped(Exception):
    """Code in the simulation has used something of the real world."""


class SimulatedThread:
    """A simulated thread that runs an event loop: its queue of ready callbacks."""

    __slots__ = ("blocked_until", "debt_s", "listed", "name", "process", "ready")

    def __init__(self, name: str, process: SimulatedProcess | None) -> None:
        self.name, self.process = name, process
        self.ready: deque[asyncio.Handle] = deque()
        self.blocked_until = 0.0
        """Until this time the thread computes, and runs no callback."""
        self.debt_s = 0.0
        """Processor seconds of callbacks for which the thread was not blocked yet."""
        self.listed = False
        """Whether the thread is among the loop's runnable threads."""

    @property
    def gone(self) -> bool:
        return self.process is not None and self.process.status is not None


class SimulatedProcess:
    """A simulated process: threads, signals, an exit status. It begins with one thread, `main`."""

    def __init__(self, loop: SimulatedLoop, name: str) -> None:
        self.loop, self.name = loop, name
        self.pid = 1000 + len(loop.processes)
        self.place = f"simulated pid {self.pid}"
        """Description of where the process runs."""
        self.began = loop.time()
        self.main = SimulatedThread(name, self)
        self.threads = [self.main]
        self.status: int | None = None
        """Exit status; negative for a signal; None while the process runs."""
        self.stopped_until = 0.0
        self.joined = False
        """Whether the kernel has let this worker join."""
        self.ended = loop.create_future()
        self.on_end: list[Callable[[], None]] = []
        """Functions to call when the process ends, for what the system then does, such as closing sockets."""
        self.on_signal: list[Callable[[int], None]] = []
        loop.processes.append(self)

    def context(self, thread: SimulatedThread | None = None) -> contextvars.Context:
        """Return an empty context, in which callbacks and tasks belong to a thread of this process."""
        context = contextvars.Context()
        context.run(_THREAD.set, thread or self.main)
        return context

    def new_thread(self, name: str) -> SimulatedThread:
        thread = SimulatedThread(f"{self.name}/{name}", self)
        self.threads.append(thread)
        return thread

    def end(self, status: int) -> None:
        """End the process at once: none of its code runs any more, not even a `finally`."""
        if self.status is not None:
            return
        self.status = status
        self.loop.note("end", self.name, status)
        for thread in self.threads:
            self.loop.graves.append([*thread.ready])  # else the coroutines' `finally` blocks would run
            thread.ready.clear()
        for call in self.on_end:
            call()
        if not self.ended.done():
            self.ended.set_result(status)

    def signal(self, number: int) -> None:
        """Send a signal, which ends a process without a handler."""
        if self.status is None:
            self.loop.note("signal", self.name, number)
            for handle in self.on_signal:
                handle(number)
            if not self.on_signal:
                self.end(-number)

    def stop(self, seconds: float) -> None:
        """Stop the process for `seconds`, as SIGSTOP and SIGCONT do."""
        self.stopped_until = max(self.stopped_until, self.loop.time() + seconds)
        self.loop.note("stop", self.name, seconds)
        self.loop.call_later(seconds, self._resume_when_due, context=contextvars.Context())

    @property
    def stopped(self) -> bool:
        return self.loop.time() < self.stopped_until

    def _resume_when_due(self) -> None:
        if not self.stopped:  # else the process was stopped once more
            self.resume()

    def resume(self) -> None:
        self.stopped_until = 0.0
        self.loop.note("resume", self.name)
        for thread in self.threads:
            self.loop.wake(thread)

    def block(self, seconds: float) -> None:
        """Let the main thread compute for `seconds`; other threads of the process continue."""
        self.loop.note("block", self.name, seconds)
        self.main.blocked_until = max(self.main.blocked_until, self.loop.time() + seconds)


def current_process() -> SimulatedProcess | None:
    """Return the simulated process whose code runs; None for the world around them."""
    thread = _THREAD.get(None)
    return thread.process if thread is not None else None


class _NumberedTask(asyncio.Task[Any]):
    """A task whose hash is a number, so that sets of tasks have the same order in each run."""

    count = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        _NumberedTask.count += 1
        self._number = _NumberedTask.count
        super().__init__(*args, **options)
        context: contextvars.Context = options.get("context") or contextvars.copy_context()
        self.thread = context.get(_THREAD)

    def __hash__(self) -> int:
        return self._number


def _is_ours(file: str) -> bool:
    return "stretto" in file or not file.startswith(_LIBRARIES)


def _places(awaited: Any) -> Iterator[str]:
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None and _is_ours((code := frame.f_code).co_filename):
            peer = f"({frame.f_locals['who']})" if code.co_qualname == "Bus.request" else ""
            yield f"{code.co_qualname}{peer}:{frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return _NumberedTask(coroutine, loop=loop, **options)


class SimulatedLoop(asyncio.BaseEventLoop):
    """The event loop. Its seed draws which thread runs next. Equal digests of the trace mean equal events."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        _NumberedTask.count = 0
        self.set_task_factory(_task)
        self.set_exception_handler(self._on_exception)
        self._rng = Random(f"order {seed}")
        self._now = 1000.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbered = 0
        self._num_cancelled = 0
        self._world = SimulatedThread("world", None)
        self._runnable: list[SimulatedThread] = []
        self._without_jump = 0
        self._last: deque[str] = deque(maxlen=_NAMED)
        self.processes: list[SimulatedProcess] = []
        self.graves: list[Any] = []
        """Callbacks of ended processes, kept because their collection would run `finally` blocks."""
        self.callbacks = 0
        self.errors: list[str] = []
        self.on_ran: Callable[[SimulatedThread], object] | None = None
        """Called after each callback, with the callback's thread."""
        self._hash = hashlib.sha256()
        self.trace: Callable[[str], None] | None = None

    def note(self, kind: str, *facts: object) -> None:
        """Add a line to the trace."""
        line = " ".join([f"{self._now:.6f}", kind, *map(str, facts)])
        self._hash.update(line.encode() + b"\n")
        if self.trace is not None:
            self.trace(line)

    @property
    def digest(self) -> str:
        """SHA-256 of the trace, in hex."""
        return self._hash.hexdigest()

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        thread = _THREAD.get(self._world)
        if not thread.gone and not isinstance(context.get("exception"), ProcessEnded):
            self.errors.append(
                f"{self._now:.3f} {thread.name}: {context['message']}: {context.get('exception')!r}"
            )

    # ------------------------------------------------------------------------------- asyncio's interface

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        """Run a callback in the thread of its context, after the callbacks that are ready in this thread."""
        if getattr(callback, "__name__", "") == "_deliver_cancellation":
            # anyio calls this again at once until the scope is empty: without a delay, no time would pass.
            return self.call_later(_CANCEL_AGAIN_S, callback, *args, context=context)
        handle = asyncio.Handle(callback, args, self, context)
        self._add(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """Run a callback after `delay` seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """Run a callback at the virtual time `when`."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        self._numbered += 1
        heapq.heappush(self._timers, (when, self._numbered, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._num_cancelled += 1
        if self._num_cancelled > 1000 and self._num_cancelled > len(self._timers) / 2:
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapq.heapify(self._timers)
            self._num_cancelled = 0

    def _write_to_self(self) -> None:
        """Do nothing: no thread waits in a `select`."""

    def _process_events(self, event_list: object) -> None:
        """Do nothing: the simulation has no files or sockets with events."""

    def _escape(self, *args: Any, **options: Any) -> Any:
        raise Escaped(
            f"{args[:2]}: threads, sockets, signals and processes are simulated by stretto.testing only"
        )

    run_in_executor: Any = _escape
    create_connection = create_server = create_datagram_endpoint = _escape
    subprocess_exec = subprocess_shell = connect_read_pipe = connect_write_pipe = _escape
    add_reader: Any = _escape
    add_writer: Any = _escape
    add_signal_handler: Any = _escape
    getaddrinfo = _escape

    def waiting(self) -> list[str]:
        """Return for each task of a living thread its stack of stretto's functions, the innermost last."""
        tasks: list[_NumberedTask] = sorted(asyncio.all_tasks(self), key=hash)  # type: ignore[assignment]
        stacks = ((task.thread, " > ".join(_places(task.get_coro()))) for task in tasks)
        return [f"{thread.name}: {text}" for thread, text in stacks if thread and not thread.gone and text]

    # ------------------------------------------------------------------------------------ the order

    def wake(self, thread: SimulatedThread) -> None:
        """Make a thread runnable, if one of its callbacks is ready."""
        if thread.ready and not thread.listed:
            thread.listed = True
            self._runnable.append(thread)

    def _add(self, handle: asyncio.Handle) -> None:
        thread = handle._context.get(_THREAD, self._world)  # type: ignore[attr-defined]
        if thread.gone:
            self.graves.append(handle)
            return
        thread.ready.append(handle)
        self.wake(thread)

    def _run_once(self) -> None:
        """Run callbacks until the loop is stopped. BaseEventLoop calls this method."""
        while not self._stopping:  # type: ignore[attr-defined]
            if self._timers and self._timers[0][0] <= self._now:
                self._fire()
            elif not self._runnable:
                self._jump()
            else:
                self._run_next()

    def _fire(self) -> None:
        timer = heapq.heappop(self._timers)[2]
        timer._scheduled = False  # type: ignore[attr-defined]
        if timer.cancelled():
            self._num_cancelled = max(0, self._num_cancelled - 1)
        else:
            self._add(timer)

    def _jump(self) -> None:
        if not self._timers:
            raise Deadlock("no callback is ready, and no timer is left")
        self._now = max(self._now, self._timers[0][0])
        self._without_jump = 0

    def _run_next(self) -> None:
        runnable = self._runnable
        index = self._rng.randrange(len(runnable)) if len(runnable) > 1 else 0
        thread = runnable[index]
        process = thread.process
        if not thread.ready or (process is not None and process.stopped):
            self._unlist(index)
        elif thread.blocked_until > self._now:
            self._unlist(index)
            self.call_at(thread.blocked_until, self.wake, thread, context=contextvars.Context())
        else:
            handle = thread.ready.popleft()
            if not handle.cancelled():
                self._tick(thread, handle)
                handle._run()  # type: ignore[attr-defined]

    def _unlist(self, index: int) -> None:
        self._runnable.pop(index).listed = False

    def _tick(self, thread: SimulatedThread, handle: asyncio.Handle) -> None:
        self.callbacks += 1
        self._now += TICK_S
        if self.on_ran is not None:
            self.on_ran(thread)
        self._without_jump += 1
        if self._without_jump > STANDSTILL:
            self._last.append(f"{thread.name}: {handle!r}"[:300])
            if self._without_jump > STANDSTILL + _NAMED:
                raise Livelock("\n".join(self._last))
