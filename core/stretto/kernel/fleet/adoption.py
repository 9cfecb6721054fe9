"""Takes over the workers of a former kernel: finds their processes, and lets these join again."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import anyio
import msgspec
import structlog

from stretto.bus.guard import folder_id
from stretto.bus.messages.membership import Join
from stretto.launcher import AdoptingLauncher, Handle, Job, Launcher
from stretto.machine import clock
from stretto.machine.private_file import write_private

log = structlog.get_logger(__name__)

_FILE = "processes.json"
_QUIET_S = 3.0
"""Seconds without heartbeats of former workers, 3 missed ones, after which they have left or are cut off."""
_LEAVE_S = 30.0
"""Seconds to wait for former workers to leave. They need 10 s, unless their event loops stand still."""


class _Processes(msgspec.Struct, frozen=True):
    values: int
    """Number of the run's values that the processes have."""
    workers: dict[str, str]
    """Worker -> the launcher's record of its process."""
    folder: str
    """`folder_id` of the folder with this file. A copy of the folder names the workers of another run."""


class Adoption:
    """Records one kernel's worker processes, and finds a former kernel's, if they have the same `values`."""

    def __init__(self, launcher: Launcher, folder: Path, values: int) -> None:
        self._launcher = launcher if isinstance(launcher, AdoptingLauncher) else None
        self._file = folder / _FILE
        self._values = values
        self.absent: set[str] = set()
        """Adopted workers that have not joined again."""
        self.stranger_heard = 0.0
        """Time of the last heartbeat of a process that is no member of the fleet."""

    @property
    def has_trainers(self) -> bool:
        """Whether adopted trainers have not joined again."""
        return any(worker.startswith("trainer") for worker in self.absent)

    def record(self, workers: Iterable[str]) -> None:
        """Write the records by which a later kernel finds the processes of these workers."""
        if self._launcher is not None:
            records = {worker: self._launcher.record(worker) for worker in workers}
            write_private(
                self._file,
                msgspec.json.encode(_Processes(self._values, records, folder_id(self._file.parent))),
            )

    async def find(self, jobs: Sequence[Job]) -> list[tuple[Job, Handle]]:
        """Return the jobs whose processes a former kernel left. If a trainer is missing, end all trainers."""
        former = self._former()
        if self._launcher is None or former is None or former.values != self._values:
            return []
        adopted: list[tuple[Job, Handle]] = []
        for job in jobs:
            handle = await self._launcher.adopt(job, former.workers.get(job.worker, ""))
            if handle is not None:
                adopted.append((job, handle))
        trainers = [handle for job, handle in adopted if job.role == "trainer"]
        if len(trainers) < sum(job.role == "trainer" for job in jobs):
            for handle in trainers:
                await handle.stop(0)
            adopted = [(job, handle) for job, handle in adopted if job.role != "trainer"]
        self.absent = {job.worker for job, _ in adopted}
        return adopted

    async def until_others_left(self, over: anyio.Event, reconnect_s: float) -> None:
        """If the launcher cannot take over workers, wait until those of a former kernel have left: they hear
        this kernel's beacons, may not join, and end. Else old and new workers would share the GPUs."""
        if self._launcher is not None:
            return
        log.info("all workers start again: the launcher takes over none of a former kernel")
        self.stranger_heard = clock.now()
        with anyio.move_on_after(_LEAVE_S + reconnect_s) as waiting:
            while clock.now() - self.stranger_heard < _QUIET_S + reconnect_s and not over.is_set():
                await anyio.sleep(0.2)
        if waiting.cancelled_caught:
            log.warning("workers of the former kernel do not leave; this kernel takes nothing from them")

    def _former(self) -> _Processes | None:
        try:
            former = msgspec.json.decode(self._file.read_bytes(), type=_Processes)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:  # the disk was full, or a power cut came
            log.warning("the record of former workers is damaged", file=str(self._file), error=str(error))
            return None
        if former.folder != folder_id(self._file.parent):
            log.info("this folder is a copy: the workers that its original may have are left alone")
            return None
        return former

    def admits(self, join: Join) -> bool:
        """Return whether a process may join again: adopted, or a user's (`bus.joining.reserve_worker`)."""
        return join.worker in self.absent or join.worker.rpartition("-")[2].startswith("h")
