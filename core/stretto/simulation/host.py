"""The processor cores that the processes of a simulated machine share.

With a host, callbacks, messages and computations take processor time, and all are slower if more of them
want to run than there are cores. Without a host, they take no time.
"""

import contextvars
from collections import defaultdict
from collections.abc import Callable, Mapping

import anyio

from stretto.simulation.loop import SimulatedLoop, SimulatedThread

_QUANTUM_S = 0.0005
"""A thread is blocked for the time of its callbacks in portions of at least this many seconds."""
_SLICE_S = 0.004
"""A computation adapts its speed to the load after this many seconds of work."""
INTERFERENCE = 0.3
"""By how much more processor time all work takes if every core is in use: cores share caches, memory and
power. The quickstart takes 5 to 18 % less of it without staleness, where its cores are in use less often."""


class Host:
    """The cores of one machine. `callback_s`: role -> processor seconds of a callback; `message_s`: those of
    the server for a message. With `sleep_is_work`, an engine that sleeps takes processor time."""

    def __init__(
        self,
        loop: SimulatedLoop,
        cores: int,
        callback_s: Mapping[str, float],
        message_s: float,
        *,
        sleep_is_work: bool,
        training_threads: int = 1,
    ) -> None:
        self._loop = loop
        self._cores = cores
        self._callback_s = callback_s
        self._message_s = message_s
        self.sleep_is_work = sleep_is_work
        self.training_threads = training_threads
        self._running = 0
        self._server = SimulatedThread("nats-server", None)
        self.used: defaultdict[str, float] = defaultdict(float)
        """Role or `nats-server` -> processor seconds so far."""
        self.computed_s: defaultdict[str, float] = defaultdict(float)
        """Role -> processor seconds of computations."""
        self.undisturbed_s: defaultdict[str, float] = defaultdict(float)
        """Role -> processor seconds that its computations would have taken alone."""
        self.callbacks: defaultdict[str, float] = defaultdict(float)
        """Role -> callbacks so far; `nats-server` -> messages so far. One counts more if cores interfere."""
        self._context = contextvars.Context()

    def ran(self, thread: SimulatedThread) -> None:
        """Count a callback that a thread has run."""
        if thread.process is not None:
            role = thread.process.name.partition("-")[0]
            self._count(thread, role, self._callback_s.get(role, 0.0))

    def carried(self, *message: object) -> None:
        """Count a message that the server has carried."""
        del message
        self._count(self._server, "nats-server", self._message_s)

    def _count(self, thread: SimulatedThread, role: str, seconds: float) -> None:
        interference = self._interference(1)
        seconds *= interference
        self.callbacks[role] += interference
        self.used[role] += seconds
        thread.debt_s += seconds
        if thread.debt_s >= _QUANTUM_S:
            thread.blocked_until = self._loop.time() + self._occupy(thread.debt_s)
            thread.debt_s = 0.0

    def compute(self, seconds: float, done: Callable[[], None], role: str, threads: int = 1) -> None:
        """Use processor seconds, on `threads` cores at once, then call `done`."""
        self._running += threads
        self._slice(seconds / threads, done, role, threads)

    async def computed(self, seconds: float, role: str, threads: int = 1) -> None:
        """Use processor seconds, and wait until they have passed."""
        finished = anyio.Event()
        self.compute(seconds, finished.set, role, threads)
        await finished.wait()

    def _slice(self, left_s: float, done: Callable[[], None], role: str, threads: int) -> None:
        if left_s <= 0:
            self._running -= threads
            done()
            return
        seconds = min(left_s, _SLICE_S)
        used_s = seconds * self._interference(0)
        self.used[role] += used_s * threads
        self.computed_s[role] += used_s * threads
        self.undisturbed_s[role] += seconds * threads
        later = used_s * self._slowdown(0), self._slice, left_s - seconds, done, role, threads
        self._loop.call_later(*later, context=self._context)

    def _occupy(self, seconds: float) -> float:
        taken_s = seconds * self._slowdown(1)
        self._running += 1
        self._loop.call_later(taken_s, self._leave, context=self._context)
        return taken_s

    def _leave(self) -> None:
        self._running -= 1

    def _slowdown(self, more: int) -> float:
        return max(1.0, (self._running + more) / self._cores)

    def _interference(self, more: int) -> float:
        others = min(self._running + more, self._cores) - 1
        return 1 + INTERFERENCE * max(0, others) / max(1, self._cores - 1)
