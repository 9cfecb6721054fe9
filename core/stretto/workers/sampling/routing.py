"""The workers of a role that a rollout worker can call, and the choice of one for each call."""

import heapq
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
import structlog

from stretto.bus.messages.membership import EngineFigures, Peer, Routes
from stretto.errors import NoAnswer
from stretto.launcher import Role
from stretto.machine import clock
from stretto.workers.context import WorkerContext

log = structlog.get_logger()

_STUCK_S = 30.0
"""Avoid a worker that had work for this many seconds and sampled no token, if there is another worker."""
_BEHIND = 0.25
"""Cost of a worker that does not serve the version yet, as a part of its slots: enough to prefer another
worker, too little to leave this one idle for a whole step because its swap took slightly longer."""
_SESSIONS = 16_384
"""Maximum number of affinities to remember. Beyond it, the least recently used affinity is forgotten."""


class _Replica:
    """One worker: its figures from the kernel, and this process's calls to it."""

    def __init__(self, peer: Peer, clock: Callable[[], float]) -> None:
        self.peer = peer
        self.worker = peer.worker
        self.exact_version = peer.exact_version
        self.closed = peer.closed
        """Whether the worker gets no new call."""
        self.load: EngineFigures | None = None
        self.own_samples = 0
        self.other_samples = 0
        """Number of samples of other rollout workers' calls, from the latest figures."""
        self.scopes: list[anyio.CancelScope] = []
        self._peak = 0
        self._clock = clock
        self._progress_at = clock()
        """When the worker last sampled a token, or had nothing to do."""

    def update(self, load: EngineFigures | None) -> None:
        """Take the figures of the worker's latest heartbeat. Their number of samples is a second or two old,
        and includes ours: other processes have that number minus our maximum since the last figures."""
        if load is None or load == self.load:
            return
        has_sampled = self.load is None or load.generated_tokens != self.load.generated_tokens
        if has_sampled or not self._open_samples:  # an idle worker is not stuck
            self._progress_at = self._clock()
        self.load = load
        self.other_samples = max(0, load.samples - self._peak)
        self._peak = self.own_samples

    def begin(self, samples: int) -> None:
        if not self._open_samples:
            self._progress_at = self._clock()
        self.own_samples += samples
        self._peak = max(self._peak, self.own_samples)

    @property
    def slots(self) -> int:
        return max(1, self.load.slots) if self.load else 1

    @property
    def fullness(self) -> float:
        return self._open_samples / self.slots

    def cost(self, min_version: int) -> float:
        """Return the cost of a call to this worker; lower is better."""
        is_behind = self.load is not None and self.load.version < min_version
        return self.fullness + _BEHIND * is_behind

    @property
    def stuck(self) -> bool:
        """Whether the worker has work but has sampled nothing for `_STUCK_S`; False if it has no figures."""
        return (
            self.load is not None and self._open_samples > 0 and self._clock() - self._progress_at > _STUCK_S
        )

    @property
    def _open_samples(self) -> int:
        return self.own_samples + self.other_samples


class Router:
    """The workers of a role that can be called now, according to the kernel's latest routes."""

    def __init__(self, context: WorkerContext, role: Role, clock: Callable[[], float] = clock.now) -> None:
        self._role = role
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._changed = anyio.Event()
        context.on_routes(self._update)
        if context.routes is not None:
            self._update(context.routes)

    def _update(self, routes: Routes) -> None:
        members = {peer.worker: peer for peer in routes.peers if peer.role == self._role}
        for worker, replica in list(self._replicas.items()):
            peer = members.get(worker)
            if (
                peer is None
                or peer.nonce != replica.peer.nonce
                or peer.exact_version != replica.exact_version
            ):
                del self._replicas[worker]
                for scope in replica.scopes:
                    scope.cancel()
        for worker, peer in members.items():
            if worker not in self._replicas:
                self._replicas[worker] = _Replica(peer, self._clock)
                self._notify()
            replica = self._replicas[worker]
            if replica.closed and not peer.closed:
                self._notify()
            replica.closed = peer.closed
            replica.update(peer.figures)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    @asynccontextmanager
    async def member(
        self,
        affinity: str = "",
        *,
        min_version: int = 0,
        exact_version: int | None = None,
        samples: Callable[[], int] = lambda: 1,
        avoid: str = "",
    ) -> AsyncGenerator[Peer]:
        """Choose a worker for one call, and yield it. Wait until there is one.

        If the worker is lost, is lent to an evaluation, or returns from one, the block is cancelled without
        an error: call this in a loop.

        Draw two workers at random, with a probability that grows with their slots, and choose the less busy
        one: unfinished samples divided by slots, from the kernel's figures and the calls made here since. A
        worker that is behind `min_version` counts as busier by a quarter of its slots. A worker that has work
        but sampled nothing for 30 s, or that is `avoid`, is chosen only if there is no other.

        Calls of the same `affinity` stay with the worker of the last call, unless this worker is gone, is
        avoided, or its fullness is above 1 plus twice that of the other choice. Then the other is chosen.

        A call with `exact_version` belongs to an evaluation, and goes to a worker that is lent to it. Other
        calls go to workers that are not lent. `samples` returns the number of unfinished samples at the start
        and at the end of the call. In between, `finish_sample` counts those that finish.
        """
        while not self._serving(exact_version):
            await self._changed.wait()
        replica = self._choose(affinity, min_version, exact_version, avoid)
        with anyio.CancelScope() as scope:
            replica.scopes.append(scope)
            replica.begin(samples())
            try:
                yield replica.peer
            except NoAnswer:
                log.warning("no answer", peer=replica.worker)
                raise
            finally:
                replica.scopes.remove(scope)
                replica.own_samples -= samples()

    def finish_sample(self, worker: str) -> None:
        """Count one sample of a call to this worker as finished."""
        if replica := self._replicas.get(worker):
            replica.own_samples -= 1

    def stuck(self, worker: str) -> bool:
        """Return whether a worker has had work for 30 s but sampled nothing, while another is not stuck."""
        replica = self._replicas.get(worker)
        if replica is None or not replica.stuck:
            return False
        return replica not in self._candidates(replica.exact_version, "")

    def _choose(self, affinity: str, min_version: int, exact_version: int | None, avoid: str) -> _Replica:
        candidates = self._candidates(exact_version, avoid)
        # Draw without replacement, with slots as weights (Efraimidis and Spirakis, 2006).
        pair = heapq.nlargest(2, candidates, key=lambda replica: random.random() ** (1 / replica.slots))
        choice = min(pair, key=lambda replica: replica.cost(min_version))
        if not affinity:
            return choice
        home = self._replicas.get(self._homes.get(affinity, ""))
        if home is not None and home in candidates and home.fullness <= 1 + 2 * choice.fullness:
            choice = home
        self._homes[affinity] = choice.worker
        self._homes.move_to_end(affinity)
        if len(self._homes) > _SESSIONS:
            self._homes.popitem(last=False)
        return choice

    def _serving(self, exact_version: int | None) -> list[_Replica]:
        """Return the workers lent to the evaluation of a version; for None, the workers that are not lent."""
        return [
            replica
            for replica in self._replicas.values()
            if replica.exact_version == exact_version and not replica.closed
        ]

    def _candidates(self, exact_version: int | None, avoid: str) -> list[_Replica]:
        """Return the workers for `exact_version`: stuck ones and `avoid` only if no others are left."""
        serving = self._serving(exact_version)
        active = [replica for replica in serving if not replica.stuck]
        return [replica for replica in active if replica.worker != avoid] or active or serving
