"""The processes, dataflow and folder of a composed run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from stretto.algorithm import Algorithm
from stretto.assembly.compose import Composed
from stretto.assembly.dataflow import Graph, graph_of
from stretto.assembly.placement import Placement, group_of_worker, sections
from stretto.component import Context
from stretto.config import RunConfig
from stretto.errors import ConfigError, offer
from stretto.launcher import Resources, Role

__all__ = [
    "Worker",
    "context_of",
    "graph",
    "imports_of",
    "placement",
    "resources_of",
    "run_folder",
    "workers",
]


@dataclass(frozen=True)
class Worker:
    """One worker process of the run."""

    id: str
    role: Role
    resources: Resources
    unit: str = ""
    """Workers with the same unit must run on one machine; empty if the worker may run anywhere."""


def resources_of(config: RunConfig, worker: str) -> Resources:
    """Return the resources of a worker's process.

    Raises:
        ConfigError: for a trainer of a group that the run does not have.
    """
    role = worker.partition("-")[0]
    if role == "trainer":
        group, _ = group_of_worker(worker)
        known = sections(config)
        if group not in known:
            hint = offer(group, known, "groups")
            raise ConfigError(f"no worker group of this run has the worker {worker!r}{hint}")
        return known[group]
    by_role: dict[str, Resources] = {
        "inference": config.inference,
        "rollout": config.rollout,
        "verifier": config.verifier,
    }
    return by_role[role]


def workers(config: RunConfig, placement: Placement) -> list[Worker]:
    """Return every worker process that the run starts with: those that its dataflow or evaluation needs."""
    graph = placement.graph
    sampling = graph.samples or config.evaluation is not None
    scoring = graph.scores or config.evaluation is not None
    counts: dict[Role, int] = {
        "inference": config.inference.replicas if sampling else 0,
        "rollout": config.rollout.processes if sampling else 0,
        "verifier": config.verifier.processes if scoring else 0,
    }
    trainers = [
        Worker(name, "trainer", group.section, group.unit_of(rank))
        for group in placement.groups.values()
        for rank, name in enumerate(group.workers)
    ]
    return trainers + [
        Worker(name, role, resources_of(config, name))
        for role, count in counts.items()
        for name in (f"{role}-{index}" for index in range(count))
    ]


def imports_of(composed: Composed, placement: Placement, worker: Worker) -> tuple[str, ...]:
    """Return the modules that take long to import and that a worker's process imports."""
    if worker.role == "trainer":
        path = placement.groups[group_of_worker(worker.id)[0]].path
    else:
        path = str(worker.role)
    named = composed.components[path].imports if path in composed.components else None
    return () if named is None else tuple(named(composed.section(path), composed.config))


def context_of(config: RunConfig, *, run: str = "", folder: str = "", worker: str = "kernel") -> Context:
    """Return the context of the run for a component."""
    return Context(
        run=run,
        name=config.name,
        seed=config.seed,
        model=config.model,
        folder=folder,
        sandbox=config.sandbox,
        worker=worker,
    )


def run_folder(config: RunConfig) -> Path:
    """Return the folder that the run will write to."""
    if config.out is not None:
        return Path(config.out).expanduser().absolute()
    now = datetime.now().astimezone()
    return Path("runs", f"{config.name}-{now:%Y%m%d-%H%M%S}-{config.seed}").absolute()


def graph(composed: Composed) -> Graph:
    """Return the algorithm's dataflow, checked.

    Raises:
        ConfigError: if the dataflow cannot run.
    """
    algorithm: Algorithm = composed.make("algorithm", context_of(composed.config))
    return graph_of(algorithm.calls(), algorithm.models)


def placement(composed: Composed) -> Placement:
    """Return the placement of the algorithm's models on the run's worker groups.

    Raises:
        ConfigError: if the dataflow cannot run, or the models cannot be placed as the run file says.
    """
    return Placement(composed.config, graph(composed))
