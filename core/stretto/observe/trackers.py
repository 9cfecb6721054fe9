"""The process of the run's trackers (`tracker_process`): its start, reports and end. The kernel waits for
no tracker."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import structlog

from stretto.kernel.supervised import ended
from stretto.machine import clock
from stretto.observe.tracker_process import TrackerReport, command
from stretto.tracker import TrackerConfig

log = structlog.get_logger()

_POLL_S = 0.05  # how soon the kernel notices what the process reports
_KILLED_S = 5.0
"""A killed process is gone within this time, unless it hangs in the system."""


class Trackers:
    """The trackers of one kernel. A failed tracker is a problem in the summary."""

    def __init__(self, run: Path, sections: Sequence[TrackerConfig], problems: list[str]) -> None:
        self._run = run
        self._output = run / "trackers" / "output.log"
        self._finish_s = {section.folder_name: section.finish_s for section in sections}
        self._left = set(self._finish_s)
        """Trackers that may still receive something."""
        self._failed: set[str] = set()
        self._problems = problems
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process. Lines after the checkpoint, and a former summary, must be removed before."""
        if not self._left:
            return
        log.info("trackers start", trackers=[*self._finish_s])
        try:
            self._process = self._start()
        except OSError as error:
            self._give_up(f"the process of the trackers cannot be started: {error}", *sorted(self._left))
        else:
            # The task belongs to no task group: it outlives the kernel, and its errors do not end the run.
            self._task = asyncio.create_task(self._follow(self._process))

    async def finish(self, is_forced: Callable[[], bool]) -> None:
        """After the summary was written, wait until the trackers have sent the rest, their time is over, or
        the user forces the end. Then kill the process, and all processes that it has started."""
        if self._process is None or self._task is None:
            return
        start = clock.now()
        try:
            while not self._task.done() and not is_forced():
                if clock.now() - start > max(self._finish_s[name] for name in self._left or self._finish_s):
                    break
                await anyio.sleep(_POLL_S)
        finally:
            self._give_up("it has not sent everything in time", *sorted(self._left))
            if not self._task.done():
                self._task.cancel()
                with anyio.CancelScope(shield=True):
                    _kill_session(self._process)
                    await ended(self._process, _KILLED_S)

    async def _follow(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        has_ended, buffer = False, b""
        with process.stdin, process.stdout as reports:
            os.set_blocking(reports.fileno(), False)
            while not has_ended:
                await anyio.sleep(_POLL_S)
                has_ended = process.poll() is not None  # before the last reports are read
                *lines, buffer = (buffer + (reports.read() or b"")).split(b"\n")
                for line in lines:
                    self._take(msgspec.json.decode(line, type=TrackerReport))
        _kill_session(process)
        self._give_up(
            f"the process of all trackers ended with status {process.returncode}{self._last_line()}",
            *sorted(self._left),
        )

    def _take(self, report: TrackerReport) -> None:
        name, fault = report.tracker, report.fault
        if report.again:
            log.warning("tracker failed; it is started again", tracker=name, fault=fault)
            if name not in self._failed:  # in the summary, only the first time
                self._failed.add(name)
                self._problems.append(f"tracker {name!r}: {fault}; it was started again")
        elif fault:
            self._give_up(fault, name)
        else:
            self._left.discard(name)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process in a session without the terminal's signals. Its input ends with the kernel."""
        for name in self._finish_s:
            (self._output.parent / name).mkdir(parents=True, exist_ok=True)
        with self._output.open("ab") as output:
            return subprocess.Popen(
                command(self._run),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def _last_line(self) -> str:
        lines = self._output.read_text(errors="replace").splitlines() if self._output.exists() else []
        return f": {lines[-1]}" if lines else ""

    def _give_up(self, fault: str, *names: str) -> None:
        for name in names:
            self._left.discard(name)
            self._problems.append(f"tracker {name!r}: {fault}; metrics.jsonl has all figures")
            log.error("tracker given up", tracker=name, fault=fault)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process's session: a library may have started processes of its own."""
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses to signal a group of zombies
        os.killpg(process.pid, signal.SIGKILL)
