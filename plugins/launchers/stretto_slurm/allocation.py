"""What Slurm has given to the run: the nodes of its job, and what may be used on each of them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.errors import LaunchError
from stretto.nodes import Node

_ANSWER_S = 60.0  # a busy controller answers late; one that is gone must not hold up the kernel
_UNUSABLE = ("down", "drain", "fail", "maint", "boot", "power", "unk")
"""Beginnings of the states of nodes on which no new process starts, as `sinfo` names them."""


@dataclass(frozen=True)
class Allocation:
    """The job that this process runs in. A heterogeneous job has several parts, each with its own id."""

    jobs: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Allocation | None:
        """Return the job that a process with this environment runs in; None if it runs in none."""
        if parts := int(environment.get("SLURM_HET_SIZE", "0")):
            return cls(tuple(environment[f"SLURM_JOB_ID_HET_GROUP_{part}"] for part in range(parts)))
        return cls((environment["SLURM_JOB_ID"],)) if "SLURM_JOB_ID" in environment else None

    def nodes(self, part: int) -> list[Node]:
        """Return the nodes that a part of the job has now, and on which processes can start."""
        described = ask_slurm("scontrol", "show", "job", "-d", "-o", self.jobs[part]).splitlines()
        # Slurm describes all parts of a heterogeneous job when it is asked for the first.
        mine = [line for line in described if line.startswith(f"JobId={self.jobs[part]} ")]
        nodes = nodes_in(" ".join(mine))
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
    """Read the nodes of a job from what `scontrol show job -d -o` prints."""
    nodes: list[Node] = []
    for names, cores, memory, gres in re.findall(
        r"(?<= )Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+) GRES=(\S*)", job
    ):
        gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:(,]+)?:(\d+)", gres))
        for name in ask_slurm("scontrol", "show", "hostnames", names).split():
            # A process names its GPUs by their number in the list that its step gets.
            memory_gb = int(memory) / 1024 or None  # 0 is all that the node has
            nodes.append(Node(name, _count(cores), tuple(map(str, range(gpus))), memory_gb))
    return nodes


def _count(ids: str) -> int:
    """Return how many numbers a list such as `0-3,8` has."""
    ends = [each.partition("-") for each in ids.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def ask_slurm(*command: str, text: str = "") -> str:
    """Run a command of Slurm with a text as input. Raise LaunchError if it fails, or takes over a minute."""
    try:
        done = subprocess.run(
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
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LaunchError(f"`{' '.join(command)}` failed with status {done.returncode}: {said}")
    return done.stdout


def slurm_environment() -> dict[str, str]:
    """Return this process's environment without the options that Slurm's commands would take from it."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    } | ({"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {})
