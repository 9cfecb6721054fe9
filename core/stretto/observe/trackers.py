"""The processes of the run's trackers: their start, their restarts, and their end.

A process reads the run's files by itself (see `stretto.children.tracker`), so the kernel never waits for a
tracker. The kernel imports nothing of a tracker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import structlog

from stretto.base import clock
from stretto.children.tracker import command, cursor_file
from stretto.kernel.supervised import Failure, ended, supervised
from stretto.tracker import TrackerConfig

log = structlog.get_logger()

_MOST_FAILURES = 10
"""The kernel starts a tracker's process no more after this many failures in a row without progress."""
_POLL_S = 0.02
_KILLED_S = 5.0
"""A killed process is gone within this time, unless it hangs in the system."""


class Trackers:
    """The trackers of one kernel.

    Args:
        problems: gets a line when a tracker has failed.
    """

    def __init__(self, run: Path, sections: Sequence[TrackerConfig], problems: list[str]) -> None:
        self._run = run
        self._sections = sections
        self._problems = problems
        self._processes: list[_TrackerProcess] = []

    def start(self) -> None:
        """Start all processes. Lines after the checkpoint, and the summary of a previous kernel, must be gone
        by now."""
        for section in self._sections:
            log.info("tracker starts", tracker=section.folder_name)
            self._processes.append(_TrackerProcess(self._run, section, self._problems))

    async def finish(self, is_forced: Callable[[], bool]) -> None:
        """Give the processes time to send what is left, after the summary was written, until the user is in
        a hurry. No process is left."""
        running = [each for each in self._processes if not each.task.done()]
        try:
            for each in running:
                each.run_is_over.set()
            start = clock.now()
            for each in running:
                end = start + each.finish_s
                while not each.task.done() and clock.now() < end and not is_forced():
                    await anyio.sleep(_POLL_S)
        finally:
            with anyio.CancelScope(shield=True):
                for each in running:
                    await each.kill()


class _TrackerProcess:
    """The process of one tracker, and the task that starts it again when it has failed. The task belongs to
    no task group: it outlives the kernel, and its errors do not end the run."""

    def __init__(self, run: Path, section: TrackerConfig, problems: list[str]) -> None:
        self.finish_s = section.finish_s
        self.run_is_over = anyio.Event()
        self._run = run
        self._name = section.folder_name
        self._cursor = cursor_file(run, self._name)
        self._output = self._cursor.with_name("output.log")
        self._problems = problems
        self._failed = False
        self._fault = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.task = asyncio.create_task(self._supervise())

    async def kill(self) -> None:
        """Kill the process with everything that it has started, if it has not sent everything. It is not
        started again."""
        if self.task.done():
            return
        self.task.cancel()
        if self._process is not None:
            _kill_session(self._process)
            await ended(self._process, _KILLED_S)
        self._give_up("it has not sent everything in time")

    async def _supervise(self) -> None:
        """Start the process until one of them has sent everything."""
        last = await supervised(
            self._live, self._restart, first_pause_s=1.0, longest_pause_s=60.0, most=_MOST_FAILURES
        )
        if last is not None:
            self._give_up(last.why)

    async def _live(self) -> Failure | None:
        is_last, before = self.run_is_over.is_set(), self._progress()
        self._fault = await self._run_process()
        if self._fault and is_last:
            self._give_up(self._fault)
        return Failure(self._fault, self._progress() != before) if self._fault and not is_last else None

    async def _restart(self, pause_s: float) -> bool:
        """Report a failure; in the summary, only the first one. The end of the run ends the pause."""
        log.warning("tracker failed; it is started again", tracker=self._name, fault=self._fault)
        if not self._failed:
            self._failed = True
            self._problems.append(f"tracker {self._name!r}: {self._fault}; it was started again")
        with anyio.move_on_after(pause_s):
            await self.run_is_over.wait()
        return True

    async def _run_process(self) -> str:
        """Start the process and wait for its end. Return why it failed; empty if it did not."""
        try:
            process = self._process = self._start()
        except OSError as error:
            return f"it cannot be started: {error}"
        assert process.stdin is not None
        with process.stdin:
            await ended(process)
        _kill_session(process)
        return f"it ended with status {process.returncode}{self._last_line()}" if process.returncode else ""

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process in a session of its own, so that signals from the terminal do not reach it. Its
        standard input ends when the kernel is gone."""
        self._output.parent.mkdir(parents=True, exist_ok=True)
        with self._output.open("ab") as output:
            return subprocess.Popen(
                command(self._run, self._name),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def _progress(self) -> int:
        """A number that changes when the process has sent something."""
        return self._cursor.stat().st_mtime_ns if self._cursor.exists() else 0

    def _last_line(self) -> str:
        lines = self._output.read_text(errors="replace").splitlines() if self._output.exists() else []
        return f": {lines[-1]}" if lines else ""

    def _give_up(self, fault: str) -> None:
        self._problems.append(f"tracker {self._name!r}: {fault}; metrics.jsonl has all figures")
        log.error("tracker given up", tracker=self._name, fault=fault)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process's session: a library may have started processes of its own."""
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses to signal a group of zombies
        os.killpg(process.pid, signal.SIGKILL)
