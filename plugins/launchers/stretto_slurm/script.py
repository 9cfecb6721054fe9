"""The script of a Slurm job that runs a run: the resources of its nodes, and the kernel's command."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

from stretto.errors import LaunchError
from stretto.launcher import Job, Submission
from stretto.nodes import Node, Spot, place
from stretto_slurm import SlurmConfig

__all__ = ["part_of", "script_of"]

_KERNEL_CORES = 1
_KERNEL_GB = 2
_MEMORY_STEPS = 64
"""Sizes of memory that are tried, at most."""

_BODY = """\
umask 077
{prologue}if [ -e {config} ]; then
  {resume} &
else
  {begin} &
fi
kernel=$! ending=
trap 'ending=1; kill -TERM $kernel' USR1  # the time limit is near: end with a checkpoint
trap 'kill -TERM $kernel' TERM
while kill -0 $kernel 2> /dev/null; do wait $kernel; status=$?; done  # a trap also ends `wait`
wait $kernel; late=$?
[ $late = 127 ] || status=$late
{requeue}exit $status
"""
_REQUEUE = """\
if [ -n "$ending" ] && [ $status = 130 ]; then
  scontrol requeue "$SLURM_JOB_ID"
  sleep 60  # Slurm ends this script
fi
"""


def part_of(config: SlurmConfig, job: Job) -> int:
    """Return the number of the part of the job in which a worker runs: 0 for the part of the kernel."""
    prefix = job.worker.rpartition("-")[0]
    group = prefix.removeprefix("trainer-") if prefix != "trainer" else "training"
    for number, part in enumerate(config.parts.values(), 1):
        if group in part.workers:
            return number
    for number, part in enumerate(config.parts.values(), 1):
        if job.role in part.workers:
            return number
    return 0


def script_of(config: SlurmConfig, name: str, submission: Submission) -> str:
    """Return the script of a job for a run.

    Args:
        name: the run's name.

    Raises:
        LaunchError: if the workers have no room on the number of nodes, however large the nodes are.
    """
    parts = [(config.nodes, config.options), *((each.nodes, each.options) for each in config.parts.values())]
    headers: list[list[str]] = []
    for number, (nodes, options) in enumerate(parts):
        jobs = [job for job in submission.jobs if part_of(config, job) == number]
        headers.append([*_resources(jobs, nodes, with_kernel=number == 0), *options])
    general = [
        f"--job-name=stretto-{name}",
        f"--output={submission.folder}.slurm-%j.out",
        "--open-mode=append",
        "--no-kill",  # a lost node costs its workers, not the run
        "--requeue" if config.requeue else "--no-requeue",
        f"--signal=B:USR1@{config.stop_before_s}",
    ]
    lines = ["#!/bin/bash"]
    for number, header in enumerate(headers):
        if number:
            lines.append("#SBATCH hetjob")
        lines += [f"#SBATCH {option}" for option in (general if number == 0 else []) + header]
    body = _BODY.format(
        prologue="".join(f"{line}\n" for line in config.prologue),
        config=shlex.quote(f"{submission.folder}/config.yaml"),
        resume=shlex.join(submission.resume),
        begin=shlex.join(submission.begin),
        requeue=_REQUEUE if config.requeue else "",
    )
    return "\n".join(lines) + "\n" + body


def _resources(jobs: Sequence[Job], nodes: int, *, with_kernel: bool) -> list[str]:
    """Return the options for the cores, GPUs and memory of each node: the least with which the workers have
    room.

    Raises:
        LaunchError: if they have none.
    """
    total = sum(job.resources.gpus for job in jobs)
    threads = sum(job.resources.threads for job in jobs) + with_kernel * _KERNEL_CORES
    sized = bool(jobs) and all(job.resources.memory_gb for job in jobs)
    memory_gb = sum(job.resources.memory_gb or 0 for job in jobs) + with_kernel * _KERNEL_GB
    step_gb = max(1, math.ceil(memory_gb / _MEMORY_STEPS))
    sizes_gb = (
        range(math.ceil(memory_gb / nodes), math.ceil(memory_gb) + step_gb, step_gb) if sized else [None]
    )
    sizes = product(range(math.ceil(total / nodes), total + 1), sizes_gb)
    spots, gpus, size_gb = _least(jobs, nodes, threads, sizes, with_kernel=with_kernel)
    used = Counter({"0": _KERNEL_CORES * with_kernel})
    for job in jobs:
        used[spots[job.worker].node] += job.resources.threads
    return [
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={max(1, *used.values())}",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *([] if size_gb is None else [f"--mem={size_gb}G"]),
    ]


def _least(
    jobs: Sequence[Job],
    nodes: int,
    threads: int,
    sizes: Iterable[tuple[int, int | None]],
    *,
    with_kernel: bool,
) -> tuple[dict[str, Spot], int, int | None]:
    """Return the spots of the jobs on the smallest nodes that have room for them, and the size of these.

    Args:
        threads: threads of all jobs, and of the kernel.
        sizes: (GPUs, GiB of memory) of each node, smallest first; at least one.

    Raises:
        LaunchError: if no size is enough.
    """
    shortage: LaunchError | None = None
    for gpus, size_gb in sizes:
        machines = [
            Node(
                str(number),
                math.ceil(threads / nodes) - (with_kernel and number == 0) * _KERNEL_CORES,
                tuple(map(str, range(gpus))),
                None if size_gb is None else size_gb - (with_kernel and number == 0) * _KERNEL_GB,
            )
            for number in range(nodes)
        ]
        try:
            return place(jobs, machines, {}), gpus, size_gb
        except LaunchError as error:
            shortage = error
    assert shortage is not None, "there is at least one size"
    raise shortage
