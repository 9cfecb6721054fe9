"""Supervises the sample writer, and keeps the log for it. The kernel itself reads and writes no sample."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import anyio
import structlog

from stretto.bus.client import Bus
from stretto.bus.messages.events import Account
from stretto.bus.messages.tickets import Follow, Following, Kept, RetiredTickets
from stretto.errors import BusError
from stretto.kernel.fleet.forks import ForkedProcess
from stretto.kernel.setup import RunSetup
from stretto.kernel.supervised import Failure, ended, supervised
from stretto.machine import clock
from stretto.machine.child_process import start_apart

log = structlog.get_logger()

_POLL_S = 0.2  # between two writes of retired tickets, and between two looks at the writer's process
_FIRST_PAUSE_S = 1.0  # before a restart, so that a writer that ends at once is not restarted all the time
_LONGEST_PAUSE_S = 30.0
"""Maximum pause before the writer is started again. The pause doubles with each failure in a row."""
_LONG_LIFE_S = 60.0
"""After a writer has run for this many seconds, the next pause is the first one again."""
_SILENT_S = 60.0
"""A writer that sends nothing for this many seconds is killed. Only the purge of the log waits for it."""
_IMPORTS_S = 120.0
"""Additional seconds before the writer's first message."""
_KILLED_S = 10.0
_START_S = 30.0  # the first tickets wait this long for the writer; the run can continue without it
_STOP_S = 20.0
"""At the end of the run, the writer has this many seconds to write what is in the log."""


class SampleWriterSupervisor:
    """Supervises the sample writer of one kernel."""

    def __init__(self, setup: RunSetup, bus: Bus, lease_epoch: int) -> None:
        config = setup.config
        self._setup = setup
        self._bus = bus
        self._names = setup.names
        self._lease_epoch = lease_epoch
        self.on = config.keeps_row(0) or (config.samples.keep != "none" and setup.graph.samples)
        """Whether the run keeps samples."""
        self._kept_below = 0
        """Sequence number in the log: the samples of all messages below it are on disk."""
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._fault = ""
        """Why no writer runs now, after the first start."""
        self._silent_s = 0.0
        """Seconds since the writer's last message, counting only time with a connection."""
        self._followed = anyio.Event()
        self._retired: list[tuple[int, str, str]] = []
        self._retired_batches = 0
        self._stopping = False

    def purgeable(self, below: int) -> int:
        """Return the sequence number below which the log may be purged: `below`, or less for the writer."""
        return min(below, self._kept_below if self.on else below)

    def retire(self, ticket: int, account: Account, reason: str) -> None:
        """Note that a training ticket ended without being trained. `run` writes the note to the log."""
        if self.on:
            self._retired.append((ticket, account, reason))

    async def serve(self) -> None:
        """Answer the writer. Call it before `run`."""
        await self._bus.serve(self._names.kernel("samples", "follow"), Follow, self._follow)
        await self._bus.subscribe(self._names.kernel("samples", "kept"), Kept, self._take_in)

    async def run(self) -> None:
        """Keep a writer running, until cancelled."""
        if not self.on:
            return
        async with anyio.create_task_group() as tasks:
            pauses = {"first_pause_s": _FIRST_PAUSE_S, "longest_pause_s": _LONGEST_PAUSE_S}
            tasks.start_soon(partial(supervised, self._live, self._restart, **pauses))
            while True:
                await anyio.sleep(_POLL_S)
                await self._send_retired()

    async def until_followed(self) -> None:
        """Wait until the writer reads the log, so that it notices messages that follow a loss. If the writer
        does not start, the run continues and the log is kept."""
        if self.on:
            with anyio.move_on_after(_START_S) as waiting:
                await self._followed.wait()
            if waiting.cancelled_caught:
                log.warning("the sample writer has not started", seconds=_START_S, log=str(self._log_file))

    async def stop(self, *, at_once: bool) -> None:
        """End the writer after the workers. Unless `at_once`, the writer first writes the rest of the log."""
        self._stopping = True
        if self._process is None or self._fault:
            if self._fault:
                self._report_loss(self._fault)
            return
        if not at_once:
            await self._send_retired()
        self._process.terminate()
        if not await ended(self._process, 0 if at_once else _STOP_S):
            self._process.kill()
            await ended(self._process, _KILLED_S)
            if not at_once:
                self._report_loss(f"it had not written everything after {_STOP_S:.0f} s")

    async def _live(self) -> Failure | None:
        began = clock.now()
        try:
            self._process, self._fault = await self._start(), ""
        except OSError as error:
            self._fault = f"it cannot be started: {error}"
        else:
            fault = await self._until_end(self._process)
            if self._stopping:
                return None
            self._fault = fault
        return Failure(self._fault, clock.now() - began > _LONG_LIFE_S)

    async def _restart(self, pause_s: float) -> bool:
        log.warning("the sample writer is started again", why=self._fault, log=str(self._log_file))
        await anyio.sleep(pause_s)
        return not self._stopping

    async def _until_end(self, process: subprocess.Popen[bytes] | ForkedProcess) -> str:
        """Wait for the end of a writer, and return how it ended. Kill a writer that hangs."""
        self._silent_s = -_IMPORTS_S
        while (status := process.poll()) is None:
            await anyio.sleep(_POLL_S)
            self._silent_s = self._silent_s + _POLL_S if self._bus.connected else 0.0
            if self._silent_s > _SILENT_S and not self._stopping:
                process.kill()
                await ended(process, _KILLED_S)
                fault = f"it was silent for {_SILENT_S:.0f} s, and was killed"
                problem = f"the sample writer hung: {fault}"
                if problem not in self._setup.facts.problems:
                    self._setup.facts.problems.append(problem)
                return fault
        return f"it ended with status {status}"

    def _report_loss(self, fault: str) -> None:
        problem = (
            f"samples of the newest steps may be missing: the sample writer: {fault}; see {self._log_file}"
        )
        log.warning(problem)
        self._setup.facts.problems.append(problem)

    @property
    def _log_file(self) -> Path:
        return self._setup.logs / "samples.jsonl"

    async def _start(self) -> subprocess.Popen[bytes] | ForkedProcess:
        config = self._setup.config
        keeps_answers = config.evaluation is not None and config.evaluation.keep_answers
        numbers = (config.samples.last or 0, config.queue.max_staleness, int(keeps_answers))
        arguments = map(str, (self._setup.folder, *numbers))
        command = [sys.executable, "-m", "stretto.records.samples", *arguments]
        output_file, forks = self._setup.logs / "samples.out", self._setup.forks
        if forks is not None and forks.is_open:
            process = await forks.fork(command, output_file, ())
            if process is not None:
                return process
        return start_apart(command, output_file)  # ^C reaches only the kernel

    async def _follow(self, message: Follow) -> Following:
        names = self._names
        extent = await self._bus.store.extent(names.log_stream)
        start = message.start if message.start <= extent.last + 1 else 1
        consumer = await self._bus.store.make_consumer(names.log_stream, names.of_samples, start=start)
        ends = [
            await self._bus.store.last_sequence(names.log_stream, subject) for subject in names.of_samples
        ]
        self._followed.set()
        return Following(consumer, start, max(ends))

    def _take_in(self, message: Kept) -> None:
        self._silent_s = 0.0
        self._kept_below = max(self._kept_below, message.below)  # a new writer may begin before that

    async def _send_retired(self) -> None:
        tickets, self._retired = tuple(self._retired), []
        if tickets:
            self._retired_batches += 1
            id = f"retired/{self._lease_epoch}/{self._retired_batches}"
            try:
                await self._bus.store.append(self._names.retired, RetiredTickets(tickets), id=id)
            except BusError as error:
                log.warning("retired tickets are not in the log", tickets=len(tickets), error=str(error))
