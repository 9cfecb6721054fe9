"""The contract of launchers: something that starts `stretto worker` processes and looks after them.

A launcher starts processes with resources; what they are to do they learn over the bus. So a
launcher knows nothing of roles beyond a name, and a worker can also be started by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol, get_args

import msgspec

from stretto.component import NonNegativeInt, PositiveFloat, PositiveInt, Problem, Share

__all__ = ["ROLES", "Handle", "Job", "Launcher", "LauncherConfig", "Resources", "Role", "thread_variables"]

Role = Literal["trainer", "inference", "rollout", "verifier"]
ROLES: tuple[Role, ...] = get_args(Role)


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each process of a role gets. Base of the sections that describe roles."""

    threads: PositiveInt = 1
    """Compute threads of each process. More than there are cores is many times slower, not faster."""
    gpus: NonNegativeInt = 0
    """GPUs of each process, made visible to it through CUDA_VISIBLE_DEVICES."""
    share: Share = 1.0
    """Part of each GPU's memory that a process may take; roles whose shares add up to at most 1 can
    live on one GPU."""
    memory_gb: PositiveFloat | None = None
    """Host memory of each process in GiB, asked from cluster launchers; the local one only adds it up."""


class LauncherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every launcher's section."""

    use: str = "local"
    """Name of the launcher."""
    max_restarts: NonNegativeInt = 3
    """How often each worker that ends unasked is started again before the run stops."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process to be started."""

    worker: str
    """Id of the worker, unique in the run, such as `rollout-0`."""
    role: Role
    command: tuple[str, ...]
    """Arguments to run. They hold no secret: those are in the bootstrap file they name."""
    env: Mapping[str, str]
    """Variables to set beside the inherited ones."""
    resources: Resources
    log: str
    """File that takes the process's stdout and stderr."""


class Handle(Protocol):
    """A started worker, until it has ended."""

    @property
    def worker(self) -> str:
        """Id of the worker."""
        ...

    @property
    def place(self) -> str:
        """Where it runs, for people: `pid 4711`, `node3 pid 12`, `job 99.2`."""
        ...

    async def wait(self) -> int:
        """The exit status, once the process has ended; negative for a signal. May be awaited often."""
        ...

    async def stop(self, grace_s: float) -> None:
        """End the process and what it started: ask, then kill after `grace_s`. Returns when it is gone."""
        ...

    def tail(self, lines: int) -> str:
        """The last lines it wrote, for an error message."""
        ...


class Launcher(Protocol):
    """Starts workers. Made in the kernel; closed by stopping every handle."""

    def check(self, jobs: Sequence[Job]) -> Iterable[Problem]:
        """What keeps these jobs from being placed together, found without starting anything."""
        ...

    async def launch(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        """Start the jobs, in order. A job whose worker id ran before takes over its place.

        Raises:
            LaunchError: if one could not be started; those started before it are stopped first.
        """
        ...


def thread_variables(resources: Resources) -> dict[str, str]:
    """Environment that gives a process its compute threads, for every library that would otherwise take
    all cores. Launchers set it; it must be there before those libraries are loaded."""
    libraries = ("OMP", "MKL", "OPENBLAS")
    threads = {f"{library}_NUM_THREADS": str(resources.threads) for library in libraries}
    # Idle OpenMP threads that spin slow their neighbours down by an order of magnitude.
    return threads | {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}
