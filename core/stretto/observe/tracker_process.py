"""The process of the run's trackers: one thread per tracker sends lines of `metrics.jsonl` and some samples.

`python -m stretto.observe.tracker_process RUN`. The process is a child of the kernel, and follows the run
until the kernel has written the summary or is gone. `metrics.jsonl` is the queue of every thread. The main
thread drops a tracker whose call takes too long, and reports to the kernel. The run's folder `trackers` has:

    NAME/cursor.json   what this tracker was sent; written after each block of lines
    process.lock       locked by the process that sends: one at a time
    output.log         the output of the process
"""

import fcntl
import json
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.assembly.logs import log_to
from stretto.bus.messages.tickets import Purpose
from stretto.bus.server import run_id
from stretto.errors import ConfigError, StrettoError
from stretto.machine.private_file import write_private
from stretto.observe.tracked_samples import settled_samples
from stretto.records.metrics import is_evaluation
from stretto.records.run_folder import RunFolder
from stretto.tracker import Sent, Tracker

T = TypeVar("T")

_POLL_S = 0.5
_WATCH_S = 0.1
_LOOK_S = 2.0
"""Seconds between two searches for samples."""
_LOOK_SHARE = 0.2
"""Largest share of a thread's time for searches for samples."""
_BLOCK = 100
"""Largest number of lines between two writes of the cursor."""
_PAUSES_S = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)
"""Seconds of pause after successive failures without progress. One more failure drops the tracker."""
_NICENESS = 10
"""Priority of the process: it yields to the run's own processes."""
_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 8
"""Fewest characters of a secret: shorter values of such variables occur in ordinary text."""
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def command(run: Path) -> list[str]:
    """Return the command that starts the process."""
    return [sys.executable, "-m", __name__, str(run)]


class TrackerReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A report to the kernel about one tracker: a line of JSON on standard output."""

    tracker: str
    fault: str = ""
    """Why the tracker failed; empty if it has received everything."""
    again: bool = False
    """True if the tracker starts again; otherwise it receives nothing more."""


class _Sender(threading.Thread):
    def __init__(
        self, assembly: Assembly, index: int, gone: threading.Event, reports: SimpleQueue[TrackerReport]
    ) -> None:
        self._section = section = assembly.config.trackers[index]
        super().__init__(name=section.folder_name, daemon=True)
        self._assembly = assembly
        self._path = f"trackers.{index}"
        self._gone = gone
        self._reports = reports
        self._run = RunFolder(assembly.folder)
        self._file = assembly.folder / "trackers" / self.name / "cursor.json"
        self._samples = section.samples if assembly.config.samples.keep != "none" else 0
        self._next_look = 0.0
        self._cursor = Sent()
        self._call: tuple[str, float] | None = None
        """The tracker's call, and when it began."""
        self._dropped = False
        self.is_made = False
        """True once the next tracker may be made: threads that import at once may see half of a module."""

    def drop_if_late(self) -> None:
        """Drop the tracker if its call has passed the deadline. The thread ends when the call returns."""
        call, most_s = self._call, self._section.call_s
        if call is not None and time.monotonic() - call[1] > most_s and not self._dropped:
            self._dropped = self.is_made = True
            self._give_up(f"`{call[0]}` takes more than {most_s:g} s (`call_s`); nothing more is sent")

    def run(self) -> None:
        """Run the tracker until it has received everything, or has failed too often."""
        pauses = iter(_PAUSES_S)
        while True:
            is_last, old_cursor = self._is_over(), self._cursor
            fault = self._live()
            if self._dropped:
                return
            if self._cursor != old_cursor:
                pauses = iter(_PAUSES_S)
            pause_s = next(pauses, None)
            if not fault or is_last or pause_s is None:
                self._give_up(fault)
                return
            self._reports.put(TrackerReport(self.name, fault, again=True))
            end = time.monotonic() + pause_s
            while time.monotonic() < end and not self._is_over():
                self._gone.wait(_POLL_S)

    def _give_up(self, fault: str) -> None:
        self._reports.put(TrackerReport(self.name, fault))

    def _is_over(self) -> bool:
        return self._gone.is_set() or (self._run.folder / "summary.json").exists()

    def _live(self) -> str:
        """Make the tracker and send everything. Return why that failed, or an empty text."""
        try:
            self._tracker: Tracker = self._timed("factory", self._assembly.make, self._path)
            self._begin()
            while True:
                is_last = self._gone.is_set()
                if self._send_news() or is_last:
                    return ""
                self._gone.wait(_POLL_S)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker may raise anything
            if self._dropped:
                return ""
            text = _without_secrets(error, self._assembly.composed.redact)
            print(f"tracker {self.name}: {text}", file=sys.stderr, flush=True)
            return text.rpartition("\n")[2]

    def _timed(self, name: str, call: Callable[..., T], *arguments: Any) -> T:
        self._call = name, time.monotonic()
        try:
            return call(*arguments)
        finally:
            self._call, self.is_made = None, True
            if self._dropped:
                sys.exit()  # ends the thread

    def _send(self, name: str, argument: Any) -> None:
        self._timed(name, getattr(self._tracker, name), argument)

    def _begin(self) -> None:
        began = self._file.exists()
        if began:
            try:
                self._cursor = msgspec.json.decode(self._file.read_bytes(), type=Sent)
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{self._file} is damaged: {error}; remove it, and the tracker gets everything again"
                ) from error
        config = json.loads(_URL_LOGIN.sub("…@", json.dumps(self._run.config, default=str)))
        has = self._timed("start", self._tracker.start, config, self._cursor if began else None)
        if has is not None:
            self._move(**msgspec.structs.asdict(has))

    def _send_news(self) -> bool:
        """Send new lines and samples, and the summary. Return whether the run has a summary."""
        self._run.refresh()
        summary = self._run.summary  # read before the lines: all lines are older than the summary
        news = self._news()
        for start in range(0, len(news), _BLOCK):
            sent: dict[str, int] = {}
            for line in news[start : start + _BLOCK]:
                kind = "evaluation" if is_evaluation(line) else "step"
                self._send(kind, line)
                for advice in line.get("advice_changes", []):
                    self._send("advice", advice)
                sent[kind] = line["step"]
            self._move(**sent)
        # The kernel writes the summary when the sample writer has ended.
        self._send_samples(complete=summary is not None)
        if summary is None:
            return False
        self._send("finish", summary)
        return True

    def _news(self) -> list[dict[str, Any]]:
        """Return the lines to send, ordered by version. Lines that a resumed run repeats are not new."""
        steps, evaluations = self._run.steps, self._run.evaluations
        new_steps = steps[bisect_right(steps, self._cursor.step, key=_step) :]
        new_evaluations = evaluations[bisect_right(evaluations, self._cursor.evaluation, key=_step) :]
        return sorted([*new_steps, *new_evaluations], key=lambda line: (line["step"], is_evaluation(line)))

    def _send_samples(self, *, complete: bool) -> None:
        start = time.monotonic()
        if not complete and start < self._next_look:
            return
        for purpose, due in self._due_samples():
            if not due:
                continue
            for step, rows in settled_samples(
                self._run.folder, purpose, due, self._samples, complete=complete
            ):
                if rows:
                    self._send("samples", rows)
                self._move(**{_SAMPLES_SENT[purpose]: step})
        now = time.monotonic()
        self._next_look = now + max(_LOOK_S, (now - start) / _LOOK_SHARE)

    def _due_samples(self) -> Iterator[tuple[Purpose, list[int]]]:
        """Yield the steps whose samples are due, and the versions of evaluations."""
        if not self._samples:
            return
        steps, evaluations = map(_step, self._run.steps), map(_step, self._run.evaluations)
        every, sent = self._section.samples_every, self._cursor
        yield "train", [step for step in steps if step > sent.samples and step % every == 0]
        yield "eval", [version for version in evaluations if version > sent.evaluation_samples]

    def _move(self, **changes: Any) -> None:
        self._cursor = msgspec.structs.replace(self._cursor, **changes)
        write_private(self._file, msgspec.json.encode(self._cursor))


_SAMPLES_SENT: dict[Purpose, str] = {"train": "samples", "eval": "evaluation_samples"}
"""Field of the cursor for each purpose."""


def _step(line: Mapping[str, Any]) -> int:
    return line["step"]


def _without_secrets(error: BaseException, redact: Callable[[str], str] = str) -> str:
    """Return the text of an error without the secrets of the environment and the logins in addresses."""
    lines = [str(error)] if isinstance(error, StrettoError) else traceback.format_exception(error)
    text = redact("".join(lines)).rstrip()
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, f"${name}")
    return _URL_LOGIN.sub("…@", text)


def _send(folder: Path, answers: FileIO) -> None:
    """Send to all trackers. When the kernel is gone, standard input ends, and the trackers may finish."""
    assembly = Assembly(compose(folder / "config.yaml"), folder=folder, run=run_id(folder / "bus"))
    sections, gone, reports = assembly.config.trackers, threading.Event(), SimpleQueue[TrackerReport]()
    running: dict[str, _Sender] = {}
    waiting = [_Sender(assembly, index, gone, reports) for index in range(len(sections))]
    while waiting or running:
        if waiting and all(sender.is_made for sender in running.values()):
            sender = waiting.pop(0)
            running[sender.name] = sender
            sender.start()
        for sender in running.values():
            sender.drop_if_late()
        if not gone.is_set() and select.select([0], [], [], 0)[0]:
            gone.set()
            finish_s = max(section.finish_s for section in sections)
            end = threading.Timer(finish_s, os.killpg, (os.getpgrp(), signal.SIGKILL))
            end.daemon = True
            end.start()
        with suppress(Empty):
            report = reports.get(timeout=_WATCH_S)
            with suppress(BrokenPipeError):  # the kernel is gone
                answers.write(msgspec.json.encode(report) + b"\n")
            if not report.again:
                running.pop(report.tracker, None)


def main(folder: Path) -> None:
    """Body of the process. It exits with the status 1, and a reason that the kernel reports, if it fails."""
    os.nice(_NICENESS)
    answers = FileIO(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print there
    log_to(None, console=True)
    # Only one process may send: wait until the previous kernel's process has ended.
    with (folder / "trackers" / "process.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _send(folder, answers)
        except Exception as error:  # noqa: BLE001 - its text may have secrets
            sys.exit(_without_secrets(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
