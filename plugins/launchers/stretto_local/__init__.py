"""Launcher `local`: starts workers as processes on this machine, each with its threads and GPUs."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import psutil

from stretto import Component, Context, LauncherConfig, Problem, hookimpl
from stretto.errors import LaunchError
from stretto.launcher import Forks, Job, StartedProcess, process_environment, visible_gpus
from stretto.machine.cores import available_cores, available_memory
from stretto.machine.former_process import FormerProcess
from stretto.nodes import Node, Spot, place

__all__ = ["LocalHandle", "LocalLauncher"]


class _ProcessRecord(msgspec.Struct, frozen=True):
    """A worker's process, as recorded for the launcher of the run's next kernel."""

    pid: int
    created: str
    gpus: tuple[str, ...]


class LocalHandle:
    """One process in its own session, so that signals from the terminal do not reach it."""

    def __init__(self, process: StartedProcess) -> None:
        self._process = process
        self.ended = False

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    @property
    def place(self) -> str:
        """The worker's process id, as text."""
        return f"pid {self._process.pid}"

    async def wait(self) -> int:
        """Wait for the exit status, then kill all processes that the worker left running in its session."""
        status = await self._process.wait()
        self.ended = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return status

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the worker, and SIGKILL to its whole session after `grace_s` seconds."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        with anyio.move_on_after(grace_s):
            await self.wait()
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.wait()

    async def dump_stacks(self) -> None:
        """Send SIGUSR1: the worker then writes the stacks of its threads to its output."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)


class LocalLauncher:
    """Starts workers on this machine."""

    def __init__(self, config: LauncherConfig, context: Context) -> None:
        del config, context
        self._spots: dict[str, tuple[Job, Spot]] = {}
        self._handles: dict[str, LocalHandle] = {}
        self._forks: Forks | None = None

    def use_forks(self, forks: Forks) -> None:
        """Use a fork server for the workers that need no GPU."""
        self._forks = forks

    def check(self, jobs: Sequence[Job]) -> Iterator[Problem]:
        """Compare the GPUs and memory that the jobs need with the resources of this machine."""
        try:
            place(jobs, [_this_machine()], {})
        except LaunchError as error:
            yield Problem("launcher", str(error), "environment")
        needed_gb = sum(job.resources.memory_gb or 0 for job in jobs)
        available = available_memory() / 2**30
        if needed_gb > available:
            yield Problem(
                "launcher",
                f"the workers need {needed_gb:g} GiB of memory; this machine has {available:.0f} GiB",
                "warning",
            )

    async def launch(self, jobs: Sequence[Job]) -> list[LocalHandle]:
        """Start the jobs. A worker that ran before gets the same GPUs again."""
        new_jobs = [job for job in jobs if job.worker not in self._spots]
        spots = self._place_beside(new_jobs)
        self._spots |= {job.worker: (job, spots[job.worker]) for job in new_jobs}
        handles: dict[str, LocalHandle] = {}
        errors: list[LaunchError] = []

        async def start(job: Job) -> None:
            try:
                handles[job.worker] = LocalHandle(await self._start(job))
            except OSError as error:
                failure = LaunchError(f"{job.worker} cannot be started: {error}", worker=job.worker)
                failure.__cause__ = error
                errors.append(failure)

        async with anyio.create_task_group() as tasks:
            for job in jobs:
                tasks.start_soon(start, job)
        if errors:
            for handle in handles.values():
                await handle.stop(0)
            raise errors[0]
        self._handles |= handles
        return [handles[job.worker] for job in jobs]

    def record(self, worker: str) -> str:
        """Return a worker's process and its GPUs as JSON; an empty text if the process has ended."""
        try:
            created = FormerProcess(self._handles[worker].pid).created
        except psutil.NoSuchProcess:
            return ""
        gpus = self._spots[worker][1].gpus
        return msgspec.json.encode(_ProcessRecord(self._handles[worker].pid, created, gpus)).decode()

    async def adopt(self, job: Job, record: str) -> LocalHandle | None:
        """Take over the recorded process and its GPUs; return None if the process has ended."""
        if not record:
            return None
        recorded = msgspec.json.decode(record, type=_ProcessRecord)
        process = FormerProcess.find(recorded.pid, recorded.created)
        if process is None:
            return None
        self._spots[job.worker] = job, Spot(_this_machine().name, recorded.gpus)
        self._handles[job.worker] = LocalHandle(process)
        return self._handles[job.worker]

    def _place_beside(self, jobs: Sequence[Job]) -> dict[str, Spot]:
        """Choose GPUs for new workers. Use GPUs of ended workers, which may start again, only if needed."""
        machine = [_this_machine()]
        try:
            return place(jobs, machine, self._spots)
        except LaunchError:
            living = {
                worker: self._spots[worker] for worker, handle in self._handles.items() if not handle.ended
            }
            return place(jobs, machine, living)

    async def _start(self, job: Job) -> StartedProcess:
        env = {**process_environment(job.resources, self._spots[job.worker][1].gpus), **job.env}
        if self._forks is not None and self._forks.can_fork(job.command, env):
            process = await self._forks.fork(job.command, Path(job.log), job.imports)
            if process is not None:
                return process
        with Path(job.log).open("ab") as log:
            return await anyio.open_process(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )


def _this_machine() -> Node:
    return Node("this machine", available_cores(), tuple(visible_gpus(os.environ)))


@hookimpl
def stretto_launcher() -> Iterator[Component[LauncherConfig]]:
    yield Component("local", LocalLauncher, LauncherConfig, "processes on this machine")
