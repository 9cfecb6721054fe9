"""The script of a run's Slurm job: the resources of its nodes, and the kernel's command."""

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from stretto.errors import LaunchError
from stretto.launcher import Job, Submission
from stretto.nodes import Node, Spot, place
from stretto_slurm import SlurmConfig

_KERNEL_CORES = 1  # of a node, for the kernel
_KERNEL_GB = 2  # of a node's memory, for the kernel
_MEMORY_STEPS = 64
"""Number of memory sizes per node to try."""

_BODY = """\
umask 077
kernel= ending= stopping=
stop() {{ stopping=1; [ -z "$kernel" ] || kill -TERM $kernel; }}
trap 'ending=1; stop' USR1  # the time limit is near: end with a checkpoint
trap stop TERM
{prologue}if [ -e {config} ]; then
  {resume} &
else
  {begin} &
fi
kernel=$!
[ -z "$stopping" ] || stop
{wait}{requeue}exit $status
"""
_REQUEUE = """\
if [ -n "$ending" ] && [ $status = 130 ]; then
  trap '' TERM  # a script that ends by itself now would be a failed job to Slurm
  scontrol requeue "$SLURM_JOB_ID"
  sleep 60  # Slurm kills this script
fi
"""


def part_of(config: SlurmConfig, job: Job) -> int:
    """Return the number of the part of the job in which a worker runs: 0 for the part of the kernel."""
    for name in (job.group, job.role):
        for number, part in enumerate(config.parts.values(), 1):
            if name in part.workers:
                return number
    return 0


def wait_for(variable: str) -> str:
    """Return lines of bash that wait for the process whose id is in a variable, and set `status` to its exit
    status. They wait in a loop, because a trap ends bash's `wait` early."""
    return (
        f"while kill -0 ${variable} 2> /dev/null; do wait ${variable}; status=$?; done\n"
        f"wait ${variable}; late=$?\n"
        "[ $late = 127 ] || status=$late\n"
    )


def script_of(config: SlurmConfig, name: str, submission: Submission) -> str:
    """Return the script of a run's job. Raise LaunchError if the workers have no room on the nodes."""
    parts = [(config.nodes, config.options), *((part.nodes, part.options) for part in config.parts.values())]
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
        resume=shlex.join([*submission.resume, "--supervise"]),
        begin=shlex.join([*submission.begin, "--supervise"]),
        wait=wait_for("kernel"),
        requeue=_REQUEUE if config.requeue else "",
    )
    return "\n".join(lines) + "\n" + body


def _resources(jobs: Sequence[Job], nodes: int, *, with_kernel: bool) -> list[str]:
    """Return options with which each node has enough for the workers: as few GPUs as possible, with ranks on
    as few nodes as possible; without GPUs, as few cores and as little memory as possible."""
    spots, gpus = (
        _place_on_gpus(jobs, nodes)
        if any(job.resources.gpus for job in jobs)
        else (_place_on_cores(jobs, nodes), 0)
    )
    cores, memory_gb = Counter[str](), Counter[str]()
    if with_kernel:
        cores["0"], memory_gb["0"] = _KERNEL_CORES, _KERNEL_GB
    for job in jobs:
        cores[spots[job.worker].node] += job.resources.threads
        memory_gb[spots[job.worker].node] += math.ceil(job.resources.memory_gb or 0)
    all_set_memory = bool(jobs) and all(job.resources.memory_gb for job in jobs)
    return [
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={max(1, *cores.values())}",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *([f"--mem={max(memory_gb.values())}G"] if all_set_memory else []),
    ]


def _place_on_gpus(jobs: Sequence[Job], nodes: int) -> tuple[dict[str, Spot], int]:
    """Return the spots of jobs on nodes with the smallest sufficient number of GPUs, and this number."""
    total = sum(job.resources.gpus for job in jobs)
    for gpus in range(math.ceil(total / nodes), total):
        with suppress(LaunchError):
            return _place(jobs, nodes, gpus, math.inf, None), gpus
    return _place(jobs, nodes, total, math.inf, None), total


def _place_on_cores(jobs: Sequence[Job], nodes: int) -> dict[str, Spot]:
    """Return the spots of jobs on nodes that have about equal parts of all cores and all memory."""
    cores = math.ceil(sum(job.resources.threads for job in jobs) / nodes)
    memory_gb = sum(job.resources.memory_gb or 0 for job in jobs)
    for step in range(_MEMORY_STEPS):  # memory that divides evenly may leave no room for large workers
        with suppress(LaunchError):
            return _place(jobs, nodes, 0, cores, memory_gb / nodes * (1 + step / _MEMORY_STEPS * nodes))
    return _place(jobs, nodes, 0, cores, None)


def _place(
    jobs: Sequence[Job], nodes: int, gpus: int, cores: float, memory_gb: float | None
) -> dict[str, Spot]:
    names = tuple(map(str, range(gpus)))
    return place(jobs, [Node(str(number), cores, names, memory_gb) for number in range(nodes)], {})
