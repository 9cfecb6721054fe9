"""The processes of the run's trackers: their start, their restarts, and their end.

A process reads the run's files by itself (see `stretto.children.tracker`). A thread for each process waits
for its end, so the kernel's event loop never waits for a tracker. The kernel imports nothing of a tracker.
"""

from __future__ import annotations

import contextvars
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import structlog

from stretto.children.tracker import command, cursor_file
from stretto.tracker import TrackerConfig

__all__ = ["Trackers"]

log = structlog.get_logger()

_MOST_FAILURES = 10
"""The kernel starts a tracker's process no more after this many failures in a row without progress."""
_LONGEST_PAUSE_S = 60.0
_POLL_S = 0.02
_KILLED_S = 5.0
"""A killed process is gone within this time, unless it hangs in the system."""


class Trackers:
    """The trackers of one kernel.

    Args:
        problems: gets a line when a tracker has failed.
    """

    def __init__(self, run: Path, sections: Sequence[TrackerConfig], problems: list[str]) -> None:
        self._processes = [_TrackerProcess(run, section, problems) for section in sections]

    def start(self) -> None:
        """Start all processes. Lines after the checkpoint, and the summary of a previous kernel, must be gone
        by now."""
        for each in self._processes:
            log.info("tracker starts", tracker=each.section.folder_name)
            each.thread.start()

    async def finish(self, is_hurried: Callable[[], bool]) -> None:
        """Give the processes time to send what is left, after the summary was written, until the user is in
        a hurry. No process is left."""
        running = [each for each in self._processes if each.thread.is_alive()]
        try:
            for each in running:
                each.run_is_over.set()
            start = time.monotonic()
            for each in running:
                end = start + each.section.finish_s
                while each.thread.is_alive() and time.monotonic() < end and not is_hurried():
                    await anyio.sleep(_POLL_S)
        finally:
            for each in running:
                each.kill()


class _TrackerProcess:
    """The process of one tracker, and the thread that starts it again when it has failed."""

    def __init__(self, run: Path, section: TrackerConfig, problems: list[str]) -> None:
        self.section = section
        self.run_is_over = threading.Event()
        self.thread = threading.Thread(
            target=contextvars.copy_context().run,  # it logs with the fields of the kernel's log
            args=(self._supervise,),
            name=f"tracker {section.folder_name}",
            daemon=True,
        )
        self._run = run
        self._cursor = cursor_file(run, section.folder_name)
        self._output = self._cursor.with_name("output.log")
        self._problems = problems
        self._lock = threading.Lock()
        """Held while the process is started or killed."""
        self._killed = False
        self._failed = False
        self._process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """Kill the process with everything that it has started, if it has not ended. It is started no
        more."""
        with self._lock:
            self._killed = True
            if not self.thread.is_alive():
                return
            if self._process is not None:
                _kill_session(self._process)
        self.thread.join(_KILLED_S)
        self._give_up("it has not sent everything in time")

    def _supervise(self) -> None:
        """Start the process until one of them has sent everything. The pauses grow with each failure without
        progress."""
        failures = 0
        while True:
            is_last, before = self.run_is_over.is_set(), self._progress()
            fault = self._run_process()
            if fault is None or self._killed:
                return
            failures = failures + 1 if self._progress() == before else 1
            if is_last or failures > _MOST_FAILURES:
                self._give_up(fault)
                return
            self._note_failure(fault)
            self.run_is_over.wait(min(_LONGEST_PAUSE_S, 2.0 ** (failures - 1)))

    def _run_process(self) -> str | None:
        """Start the process and wait for its end. Return why it failed; None if it did not."""
        try:
            with self._lock:
                if self._killed:
                    return None
                process = self._process = self._start()
        except OSError as error:
            return f"it cannot be started: {error}"
        with process:  # closes its standard input at its end
            status = process.wait()
        _kill_session(process)
        return None if status == 0 else f"it ended with status {status}{self._last_line()}"

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process in a session of its own, so that signals from the terminal do not reach it. Its
        standard input ends when the kernel is gone."""
        self._output.parent.mkdir(parents=True, exist_ok=True)
        with self._output.open("ab") as output:
            return subprocess.Popen(
                command("follow", self._run, self.section.folder_name),
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

    def _note_failure(self, fault: str) -> None:
        """Report a failure after which the process is started again; in the summary, only the first one."""
        log.warning("tracker failed; it is started again", tracker=self.section.folder_name, fault=fault)
        if not self._failed:
            self._failed = True
            self._problems.append(f"tracker {self.section.folder_name!r}: {fault}; it was started again")

    def _give_up(self, fault: str) -> None:
        self._problems.append(
            f"tracker {self.section.folder_name!r}: {fault}; to send the rest: "
            f"stretto track {shlex.quote(str(self._run))}"
        )
        log.error("tracker given up", tracker=self.section.folder_name, fault=fault)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process's session: a library may have started processes of its own."""
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses to signal a group of zombies
        os.killpg(process.pid, signal.SIGKILL)
