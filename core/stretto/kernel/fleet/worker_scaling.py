"""Changes the numbers of workers while a run continues: the kernel starts more workers, or lets those with
the highest ids drain. Workers that a user started do not count. Another number of trainers needs new
processes of the whole group: the kernel writes a checkpoint and ends, and the next kernel starts them."""

from collections.abc import Mapping

import anyio
import structlog
from anyio.abc import TaskGroup

from stretto.assembly.assembly import Worker
from stretto.assembly.worker_numbers import NUMBER_KEYS
from stretto.bus.client import Bus
from stretto.bus.messages.membership import Drain, Draining
from stretto.errors import BusError, ConfigError
from stretto.kernel.ending import Ending
from stretto.kernel.setup import RunSetup
from stretto.launcher import Role

log = structlog.get_logger()

_ASK_S = 10.0
_LEAVE_S = 20.0
"""Seconds beyond `launcher.drain_s` after which a worker that drains is stopped."""


class WorkerScaler:
    """Changes the numbers of one kernel's workers."""

    def __init__(self, setup: RunSetup, bus: Bus, lease_epoch: int, ending: Ending, tasks: TaskGroup) -> None:
        self._setup = setup
        self._fleet = setup.fleet
        self._bus = bus
        self._lease_epoch = lease_epoch
        self._ending = ending
        self._tasks = tasks
        self._scaling = anyio.Lock()
        self._next_groups: dict[str, int] = {}
        """Path of a worker group -> its number of processes in the next kernel."""
        self.roles: tuple[Role, ...] = tuple(
            role for role in NUMBER_KEYS if any(worker.role == role for worker in setup.workers)
        )

    async def scale(self, numbers: Mapping[str, int]) -> tuple[str, ...]:
        """Change the numbers. Return a sentence for each, once workers start or know that they leave."""
        async with self._scaling:
            self._check(numbers)
            roles: dict[Role, int] = {role: numbers[role] for role in self.roles if role in numbers}
            added = [worker for role, number in roles.items() for worker in self._missing(role, number)]
            if faults := [each.message for each in self._fleet.problems(added) if each.severity != "warning"]:
                raise ConfigError("; ".join(faults))  # the launcher has no resources for them
            lines = [await self._scale_role(role, number) for role, number in roles.items()]
            groups = {name: number for name, number in numbers.items() if name not in roles}
            return (*lines, *self._scale_groups(groups))

    def write_groups(self) -> None:
        """Write the groups' new numbers, after the last checkpoint: repeated steps need the old numbers."""
        for path, number in self._next_groups.items():
            self._setup.assembly.numbers.change(f"{path}.processes", number)

    def _check(self, numbers: Mapping[str, int]) -> None:
        groups = {group.path for group in self._setup.placement.groups.values()}
        for name in numbers:
            if name not in groups and name not in self.roles:
                known = ", ".join((*self.roles, *sorted(groups)))
                raise ConfigError(f"this run has no {name!r} to scale; it has {known}")

    def _missing(self, role: Role, number: int) -> list[Worker]:
        resources = self._setup.assembly.resources_of(f"{role}-0")
        ids = self._fleet.free_ids(role, max(0, number - len(self._fleet.started(role))))
        return [Worker(id, role, resources) for id in ids]

    async def _scale_role(self, role: Role, number: int) -> str:
        started = self._fleet.started(role)
        added, leaving = self._missing(role, number), started[number:]
        if added:
            await self._fleet.launch(added, self._tasks)
        for worker in leaving:
            self._tasks.start_soon(self._dismiss, role, worker)
        self._setup.assembly.numbers.change(NUMBER_KEYS[role], number)
        change = f"{role}: {len(started)} -> {number}"
        if len(started) == number:
            return f"{role}: {number} already"
        if added:
            change += f"; starting {', '.join(worker.id for worker in added)}"
        elif leaving:
            change += f"; {', '.join(leaving)} will leave, with their work finished"
        log.info("scaled", workers=role, before=len(started), now=number)
        return change

    async def _dismiss(self, role: Role, worker: str) -> None:
        """Drain a worker and wait for its end. Stop it at once if it has no work yet or does not drain."""
        member = self._fleet.retire(worker)
        limit_s = self._setup.config.launcher.drain_s + _LEAVE_S
        if member is None or not member.ready:
            limit_s = 0.0
        else:
            subject = self._setup.names.worker(role, worker, member.nonce, "drain")
            try:
                await self._bus.request(subject, Drain(self._lease_epoch), Draining, deadline_s=_ASK_S)
            except BusError as error:
                log.warning("worker does not drain", worker=worker, error=str(error))
                limit_s = 0.0
        await self._fleet.until_ended(worker, limit_s)

    def _scale_groups(self, numbers: Mapping[str, int]) -> list[str]:
        """Ask for a checkpoint, from which the next kernel continues with these numbers of processes."""
        lines: list[str] = []
        for path, number in numbers.items():
            former = self._setup.composed.section(path).processes
            if number == former:
                lines.append(f"{path}: {number} already")
                continue
            self._next_groups[path] = number
            self._ending.drain("repeated", "another number of trainers")
            then = "the run writes a checkpoint after the step under way, and continues from there"
            lines.append(f"{path}: {former} -> {number}; {then}")
        return lines
