"""Sends each rollout worker its few candidates (`stretto.kernel.fleet.candidates`) with their load, always as
a complete list: every second, and at once when a candidate appears, is lost or is lent. So a lost message
does no harm, and a change costs the same with any number of workers."""

import math
from collections.abc import Iterable

import anyio

from stretto.bus.client import Bus
from stretto.bus.messages.membership import EngineFigures, Peer, Routes
from stretto.bus.messages.subjects import Subjects
from stretto.kernel.fleet.candidates import Candidates
from stretto.kernel.fleet.fleet import Fleet, FleetMember
from stretto.machine import clock

_REFRESH_S = 1.0  # maximum age of the load figures, and of routes after a lost message
_LEAST = {"inference": 8, "verifier": 4}
"""Least number of a rollout worker's candidates. Verifiers send no figures: more would not balance better."""
_PART = 50
"""Number of rollout workers whose routes are sent at a time, so that the event loop stays free. Up to this
number of rollout workers hear of an engine's new version at once; more hear of it with the next routes."""
_GAP_S = 0.05
"""Seconds between two rounds of changes. Workers that join together cause one message, not many."""


class RouteSender:
    """Sends routes to a kernel's rollout workers. Calls to former candidates may finish within `finish_s`."""

    def __init__(self, bus: Bus, names: Subjects, fleet: Fleet, lease_epoch: int, *, finish_s: float) -> None:
        self._bus = bus
        self._names = names
        self._fleet = fleet
        self._lease_epoch = lease_epoch
        self._finish_s = finish_s
        self._candidates = Candidates()
        self._sent: dict[str, list[str]] = {}
        self._closed: dict[str, dict[str, float]] = {}
        """Rollout worker -> its former candidates, each with the time until which its calls may continue."""
        self._stale: set[str] = set()
        """Rollout workers whose candidates serve another version than the routes say."""
        self._changed = anyio.Event()

    def look(self, member: FleetMember) -> None:
        """Update the candidates after any change of a worker. A draining rollout worker keeps its routes."""
        is_callable = member.callable and self._fleet.members.get(member.worker) is member
        is_open = is_callable and not member.leaving
        match member.role:
            case "rollout" if is_callable:
                self._candidates.add_rollout(member.worker)
            case "rollout":
                self._candidates.remove_rollout(member.worker)
                self._sent.pop(member.worker, None)
                self._closed.pop(member.worker, None)
            case "inference" | "verifier" if is_open:
                group = (member.role, member.exact_version)
                self._candidates.put(member.worker, group, _LEAST[member.role])
                if len(self._candidates) <= _PART:
                    self._stale |= self._candidates.rollouts_of(member.worker)
            case "inference" | "verifier":
                self._candidates.remove(member.worker)
            case "trainer":
                return
        self._changed.set()

    async def send_changes(self) -> None:
        """Send changed routes at once, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            stale, self._stale = self._stale, set[str]()
            await self._send(sorted(stale.union(self._candidates.take_changed())))
            await anyio.sleep(_GAP_S)

    async def refresh(self) -> None:
        """Send all routes every second, one part after the other, until cancelled."""
        while True:
            rollouts = self._candidates.rollouts
            parts = max(1, math.ceil(len(rollouts) / _PART))
            for part in range(parts):
                await self._send(rollouts[part::parts])
                await anyio.sleep(_REFRESH_S / parts)

    async def _send(self, rollouts: Iterable[str]) -> None:
        for rollout in rollouts:
            # While other routes were sent, the rollout worker may have been lost or replaced.
            if rollout in self._candidates and (member := self._fleet.members.get(rollout)):
                routes = Routes(self._lease_epoch, self._peers_of(rollout))
                subject = self._names.worker("rollout", rollout, member.nonce, "routes")
                await self._bus.publish(subject, routes)

    def _peers_of(self, rollout: str) -> tuple[Peer, ...]:
        members, now = self._fleet.members, clock.now()
        # While a run ends, workers leave the fleet without news.
        candidates = [worker for worker in self._candidates.of(rollout) if worker in members]
        closed = self._closed.pop(rollout, {})
        if members[rollout].beat.tickets:
            previous = (worker for worker in self._sent.get(rollout, ()) if worker not in candidates)
            closed |= dict.fromkeys(previous, now + self._finish_s)
        closed = {
            worker: until
            for worker, until in closed.items()
            if until > now and worker not in candidates and worker in members and members[worker].callable
        }
        if closed:
            self._closed[rollout] = closed
        self._sent[rollout] = candidates
        return (
            *(_peer(members[worker]) for worker in candidates),
            *(_peer(members[worker], closed=True) for worker in closed),
        )


def _peer(member: FleetMember, *, closed: bool = False) -> Peer:
    load = member.beat.load
    figures = load and EngineFigures(
        load.version, load.running + load.waiting, load.slots, load.generated_tokens, load.lost_tokens or 0
    )
    return Peer(member.worker, member.nonce, figures, member.exact_version, closed)
