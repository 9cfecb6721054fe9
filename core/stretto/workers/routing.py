"""The workers of a role that a rollout worker may call, and which of them a call goes to."""

from __future__ import annotations

import heapq
import random
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
import structlog

from stretto.bus.messages import Beacon, Peer
from stretto.engine import Load
from stretto.errors import NoAnswer
from stretto.launcher import Role
from stretto.workers.context import WorkerContext

__all__ = ["Router"]

log = structlog.get_logger()

_STUCK_S = 30.0
"""A worker that had work for so long and sampled no token is passed over, while there is another."""
_BEHIND = 0.25
"""A worker that does not serve the version yet counts as busier by this part of its slots: enough to pass it
over, too little to leave it idle for the whole of a step because its swap took a moment longer."""
_SESSIONS = 16_384
"""Affinities kept; beyond, the one unused for longest is forgotten."""


class _Replica:
    """One worker: the kernel's figures of it, and this process's own calls."""

    def __init__(self, peer: Peer, clock: Callable[[], float]) -> None:
        self.worker = peer.worker
        self.exact_version = peer.exact_version
        self.load: Load | None = None
        self.own = 0
        """Samples of this process's calls."""
        self.others = 0
        """Samples of other rollout workers' calls, by the latest figures."""
        self.scopes: set[anyio.CancelScope] = set()
        self._peak = 0
        self._clock = clock
        self._moved = clock()
        """When it last sampled a token, or had nothing to do."""

    def hear(self, load: Load | None) -> None:
        """The figures of its latest heartbeat. They are a second or two old: what is not this process's by
        the most it had within that time is somebody else's."""
        if load is None or load == self.load:
            return
        sampled = self.load is None or load.generated_tokens != self.load.generated_tokens
        if sampled or not self._in_hand:
            self._moved = self._clock()
        self.load = load
        self.others = max(0, load.running + load.waiting - self._peak)
        self._peak = self.own

    def begin(self, samples: int) -> None:
        """A call of so many samples goes to it."""
        if not self._in_hand:
            self._moved = self._clock()
        self.own += samples
        self._peak = max(self._peak, self.own)

    @property
    def slots(self) -> int:
        """Samples that it can work on at once; 1 where nobody says."""
        return max(1, self.load.slots) if self.load else 1

    @property
    def fullness(self) -> float:
        """Samples that it has in hand, as a part of those it can work on at once."""
        return self._in_hand / self.slots

    def cost(self, min_version: int) -> float:
        """What a request is better off without."""
        behind = self.load is not None and self.load.version < min_version
        return self.fullness + _BEHIND * behind

    @property
    def stuck(self) -> bool:
        """Whether it has work, beats, and does nothing; of those without figures nobody can say."""
        return self.load is not None and self._in_hand > 0 and self._clock() - self._moved > _STUCK_S

    @property
    def _in_hand(self) -> int:
        return self.own + self.others


class Router:
    """The workers of a role that can be called now, by the kernel's latest beacon."""

    def __init__(
        self, context: WorkerContext, role: Role, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._role = role
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._changed = anyio.Event()
        context.on_beacon(self._hear)
        if context.beacon is not None:
            self._hear(context.beacon)

    def _hear(self, beacon: Beacon) -> None:
        members = {peer.worker: peer for peer in beacon.peers if peer.role == self._role}
        for worker, replica in list(self._replicas.items()):
            peer = members.get(worker)
            if peer is None or peer.exact_version != replica.exact_version:
                del self._replicas[worker]
                for scope in replica.scopes:
                    scope.cancel()
        for worker, peer in members.items():
            if worker not in self._replicas:
                self._replicas[worker] = _Replica(peer, self._clock)
                self._changed.set()
                self._changed = anyio.Event()
            self._replicas[worker].hear(peer.load)

    @asynccontextmanager
    async def member(
        self,
        affinity: str = "",
        *,
        min_version: int = 0,
        exact_version: int | None = None,
        samples: Callable[[], int] = lambda: 1,
        avoid: str = "",
    ) -> AsyncGenerator[str]:
        """A worker for one call, waited for if there is none. If it is lost, or is lent to an evaluation or
        taken back, the block is left silently: call it in a loop.

        Of two at random, large ones more often, it is the one with less to do for its size: samples in hand
        as a part of its slots, by the kernel's figures and by the calls made here since. One that is behind
        `min_version` counts as busier by a quarter of its slots. One that has work and sampled nothing for
        30 s is passed over, while there is another.

        Calls of the same `affinity` stay with the worker that had the last one, unless that is gone, passed
        over, or has more samples in hand than its slots and twice what the other choice has (each as a part
        of its own slots); then they move, and stay there.

        Args:
            affinity: what the calls of a session or conversation have in common; empty for none.
            min_version: the policy version that the call asks for.
            exact_version: of an evaluation's call: the version that workers lent to it serve. Other calls go
                to workers that are not lent.
            samples: how many of the call's samples are still to come, asked at its start and its end; in
                between `ended` tells of those that are over.
            avoid: a worker that is taken only if there is no other.
        """
        while not self._serving(exact_version):
            await self._changed.wait()
        replica = self._choose(affinity, min_version, exact_version, avoid)
        with anyio.CancelScope() as scope:
            replica.scopes.add(scope)
            replica.begin(samples())
            try:
                yield replica.worker
            except NoAnswer:
                log.warning("no answer", peer=replica.worker)
                raise
            finally:
                replica.scopes.discard(scope)
                replica.own -= samples()

    def ended(self, worker: str) -> None:
        """One sample of a call under way there is over."""
        if replica := self._replicas.get(worker):
            replica.own -= 1

    def stuck(self, worker: str) -> bool:
        """Whether a worker has had work for 30 s and sampled nothing, while another is better off."""
        replica = self._replicas.get(worker)
        if replica is None or not replica.stuck:
            return False
        return replica not in self._candidates(replica.exact_version, "")

    def _choose(self, affinity: str, min_version: int, exact_version: int | None, avoid: str) -> _Replica:
        candidates = self._candidates(exact_version, avoid)
        # Drawn without replacement, each as often as it has slots (Efraimidis and Spirakis, 2006).
        two = heapq.nlargest(2, candidates, key=lambda replica: random.random() ** (1 / replica.slots))
        choice = min(two, key=lambda replica: replica.cost(min_version))
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
        """Those lent to the evaluation of a version, or those not lent."""
        return [replica for replica in self._replicas.values() if replica.exact_version == exact_version]

    def _candidates(self, exact_version: int | None, avoid: str) -> list[_Replica]:
        """Of those, all but the ones to pass over, or all if nothing else is left."""
        there = self._serving(exact_version)
        moving = [replica for replica in there if not replica.stuck]
        return [replica for replica in moving if replica.worker != avoid] or moving or there
