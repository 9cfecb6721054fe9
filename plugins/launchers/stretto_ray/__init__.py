"""Launcher `ray`: each worker is a process on a node of a Ray cluster (see docs/cluster.md).

The cluster runs already, or starts here. An actor starts the process; a placement group has its resources.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from stretto import Component, LauncherConfig, Problem, hookimpl
from stretto.component import PositiveFloat
from stretto.config import RunConfig
from stretto.launcher import ROLES

__all__ = ["RayConfig"]

_OURS = {"CPU": "threads", "GPU": "gpus", "memory": "memory_gb"}
"""Resources of Ray, and the key of the worker's section that sets each."""


class RayConfig(LauncherConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the launcher `ray`. The CPUs, GPUs and, where `memory_gb` is set, the memory that a worker
    reserves follow from the sections of the roles."""

    use: str = "ray"
    """Name of the launcher."""
    address: str | None = None
    """Address of a running cluster, of which this machine is a node: `HOST:PORT` of its head, or `auto` for
    the cluster that this machine belongs to. null: start a cluster on this machine for the run, and stop
    it with the run."""
    runtime_env: Mapping[str, Any] = {}
    """Ray's runtime environment of the workers, such as `{env_vars: {NCCL_DEBUG: INFO}}` or
    `{image_uri: …}`. Ray shows it in logs and in the dashboard, so it must not contain secrets."""
    resources: Mapping[str, Mapping[str, PositiveFloat]] = {}
    """Custom resources that each worker reserves, by role (`trainer`, `inference`, `rollout`, `verifier`) or
    worker group (`training`, or a key of `groups`), such as `{trainer: {a100: 1}}`. The entry of a worker
    group replaces the entry of its role."""
    start_s: PositiveFloat = 300.0
    """Time limit for the start of a worker, in seconds. It includes the time until the cluster has room, and
    the preparation of `runtime_env`."""

    def __post_init__(self) -> None:
        if self.address is not None and "://" in self.address:
            raise ValueError(
                f"address: {self.address!r} is an address for Ray Client; write HOST:PORT of the cluster's "
                "head, and start the run on a node of the cluster"
            )
        if self.address is not None and ":" not in self.address and self.address != "auto":
            raise ValueError(f"address: expected HOST:PORT or `auto`; found {self.address!r}")
        for worker, resources in self.resources.items():
            for name, amount in resources.items():
                if name in _OURS:
                    raise ValueError(
                        f"resources.{worker}: {name!r} follows from `{_OURS[name]}` of the worker's section"
                    )
                if amount > 1 and not float(amount).is_integer():
                    raise ValueError(
                        f"resources.{worker}.{name}: Ray takes fractions below 1 only; found {amount:g}"
                    )


def check(config: RayConfig, run: RunConfig) -> Iterator[Problem]:
    """Report resources for workers that the run does not have, and settings that Ray does not support."""
    groups = {name: getattr(run.groups, name) for name in run.groups.__struct_fields__}
    worker_names = (*ROLES, "training", *groups)
    for worker in config.resources:
        if worker not in worker_names:
            yield Problem(
                f"launcher.resources.{worker}",
                f"no role or worker group {worker!r}; expected {', '.join(worker_names)}",
            )
    if config.resources and config.address is None:
        yield Problem(
            "launcher.resources",
            "the cluster that the launcher starts on this machine has no custom resources; give the "
            "`launcher.address` of a cluster that has them",
        )
    sections = {"training": run.training, "inference": run.inference, "rollout": run.rollout}
    sections |= {"verifier": run.verifier} | {f"groups.{name}": group for name, group in groups.items()}
    for path, section in sections.items():
        if section.gpus > 1 and not math.isclose(section.share, 1):
            yield Problem(
                f"{path}.share",
                f"is {section.share:g}, with {section.gpus} GPUs: Ray gives a process whole GPUs, or a "
                "part of one; set `share` to 1, or `gpus` to 1",
            )
    if config.address is not None and run.weights.use == "file" and not getattr(run.weights, "folder", None):
        yield Problem(
            "weights",
            "`file` keeps versions in the memory of one machine, and a Ray cluster may have several; write "
            "`weights: bus`, or give `weights.folder` on a disk that all nodes share",
        )


@hookimpl
def stretto_launcher() -> Iterator[Component[RayConfig]]:
    yield Component(
        "ray",
        "stretto_ray.launcher:RayLauncher",
        RayConfig,
        "actors on the nodes of a Ray cluster",
        check=check,
        requires={"ray": "stretto[ray]"},
    )
