"""Launcher `hosts`: workers with an odd number run on host B of `hosts.sh`, the others beside the kernel.

While the cable is cut (the file `cut` is in the launcher's folder), it can neither start nor end a process on
B: what ran there counts as lost, and runs on A from then on.
"""

from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import psutil

from stretto import Component, Context, LauncherConfig, hookimpl
from stretto.launcher import Job, StartedProcess
from stretto_local import LocalLauncher

_SCRIPT = str(Path(__file__).with_name("hosts.sh"))
_LOST = 1
_NOBODY = 2**30


class HostsConfig(LauncherConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    folder: str
    """Has the file `cut` while the cable is cut."""


class _ProcessOnB:
    def __init__(self, process: StartedProcess, cut: Path) -> None:
        self._process = process
        self._cut = cut
        self._is_lost = anyio.Event()

    @property
    def pid(self) -> int:
        """Its process id; that of nobody when it is lost, because hosts share their process ids here."""
        return _NOBODY if self._is_lost.is_set() else self._process.pid

    async def wait(self) -> int:
        status: list[int] = []

        async def look(tasks: anyio.abc.TaskGroup) -> None:
            status.append(await self._process.wait())
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look, tasks)
            await self._is_lost.wait()
            tasks.cancel_scope.cancel()
        return status[0] if status else _LOST

    def terminate(self) -> None:
        if self._cut.exists():
            self._is_lost.set()
        else:
            self._process.terminate()

    def send_signal(self, signal: object) -> None:
        if not self._cut.exists():
            self._process.send_signal(signal)  # type: ignore[arg-type]


class HostsLauncher(LocalLauncher):
    def __init__(self, config: HostsConfig, context: Context) -> None:
        super().__init__(config, context)
        self._cut = Path(config.folder, "cut")

    @property
    def address(self) -> str:
        """The address of the kernel's host, as the other one reaches it."""
        cable = next(name for name in psutil.net_if_addrs() if name.startswith("cable"))
        return {"cableA": "10.77.0.1", "cableB": "10.77.0.2"}[cable]

    async def _start(self, job: Job) -> StartedProcess:
        is_odd = int(job.worker.rpartition("-")[2]) % 2 == 1
        if not is_odd or self._cut.exists():
            return await super()._start(job)
        command = (_SCRIPT, "run", "B", *job.command)
        return _ProcessOnB(await super()._start(msgspec.structs.replace(job, command=command)), self._cut)


@hookimpl
def stretto_launcher() -> Iterator[Component[HostsConfig]]:
    yield Component("hosts", HostsLauncher, HostsConfig, "two hosts of a test")
