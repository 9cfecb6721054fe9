"""The Ray resources of workers, and the placement groups that reserve them. Needs no Ray."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stretto.launcher import Job
from stretto_ray import RayConfig

_NAMES = {"CPU": "CPUs (`threads`)", "GPU": "GPUs (`gpus`)", "memory": "GiB of memory (`memory_gb`)"}
_UNITS = {"memory": 2.0**30}
_CLOSE = 1e-6
"""Tolerance of a comparison. It is far below 0.0001, the step in which Ray counts."""


@dataclass(frozen=True)
class ClusterNode:
    """A node of the cluster."""

    name: str
    resources: Mapping[str, float]
    """All resources of the node, used or not."""


@dataclass(frozen=True)
class RayBundle:
    """Resources that are reserved on one node for one worker, or for the workers of one unit."""

    workers: tuple[str, ...]
    resources: Mapping[str, float]
    each: Mapping[str, float]
    """Resources of one worker."""


@dataclass(frozen=True)
class RayGroup:
    """A placement group: bundles that Ray places together."""

    name: str
    strategy: str
    bundles: tuple[RayBundle, ...]


def group_of(job: Job) -> str:
    """Return the key of a job's placement group: its role, and for a rank its worker group too, such as
    `trainer-critic`."""
    return job.worker.rpartition("-")[0] if job.role == "trainer" else job.role


def resources_of(config: RayConfig, job: Job) -> dict[str, float]:
    """Return the Ray resources that a worker reserves. On a cluster that the launcher starts, CPUs and memory
    do not limit workers, so no memory is reserved."""
    needs = job.resources
    reserved: dict[str, float] = {"CPU": needs.threads}
    if needs.gpus:
        reserved["GPU"] = needs.gpus * needs.share
    if config.address is None:
        return reserved
    if needs.memory_gb:
        reserved["memory"] = needs.memory_gb * _UNITS["memory"]
    return reserved | dict(config.resources.get(job.group, config.resources.get(job.role, {})))


def groups_of(config: RayConfig, jobs: Iterable[Job]) -> list[RayGroup]:
    """Return one placement group for each worker group and role, in the order of the jobs. Ranks are
    placed on few nodes, other workers on many. The ranks of a unit share a bundle, so they share a node."""
    groups: dict[str, dict[str, list[Job]]] = {}
    for job in jobs:
        units = groups.setdefault(group_of(job), {})
        units.setdefault(job.unit or f"alone {job.worker}", []).append(job)
    return [
        RayGroup(
            name,
            "PACK" if name.startswith("trainer") else "SPREAD",
            tuple(_bundle(config, members) for members in units.values()),
        )
        for name, units in groups.items()
    ]


def _bundle(config: RayConfig, members: Sequence[Job]) -> RayBundle:
    of_one_worker = resources_of(config, members[0])
    total = _sum(resources_of(config, job) for job in members)
    return RayBundle(tuple(job.worker for job in members), total, of_one_worker)


def _sum(resources: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total = Counter[str]()
    for amounts in resources:
        total.update(amounts)  # pyright: ignore[reportArgumentType] - a Counter adds fractions, too
    return dict(total)


def shortage(groups: Sequence[RayGroup], nodes: Sequence[ClusterNode]) -> str:
    """Return why even an unused cluster has no room for the placement groups, with the config keys of the
    resources; an empty text if the cluster may have room."""
    bundles = [bundle for group in groups for bundle in group.bundles]
    have = ", ".join(f"{node.name}: {_text(node.resources, bundles)}" for node in nodes) or "no nodes"
    for bundle in bundles:
        if not any(_fits(bundle.resources, node.resources) for node in nodes):
            together = " together" if len(bundle.workers) > 1 else ""
            return (
                f"{', '.join(bundle.workers)} needs {_text(bundle.resources, [bundle])}{together} on one "
                f"node; the Ray cluster has {have}"
            )
    needed, total = _sum(each.resources for each in bundles), _sum(node.resources for node in nodes)
    if not _fits(needed, total):
        return f"the workers need {_text(needed, bundles)}; the Ray cluster has {have}"
    return ""


def _fits(needed: Mapping[str, float], given: Mapping[str, float]) -> bool:
    return all(amount <= given.get(name, 0) + _CLOSE for name, amount in needed.items())


def _text(resources: Mapping[str, float], bundles: Iterable[RayBundle]) -> str:
    names = dict.fromkeys(name for bundle in bundles for name in bundle.resources)
    amounts = ((name, resources.get(name, 0) / _UNITS.get(name, 1)) for name in names)
    return " and ".join(f"{amount:g} {_NAMES.get(name, name)}" for name, amount in amounts)
