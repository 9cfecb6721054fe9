"""The launcher `my_name`: processes of this machine, with a command in front of each worker's."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
from anyio.abc import Process

from stretto import Component, Context, LauncherConfig, Problem, hookimpl
from stretto.errors import LaunchError
from stretto.launcher import Job, process_environment


class MyNameConfig(LauncherConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the launcher `my_name`."""

    command: tuple[str, ...] = ()
    """Program and arguments to put in front of each worker's command, such as `[nice, -n, "5"]`."""


class MyNameHandle:
    """One worker, a process in a session of its own."""

    def __init__(self, process: Process) -> None:
        self.place = f"pid {process.pid}"
        self._process = process

    async def wait(self) -> int:
        """Wait for the exit status, then kill what the worker left running in its session."""
        status = await self._process.wait()
        self._signal_session(signal.SIGKILL)
        return status

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the worker, and SIGKILL to its session after `grace_s` seconds."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        with anyio.move_on_after(grace_s):
            await self.wait()
            return
        self._signal_session(signal.SIGKILL)
        await self.wait()

    async def dump_stacks(self) -> None:
        """Send SIGUSR1, at which a worker writes the stacks of its threads to its output."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def _signal_session(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class MyName:
    """Starts the workers one after the other."""

    def __init__(self, config: MyNameConfig, context: Context) -> None:
        del context
        self._config = config

    def check(self, jobs: Sequence[Job]) -> Iterable[Problem]:
        """Refuse jobs that need GPUs, which this launcher does not divide among workers."""
        if any(job.resources.gpus for job in jobs):
            yield Problem("launcher.use", "'my_name' gives no GPUs to workers; use 'local'")

    async def launch(self, jobs: Sequence[Job]) -> Sequence[MyNameHandle]:
        """Start the jobs. If one cannot be started, stop the others."""
        handles: list[MyNameHandle] = []
        for job in jobs:
            try:
                handles.append(MyNameHandle(await self._start(job)))
            except OSError as error:
                for handle in handles:
                    await handle.stop(0)
                raise LaunchError(f"{job.worker} cannot be started: {error}", worker=job.worker) from error
        return handles

    async def _start(self, job: Job) -> Process:
        with Path(job.log).open("ab") as log:
            return await anyio.open_process(
                [*self._config.command, *job.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**process_environment(job.resources, ()), **job.env},
                start_new_session=True,
            )


@hookimpl
def stretto_launcher() -> Iterator[Component[MyNameConfig]]:
    """The component of this package."""
    yield Component("my_name", MyName, MyNameConfig, "processes of this machine, under a command of yours")
