"""The nodes of the run's Slurm job, and the resources that the job has on each node."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.errors import LaunchError
from stretto.nodes import Node

_ANSWER_S = 60.0  # a busy controller answers late; a lost controller must not block the kernel
_UNUSABLE = ("down", "drain", "fail", "maint", "boot", "power", "unk")
"""Prefixes of the states, as `sinfo` prints them, of nodes on which no new process can start."""


@dataclass(frozen=True)
class Allocation:
    """The job that this process runs in. A heterogeneous job has several parts, each with its own id."""

    jobs: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Allocation | None:
        """Return the job that a process with this environment runs in; None outside of jobs."""
        if parts := int(environment.get("SLURM_HET_SIZE", "0")):
            return cls(tuple(environment[f"SLURM_JOB_ID_HET_GROUP_{part}"] for part in range(parts)))
        return cls((environment["SLURM_JOB_ID"],)) if "SLURM_JOB_ID" in environment else None

    def nodes(self, part: int) -> list[Node]:
        """Return the present nodes of a part of the job on which processes can start."""
        lines = ask_slurm("scontrol", "show", "job", "-d", "-o", self.jobs[part]).splitlines()
        # Slurm describes all parts of a heterogeneous job when it is asked for the first part.
        own_lines = [line for line in lines if line.startswith(f"JobId={self.jobs[part]} ")]
        nodes = nodes_in(" ".join(own_lines))
        names = ",".join(node.name for node in nodes)
        states = (
            ask_slurm("sinfo", "--noheader", "--Node", f"--nodes={names}", "--format=%N %T") if nodes else ""
        )
        unusable = {
            name for name, state in map(str.split, states.splitlines()) if state.startswith(_UNUSABLE)
        }
        return [node for node in nodes if node.name not in unusable]

    def step_options(self, part: int) -> list[str]:
        """Return the options of srun for a step of one process in a part of the job, beside other steps."""
        where = [f"--jobid={self.jobs[0]}", *([f"--het-group={part}"] if len(self.jobs) > 1 else [])]
        return [*where, "--overlap", "--nodes=1", "--ntasks=1", "--mem=0"]


def nodes_in(job: str) -> list[Node]:
    """Read the nodes of a job from the output of `scontrol show job -d -o`."""
    nodes: list[Node] = []
    for names, cores, memory, gres in re.findall(
        r"(?<= )Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+) GRES=(\S*)", job
    ):
        gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:(,]+)?:(\d+)", gres))
        for name in ask_slurm("scontrol", "show", "hostnames", names).split():
            # A process names a GPU by the GPU's number in the list of its step.
            memory_gb = int(memory) / 1024 or None  # 0 means all memory of the node
            nodes.append(Node(name, _count(cores), tuple(map(str, range(gpus))), memory_gb))
    return nodes


def _count(ids: str) -> int:
    """Return the number of ids in a list such as `0-3,8`."""
    ranges = [piece.partition("-") for piece in ids.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def ask_slurm(*command: str, text: str = "") -> str:
    """Run a command of Slurm with `text` as input and return its output. Raise LaunchError if it fails."""
    try:
        process = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
            env=slurm_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"Slurm does not answer: {' '.join(command)}: {error}") from error
    if process.returncode:
        message = (process.stderr or process.stdout).strip()
        raise LaunchError(f"`{' '.join(command)}` failed with status {process.returncode}: {message}")
    return process.stdout


def slurm_environment() -> dict[str, str]:
    """Return this process's environment without the variables that Slurm's commands read as options."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    } | ({"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {})
