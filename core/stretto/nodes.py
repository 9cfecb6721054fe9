"""Choose the machine and the GPUs of each worker process.

A launcher that starts processes by itself uses this, on one machine or on those that a cluster gave to the
run. Cluster systems that place processes themselves do not need it.
"""

from __future__ import annotations

import copy
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stretto.component import Problem
from stretto.errors import LaunchError, offer
from stretto.launcher import Job

__all__ = ["Node", "Spot", "interface_problems", "place"]


@dataclass(frozen=True)
class Node:
    """One machine, or the part of it that the run may use."""

    name: str
    """Name for users, as in "node7 has 1 GPU"."""
    cores: float = 1
    """Number of processor cores."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs, as in CUDA_VISIBLE_DEVICES."""
    memory_gb: float | None = None
    """Host memory in GiB; None if nothing limits it."""


@dataclass(frozen=True)
class Spot:
    """The place of one worker process."""

    node: str
    """Name of its node."""
    gpus: tuple[str, ...] = ()
    """The GPUs that it may use."""


def place(
    jobs: Sequence[Job], nodes: Sequence[Node], running: Mapping[str, tuple[Job, Spot]]
) -> dict[str, Spot]:
    """Choose the spot of each job, by worker id. Processes share a GPU only if the sum of their shares allows
    it.

    - Jobs of one `unit` get the same node.
    - The ranks of a worker group get as few nodes as possible.
    - The processes of another role get as many nodes as possible. An engine prefers a node with a trainer,
      whose weights it receives.
    - On a node, a process gets the GPUs with the most unused memory.

    More threads than cores are no error, but a process prefers a node with enough unused cores, and then the
    node with the most.

    Args:
        running: the jobs that run already on these nodes, and their spots, by worker id.

    Raises:
        LaunchError: if no node has enough GPUs or memory for a job.
    """
    rooms = [_Room(node) for node in nodes]
    for job, spot in running.values():
        for room in rooms:
            if room.node.name == spot.node:
                room.occupy(job, spot.gpus)
    spots: dict[str, Spot] = {}
    for unit in _units(jobs):
        fitting = [room for room in rooms if room.fits(unit)]
        if not fitting:
            raise LaunchError(_shortage(unit, nodes), worker=unit[0].worker)
        room = max(fitting, key=lambda room: room.preference(unit[0]))
        for job in unit:
            spots[job.worker] = room.add(job)
    return spots


def _units(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group the jobs that must share a node. Groups with large shares of a GPU come first, so that a small
    share does not take the GPU that another job needs as a whole."""
    units: dict[str, list[Job]] = {}
    for job in jobs:
        units.setdefault(f"unit {job.unit}" if job.unit else f"job {job.worker}", []).append(job)
    return sorted(units.values(), key=lambda unit: (-unit[0].resources.share, unit[0].role != "trainer"))


class _Room:
    """The unused resources of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.gpus = dict.fromkeys(node.gpus, 1.0)
        """Unused share of the memory of each GPU."""
        self.cores = node.cores
        self.memory_gb = math.inf if node.memory_gb is None else node.memory_gb
        self.jobs: list[Job] = []

    def fits(self, unit: Sequence[Job]) -> bool:
        trial = copy.deepcopy(self)
        for job in unit:
            gpus, resources = trial.choose(job), job.resources
            if len(gpus) < resources.gpus or trial.memory_gb < (resources.memory_gb or 0):
                return False
            trial.occupy(job, gpus)
        return True

    def choose(self, job: Job) -> tuple[str, ...]:
        """Return the GPUs for a job, those with the most unused memory first; fewer than it needs if there
        are not enough."""
        share = job.resources.share
        fitting = [gpu for gpu in self.gpus if self.gpus[gpu] >= share - 1e-9]
        return tuple(sorted(fitting, key=lambda gpu: -self.gpus[gpu])[: job.resources.gpus])

    def occupy(self, job: Job, gpus: Sequence[str]) -> None:
        for gpu in gpus:
            self.gpus[gpu] -= job.resources.share
        self.cores -= job.resources.threads
        self.memory_gb -= job.resources.memory_gb or 0
        self.jobs.append(job)

    def add(self, job: Job) -> Spot:
        gpus = self.choose(job)
        self.occupy(job, gpus)
        return Spot(self.node.name, gpus)

    def preference(self, job: Job) -> tuple[float, ...]:
        """Return how well a job fits this node, as numbers: higher is better, the first counts most."""
        free_gpus = sum(self.gpus.values()) if job.resources.gpus else 0.0
        has_cores = self.cores >= job.resources.threads
        group_jobs = sum(_group(placed) == _group(job) for placed in self.jobs)
        if job.role == "trainer":
            return has_cores, group_jobs, free_gpus, self.cores
        near_trainer = job.role == "inference" and any(placed.role == "trainer" for placed in self.jobs)
        return has_cores, -group_jobs, near_trainer, free_gpus, self.cores


def _group(job: Job) -> str:
    """Return the name that the processes of a role, or of a worker group, have in common."""
    return job.worker.rpartition("-")[0]


def _shortage(unit: Sequence[Job], nodes: Sequence[Node]) -> str:
    """Explain why no node has room for a unit, naming the config keys that say what a job needs."""
    resources = unit[0].resources
    needs = [_gpus(resources.gpus) + " (`gpus`)"]
    if resources.share < 1:
        needs.append(f"{100 * resources.share:g} % of the memory of each unused (`share`)")
    if resources.memory_gb:
        needs.append(f"{resources.memory_gb:g} GiB of memory (`memory_gb`)")
    together = f", on one node with {len(unit) - 1} other ranks of its group" if len(unit) > 1 else ""
    have = f"{len(nodes)} nodes have at most" if len(nodes) != 1 else f"{nodes[0].name} has"
    most = max((len(node.gpus) for node in nodes), default=0)
    memory_gb = max((node.memory_gb or 0 for node in nodes), default=0)
    memory = f" and {memory_gb:.0f} GiB" if memory_gb and resources.memory_gb else ""
    return (
        f"{unit[0].worker} needs {', '.join(needs)}{together}; {have} {_gpus(most)}{memory}, and the workers "
        "placed before it leave too little of that"
    )


def _gpus(count: int) -> str:
    return {0: "no GPU", 1: "1 GPU"}.get(count, f"{count} GPUs")


def interface_problems(key: str, interface: str) -> Iterator[Problem]:
    """Yield a problem if this machine has no network interface of this name. `key`: dotted config key."""
    known = [name for _, name in socket.if_nameindex()]
    if interface not in known:
        hint = offer(interface, known, "it has")
        yield Problem(key, f"this machine has no network interface {interface!r}{hint}", "environment")
