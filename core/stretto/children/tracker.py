"""The process of one tracker: it sends the lines of `metrics.jsonl`, which is its queue, and some samples.

`python -m stretto.children.tracker RUN NAME`: NAME is the tracker's folder in the run's folder `trackers`.
The process is a child of the kernel, and follows the run until the kernel has written the summary or is gone.
The folder has:

    cursor.json   what was sent; written after each block of lines
    lock          locked by the process that sends: one at a time
    output.log    the output of the process
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
import threading
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import structlog

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import Composed, compose
from stretto.assembly.logs import log_to
from stretto.base.private_file import write_private
from stretto.bus.messages.tickets import Purpose
from stretto.bus.server import run_id
from stretto.children.tracked_samples import settled_samples
from stretto.errors import ConfigError, StrettoError, offer
from stretto.records.metrics import is_evaluation
from stretto.run_folder import RunFolder
from stretto.tracker import Sent, Tracker, TrackerConfig

log = structlog.get_logger()

_POLL_S = 0.5
_LOOK_S = 2.0
"""Seconds between two looks for samples."""
_LOOK_SHARE = 0.2
"""Most part of the process's time that it spends with looks for samples."""
_BLOCK = 100
"""Number of lines that are sent between two writes of the cursor, if as many are there."""
_NICENESS = 10
"""Priority of the process: it yields to the run's own processes."""
_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 8
"""Shorter values of variables with such names occur in ordinary text."""
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def command(run: Path, name: str) -> list[str]:
    """Return the command that starts the process."""
    return [sys.executable, "-m", __name__, str(run), name]


def cursor_file(run: Path, name: str) -> Path:
    """Return the file that says what a tracker was sent."""
    return run / "trackers" / name / "cursor.json"


class _LineSender:
    """Sends the lines of one run that the cursor has not passed to a tracker, and samples.

    Args:
        samples: number of samples of each step that is due, and of each evaluation.
        samples_every: samples are due of every step whose number is a multiple of this.
    """

    def __init__(self, run: RunFolder, file: Path, *, samples: int, samples_every: int) -> None:
        self._run = run
        self._file = file
        self._samples = samples
        self._samples_every = samples_every
        self._next_look = 0.0
        self._cursor = Sent()
        self._began = file.exists()
        if self._began:
            try:
                self._cursor = msgspec.json.decode(file.read_bytes(), type=Sent)
            except msgspec.DecodeError as error:
                message = f"{file} is damaged: {error}; remove it, and the tracker gets everything again"
                raise ConfigError(message) from error

    def start(self, tracker: Tracker) -> None:
        """Start the tracker, and continue after what it has."""
        resumed_at = Sent(step=self._cursor.step, evaluation=self._cursor.evaluation)
        has = tracker.start(self._run.config, resumed_at if self._began else None)
        if has is not None:
            self._move(**msgspec.structs.asdict(has))

    def send_news(self, tracker: Tracker) -> bool:
        """Send the new lines, the samples that are there, and the summary if the run has one. Return whether
        it has one."""
        self._run.refresh()
        summary = self._run.summary  # read before the lines: all lines are older than the summary
        news = self._news()
        for start in range(0, len(news), _BLOCK):
            block = news[start : start + _BLOCK]
            step, evaluation = self._cursor.step, self._cursor.evaluation
            for line in block:
                if is_evaluation(line):
                    tracker.evaluation(line)
                    evaluation = line["step"]
                else:
                    _send_step(tracker, line)
                    step = line["step"]
            self._move(step=step, evaluation=evaluation)
        # The kernel writes the summary when the sample writer has ended.
        self._send_samples(tracker, complete=summary is not None)
        if summary is None:
            return False
        tracker.finish(summary)
        return True

    def log_state(self) -> None:
        """Log what was sent."""
        log.info("sent", steps_up_to=self._cursor.step, evaluations_up_to_version=self._cursor.evaluation)

    def _news(self) -> list[dict[str, Any]]:
        """Return the lines to send, in the order of their versions. A resumed run repeats steps: their lines
        are not new."""
        steps, evaluations = self._run.steps, self._run.evaluations
        new_steps = steps[bisect_right(steps, self._cursor.step, key=_step) :]
        new_evaluations = evaluations[bisect_right(evaluations, self._cursor.evaluation, key=_step) :]
        return sorted([*new_steps, *new_evaluations], key=lambda line: (line["step"], is_evaluation(line)))

    def _send_samples(self, tracker: Tracker, *, complete: bool) -> None:
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
                    tracker.samples(rows)
                self._move(**{_SAMPLES_SENT[purpose]: step})
        now = time.monotonic()
        self._next_look = now + max(_LOOK_S, (now - start) / _LOOK_SHARE)

    def _due_samples(self) -> Iterator[tuple[Purpose, list[int]]]:
        """Yield the steps whose samples are due, and the versions of evaluations."""
        if not self._samples:
            return
        steps, evaluations = map(_step, self._run.steps), map(_step, self._run.evaluations)
        every, sent = self._samples_every, self._cursor
        yield "train", [step for step in steps if step > sent.samples and step % every == 0]
        yield "eval", [version for version in evaluations if version > sent.evaluation_samples]

    def _move(self, **changes: Any) -> None:
        self._cursor = msgspec.structs.replace(self._cursor, **changes)
        write_private(self._file, msgspec.json.encode(self._cursor))


_SAMPLES_SENT: dict[Purpose, str] = {"train": "samples", "eval": "evaluation_samples"}
"""Field of the cursor for the samples of each purpose."""


def _step(line: Mapping[str, Any]) -> int:
    return line["step"]


def _send_step(tracker: Tracker, line: Mapping[str, Any]) -> None:
    tracker.step(line)
    for advice in cast("list[dict[str, Any]]", line.get("advice_changes", [])):
        tracker.advice(advice)


# ----------------------------------------------------------------------------------------- process


class _ParentWatch:
    """Notices that the kernel is gone: the system then ends this process's standard input."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.finish_s = 30.0
        """Seconds that the process has for what is left, before it kills itself and what it started."""
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while os.read(sys.stdin.fileno(), 1):  # a buffered read would block the end of the process
            pass
        self.gone.set()
        time.sleep(self.finish_s)
        os.killpg(os.getpgrp(), signal.SIGKILL)


@contextmanager
def _sole_sender(file: Path) -> Generator[None]:
    """Be the only process that sends to this tracker: wait until the previous one has ended."""
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _section(composed: Composed, name: str) -> tuple[str, TrackerConfig]:
    """Return the dotted key and the section of the tracker with this folder."""
    sections = {section.folder_name: index for index, section in enumerate(composed.config.trackers)}
    if name not in sections:
        raise ConfigError(f"the run has no tracker {name!r}{offer(name, sections, 'trackers')}")
    return f"trackers.{sections[name]}", composed.config.trackers[sections[name]]


def _send(folder: Path, name: str, composed: Composed, watch: _ParentWatch) -> None:
    path, section = _section(composed, name)
    watch.finish_s = section.finish_s
    file = cursor_file(folder, name)
    with _sole_sender(file.with_name("lock")):
        keeps_samples = composed.config.samples.keep != "none"
        sender = _LineSender(
            RunFolder(folder),
            file,
            samples=section.samples if keeps_samples else 0,
            samples_every=section.samples_every,
        )
        assembly = Assembly(composed, folder=folder, run=run_id(folder / "bus"))
        tracker: Tracker = assembly.make(path)
        sender.start(tracker)
        while True:
            last = watch.gone.is_set()
            if sender.send_news(tracker) or last:
                sender.log_state()
                return
            watch.gone.wait(_POLL_S)


def _without_secrets(text: str, redact: Callable[[str], str]) -> str:
    """Return a text without the secrets of the environment and the logins in addresses."""
    text = redact(text)
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, f"${name}")
    return _URL_LOGIN.sub("…@", text)


def main(folder: Path, name: str) -> int:
    """Body of the process. Returns its exit status."""
    os.nice(_NICENESS)
    watch = _ParentWatch()
    log_to(None, console=True, tracker=name)
    redact: Callable[[str], str] = str
    try:
        composed = compose(folder / "config.yaml")
        redact = composed.redact
        cursor_file(folder, name).parent.mkdir(parents=True, exist_ok=True)
        _send(folder, name, composed, watch)
    except Exception as error:  # noqa: BLE001 - a tracker may raise anything; the kernel reports the last line
        fault = str(error) if isinstance(error, StrettoError) else traceback.format_exc()
        print(_without_secrets(fault, redact).rstrip(), file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
