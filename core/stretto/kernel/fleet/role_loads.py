"""The load of each role's workers, as the kernel sees it: the observations of the elastic policy."""

from __future__ import annotations

from stretto.base import clock
from stretto.config import RunConfig
from stretto.kernel.fleet.elastic import LoadObservation, RoleLoad
from stretto.kernel.fleet.fleet import Fleet, FleetMember
from stretto.kernel.schedule.scheduler import Scheduler
from stretto.launcher import Role


class RoleLoads:
    """Measures the loads of one kernel's workers."""

    def __init__(self, config: RunConfig, fleet: Fleet, scheduler: Scheduler) -> None:
        self._config = config
        self._fleet = fleet
        self._scheduler = scheduler
        self._verified: dict[str, tuple[float, float]] = {}
        """Nonce of a verifier -> time of its newest heartbeat that differed, and its seconds of work then."""
        self._verifier_used: dict[str, float] = {}

    def observe(self, groups: int, roles: tuple[Role, ...]) -> LoadObservation:
        """Return the current loads.

        Args:
            groups: groups that were finished since the start of the kernel.
            roles: the roles that the run has workers of.
        """
        loads: dict[Role, RoleLoad] = {role: self._load(role) for role in roles}
        return LoadObservation(groups, self._scheduler.training, loads)

    def _load(self, role: Role) -> RoleLoad:
        started = self._fleet.started(role)
        members = [each for each in self._fleet.of(role) if not each.leaving]
        ready = {each.worker for each in members if each.callable}
        used, waiting = self._figures(role, members) if members else (0.0, 0.0)
        return RoleLoad(len(started), used, waiting, ready=ready.issuperset(started))

    def _figures(self, role: Role, members: list[FleetMember]) -> tuple[float, float]:
        """Return the share of the capacity that is used, and the work that waits, in workers."""
        if role == "rollout":
            return self._of_rollout(members)
        if role == "inference":
            return self._of_inference(members)
        return self._of_verifiers(members)

    def _of_rollout(self, members: list[FleetMember]) -> tuple[float, float]:
        concurrency = self._config.rollout.most
        tickets = self._scheduler.tickets.by_worker()
        waiting = tickets.pop("", 0) / concurrency
        return min(1.0, tickets.total() / (len(members) * concurrency)), waiting

    def _of_inference(self, members: list[FleetMember]) -> tuple[float, float]:
        loads = [each.load for each in members if each.load is not None]
        slots = sum(load.slots for load in loads)
        if not slots:
            return 0.0, 0.0
        used = sum(min(load.running, load.slots) for load in loads) / slots
        return used, sum(load.waiting for load in loads) / (slots / len(loads))

    def _of_verifiers(self, members: list[FleetMember]) -> tuple[float, float]:
        """Verifiers report seconds of work, and not what waits for them: all of them busy means that work
        waits."""
        now = clock.now()
        shares: list[float] = []
        for member in members:
            since, before = self._verified.get(member.nonce, (now, member.busy_s))
            if now - since >= 2.0 or member.nonce not in self._verified:
                children = max(1, self._config.verifier.children)
                share = (member.busy_s - before) / max(now - since, 1e-9) / children
                self._verifier_used[member.nonce] = min(1.0, share)
                self._verified[member.nonce] = now, member.busy_s
            shares.append(self._verifier_used[member.nonce])
        used = sum(shares) / len(shares)
        return used, len(members) * max(0.0, used - 0.8)
