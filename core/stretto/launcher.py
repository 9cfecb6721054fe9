"""The contract of launchers: a launcher starts worker processes and watches them.

A launcher starts processes with resources. A process receives its work over the bus, so a launcher knows only
the name of its role, and a user can also start a worker by hand.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import ClassVar, Literal, Protocol, get_args, runtime_checkable

import msgspec

from stretto.component import Defaults, Known, NonNegativeInt, PositiveFloat, PositiveInt, Problem, Share
from stretto.machine.former_process import UNKNOWN_STATUS
from stretto.machine.gpus import gpu_variables, visible_gpus

__all__ = [
    "ALLOCATOR_VARIABLES",
    "ROLES",
    "UNKNOWN_STATUS",
    "AdoptingLauncher",
    "ClusterLauncher",
    "ForkingLauncher",
    "Forks",
    "Handle",
    "Job",
    "Launcher",
    "LauncherConfig",
    "Resources",
    "Role",
    "StartedProcess",
    "Submission",
    "SubmittingLauncher",
    "process_environment",
    "thread_variables",
    "visible_gpus",
    "worker_group",
]

Role = Literal["trainer", "inference", "rollout", "verifier"]
ROLES: tuple[Role, ...] = get_args(Role)
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Set torch's allocator of GPU memory. Versions before 2.9 know the second alone."""


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The resources of each process of a role. Base of the sections that describe roles."""

    threads: PositiveInt = 1
    """Number of compute threads of each process. More threads than cores make a run many times slower."""
    gpus: NonNegativeInt = 0
    """Number of GPUs of each process. The launcher passes them in CUDA_VISIBLE_DEVICES, so a process sees no
    other GPUs; with 0 it sees none. A process that computes with torch itself uses one."""
    share: Share = 1.0
    """Share of the memory of each GPU that a process may use. Roles whose shares add up to at most 1 can
    share one GPU."""
    segments_expand: ClassVar[bool] = False
    """Whether torch's segments of GPU memory grow where they are. Passes of many sizes otherwise leave pieces
    that none fits into. An engine that sleeps cannot have it."""
    memory_gb: PositiveFloat | None = None
    """Host memory of each process, in GiB. Cluster launchers request it; the local launcher only adds it
    up."""

    def default_values(self, known: Known) -> Defaults:
        """Return values for keys that are null, where they follow from the device or from other sections.
        The run writes them to its `config.yaml`."""
        del known
        return {}


class LauncherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every launcher's section."""

    use: str = "local"
    """Name of the launcher."""
    max_restarts: NonNegativeInt = 3
    """Number of times that a worker is started again after it ended unexpectedly; the run stops when it ends
    once more. The count starts again after the worker has run for 10 minutes, for trainers also after a new
    step."""
    drain_s: PositiveFloat = 60.0
    """Seconds in which a worker that is asked to leave must finish its work. Other workers get the work that
    is not finished."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process to start."""

    worker: str
    """Id of the worker, unique in the run, such as `rollout-0`."""
    role: Role
    command: tuple[str, ...]
    """Program and arguments. They contain no secrets: the secrets are in the worker's bootstrap file, whose
    path is the last argument. With `-` in place of the path, the process reads that file's text from its
    standard input."""
    env: Mapping[str, str]
    """Environment variables to set in addition to the inherited ones."""
    resources: Resources
    log: str
    """Path of the file for the stdout and stderr of the process."""
    imports: tuple[str, ...] = ()
    """Modules that the process will import. A process that is forked has them already."""
    unit: str = ""
    """Jobs with the same unit must run on one machine: the ranks of a tensor parallel group. Empty: the job
    may run anywhere."""

    @property
    def group(self) -> str:
        """The worker group of a trainer, `training` or a key of `groups` in the run file. Else the role."""
        return worker_group(self.worker)

    def tail(self, lines: int) -> str:
        """Return the last lines of the log. The worker may have rotated the file."""
        last: deque[str] = deque(maxlen=lines)
        for file in (Path(f"{self.log}.1"), Path(self.log)):
            if file.exists():
                with file.open(errors="replace") as text:
                    last += text
        return "".join(last).rstrip()


class Handle(Protocol):
    """A worker that the launcher has started."""

    @property
    def place(self) -> str:
        """Where the worker runs, as text for users: `pid 4711`, `node3 pid 12`, `job 99.2`."""
        ...

    async def wait(self) -> int:
        """Wait until the process has ended and return its exit status; negative for a signal, and
        `UNKNOWN_STATUS` if nobody can know it. May be called more than once."""
        ...

    async def stop(self, grace_s: float) -> None:
        """End the process and all processes that it started: ask them to end, and kill them after `grace_s`
        seconds. Return when the process is gone."""
        ...

    async def dump_stacks(self) -> None:
        """Ask the process to write the stacks of its threads to its output: send it SIGUSR1. Do nothing if
        the process has ended. Return without waiting for the stacks."""
        ...


class Launcher(Protocol):
    """Starts workers. The kernel makes the launcher, and closes it by stopping every handle."""

    def check(self, jobs: Sequence[Job]) -> Iterable[Problem]:
        """Return the problems that prevent these jobs from running together, without starting anything."""
        ...

    async def launch(self, jobs: Sequence[Job]) -> Sequence[Handle]:
        """Start the jobs in order. A job whose worker id ran before takes the place of that worker.

        Raises:
            LaunchError: if a job cannot be started; the launcher first stops the jobs that it started before.
        """
        ...


@runtime_checkable
class AdoptingLauncher(Protocol):
    """A launcher whose workers outlive the kernel, so that the next kernel of the run can take them over."""

    def record(self, worker: str) -> str:
        """Return a text with which a later launcher finds the process of a worker that this launcher has
        started or adopted. The run's folder keeps the text."""
        ...

    async def adopt(self, job: Job, record: str) -> Handle | None:
        """Take over the worker that an earlier launcher has started for this job. Return None if the worker's
        process is gone."""
        ...


class StartedProcess(Protocol):
    """A process on this machine."""

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its session."""
        ...

    async def wait(self) -> int:
        """Wait until it has ended and return its exit status; negative for a signal."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM."""
        ...

    def send_signal(self, signal: Signals) -> None:
        """Send a signal."""
        ...


class Forks(Protocol):
    """The kernel's fork server: a process on the kernel's machine that has imported what workers need, and
    from which they are forked in a few milliseconds."""

    def can_fork(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether the server can start a command: `python -m MODULE ...` with the environment of
        `process_environment` for one thread and no GPU. Libraries read environment variables when they are
        loaded, so a process with another environment must load the libraries itself."""
        ...

    async def fork(
        self, command: Sequence[str], log_file: Path, imports: Sequence[str]
    ) -> StartedProcess | None:
        """Import the modules `imports`, then start a command in its own session. Return None if that failed
        (the kernel's log has the reason); the caller then starts the command itself.

        Raises:
            OSError: if the log cannot be opened.
        """
        ...


@runtime_checkable
class ForkingLauncher(Protocol):
    """A launcher that can use the kernel's fork server."""

    def use_forks(self, forks: Forks) -> None:
        """Use a fork server for workers on the kernel's machine. Called once, before `launch`."""
        ...


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A run for a cluster to start."""

    begin: tuple[str, ...]
    """Command that begins the run. Its process is the kernel."""
    resume: tuple[str, ...]
    """Command that continues the run, once `begin` has run."""
    folder: str
    """Folder of the run; `config.yaml` is in it once the run has begun."""
    jobs: tuple[Job, ...]
    """The workers that the kernel will start, without their commands."""


@runtime_checkable
class SubmittingLauncher(Protocol):
    """A launcher of a cluster that also runs the kernel: a run is submitted and begins later."""

    def submission(self, submission: Submission) -> str | None:
        """Return the text to submit. None in a process that the cluster has started: there the run begins at
        once."""
        ...

    def submit(self, text: str) -> str:
        """Submit the text, and return the cluster's name for the job, such as `Slurm job 12`.

        Raises:
            LaunchError: if the cluster refuses it.
        """
        ...


@runtime_checkable
class ClusterLauncher(Protocol):
    """A launcher whose workers may run on other machines than the kernel."""

    @property
    def address(self) -> str:
        """Address or name of the kernel's machine, as the machines of the workers reach it."""
        ...


def worker_group(worker: str) -> str:
    """Return `Job.group` of a worker's id, such as `critic` of `trainer-critic-0`."""
    prefix = worker.rpartition("-")[0]
    return "training" if prefix == "trainer" else prefix.removeprefix("trainer-")


def process_environment(resources: Resources, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of a worker on this machine: that of this process, with the worker's limits."""
    return {**os.environ, **thread_variables(resources), **gpu_variables(gpus, os.environ)}


def thread_variables(resources: Resources) -> dict[str, str]:
    """Return the environment variables that limit the compute threads of a process, for every library that
    would otherwise use all cores, and, unless this process has them, `ALLOCATOR_VARIABLES` for
    `segments_expand`. Launchers set them before the process loads those libraries."""
    libraries = ("OMP", "MKL", "OPENBLAS")
    threads = {f"{library}_NUM_THREADS": str(resources.threads) for library in libraries}
    grows = resources.gpus and resources.segments_expand and not os.environ.keys() & {*ALLOCATOR_VARIABLES}
    allocator = dict.fromkeys(ALLOCATOR_VARIABLES if grows else (), "expandable_segments:True")
    # Idle OpenMP threads that spin would slow other processes down by a factor of about ten.
    idle = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}
    return threads | allocator | idle
