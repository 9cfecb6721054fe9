"""Launcher `slurm`: each worker is a step of a Slurm job (see docs/cluster.md).

Outside of a job, `stretto run` submits one. Inside, the kernel's process starts the workers with `srun`.
"""

import re
from collections.abc import Iterator, Mapping

import msgspec

from stretto import Component, LauncherConfig, Problem, hookimpl
from stretto.component import PositiveFloat, PositiveInt
from stretto.config import RunConfig
from stretto.launcher import ROLES

__all__ = ["SlurmConfig", "SlurmPart"]

_OURS = ("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--output", "-o", "--open-mode", "--signal")
"""Options of sbatch that the launcher sets, and that do not work with other values."""


class SlurmPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One more part of a heterogeneous job, for workers that need another kind of node."""

    workers: tuple[str, ...]
    """The workers of this part: roles (`inference`, `rollout`, `verifier`, `trainer`) or names of worker
    groups (`training`, or a key of `groups`)."""
    nodes: PositiveInt = 1
    """Number of nodes."""
    options: tuple[str, ...] = ()
    """Options of sbatch for this part, such as `--partition=cpu`."""


class SlurmConfig(LauncherConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the launcher `slurm`. The number of processor cores, GPUs and, where `memory_gb` is set, the
    memory of a node follow from the sections of the roles; `options` can set others."""

    use: str = "slurm"
    """Name of the launcher."""
    nodes: PositiveInt = 1
    """Number of nodes for the kernel, which runs on the first of them, and for all workers that are in no
    part of `parts`."""
    options: tuple[str, ...] = ()
    """Options of sbatch, such as `--partition=gpu` and `--time=12:00:00`."""
    parts: Mapping[str, SlurmPart] = {}
    """Further parts of a heterogeneous job, by name, such as `{scorers: {workers: [rollout, verifier],
    nodes: 1, options: [--partition=cpu]}}`. The workers of a part run only on its nodes."""
    srun: tuple[str, ...] = ()
    """Options of srun for every worker, such as `--container-image=…` for an image with stretto."""
    prologue: tuple[str, ...] = ()
    """Lines of bash that the kernel and every worker run before they start, such as `module load cuda`."""
    requeue: bool = True
    """Put the job back into the queue when it is preempted, when its first node is lost, or when it reaches
    its time limit. It then resumes the run."""
    stop_before_s: PositiveInt = 180
    """The run writes a checkpoint and ends this many seconds before the job's time limit."""
    start_s: PositiveFloat = 300.0
    """Time limit for the start of a worker, in seconds. It includes the pull of a container image."""

    def __post_init__(self) -> None:
        for key, options in [("options", self.options)] + [
            (f"parts.{name}.options", part.options) for name, part in self.parts.items()
        ]:
            for option in options:
                if not option.startswith("-"):
                    raise ValueError(f"{key}: {option!r} is no option of sbatch; write it as `--name=value`")
                if re.split(r"[= ]", option)[0] in _OURS:
                    raise ValueError(f"{key}: {option!r} cannot be set: stretto sets this option itself")
        if any("\n" in text for text in (*self.options, *self.prologue)):
            raise ValueError("options and prologue: write one option or line an item, without line breaks")
        taken: dict[str, str] = {}
        for name, part in self.parts.items():
            for worker in part.workers:
                if worker in taken:
                    raise ValueError(f"parts: {worker!r} is in two parts, {taken[worker]!r} and {name!r}")
                taken[worker] = name


def check(config: SlurmConfig, run: RunConfig) -> Iterator[Problem]:
    """Report parts for workers that the run does not have, and `weights: file` on several nodes."""
    known = (*ROLES, "training", *run.groups.__struct_fields__)
    for name, part in config.parts.items():
        for worker in part.workers:
            if worker not in known:
                text = f"no role or worker group {worker!r}; expected {', '.join(known)}"
                yield Problem(f"launcher.parts.{name}.workers", text)
    if run.weights.use == "file" and getattr(run.weights, "folder", None) is None:
        nodes = config.nodes + sum(part.nodes for part in config.parts.values())
        if nodes > 1:
            yield Problem(
                "weights",
                "`file` keeps versions in the memory of one machine, and the job has several nodes; write "
                "`weights: bus`, or give `weights.folder` on a disk that all nodes share",
            )


@hookimpl
def stretto_launcher() -> Iterator[Component[SlurmConfig]]:
    yield Component(
        "slurm",
        "stretto_slurm.slurm:SlurmLauncher",
        SlurmConfig,
        "a Slurm job, with a step for each worker",
        check=check,
    )
