"""A run's folder: what a run has written, for notebooks, for commands and for pages that show runs.

    from pathlib import Path
    from stretto.records.run_folder import RunFolder

    run = RunFolder(Path("runs/quickstart-1"))
    run.series("reward")                              # (step, value) of each step
    run.samples.find(order="-reward", limit=3)        # the kept samples with the highest rewards

A folder can be read while the run continues; nothing here sends requests to its kernel. docs/metrics.md and
docs/samples.md describe the files; `stretto.records.charts` defines how views show their figures.
"""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from stretto.assembly.trust import require_trust
from stretto.bus.guard import is_locked
from stretto.bus.messages.tickets import Purpose
from stretto.errors import ConfigError
from stretto.records.accuracy import estimate_score
from stretto.records.document import read_document
from stretto.records.events.history import (
    Attempt,
    AttemptOutcome,
    CallSpan,
    EvaluationSpan,
    KernelLife,
    RunHistory,
    StepSpan,
    SwapSpan,
    WorkerLife,
)
from stretto.records.events.reader import EventReader, TimedEvent
from stretto.records.files import read_record
from stretto.records.intervals import Estimate
from stretto.records.living import living
from stretto.records.logs import attempts_in, lines_between, log_files, log_text, open_log, whole_lines
from stretto.records.metrics import HELD_OUT, MAIN_FIGURES, METRICS, MetricsReader, held_out_key, is_figure
from stretto.records.origin import RunOrigin, read_origin
from stretto.records.samples.answers import KeptAnswer, read_answers
from stretto.records.samples.images import SampleImages
from stretto.records.samples.store import Bounds, SampleFilter, SampleOutcome, SampleStore, open_samples
from stretto.records.status import STATUS, Status, Verdict, read_status, standstill
from stretto.records.values import values_over_time

__all__ = [
    "HELD_OUT",
    "MAIN_FIGURES",
    "Attempt",
    "AttemptOutcome",
    "Bounds",
    "CallSpan",
    "Estimate",
    "EvaluationSpan",
    "KeptAnswer",
    "KernelLife",
    "Purpose",
    "RunFolder",
    "RunHistory",
    "RunOrigin",
    "SampleFilter",
    "SampleOutcome",
    "SampleStore",
    "State",
    "Status",
    "StepSpan",
    "SwapSpan",
    "TimedEvent",
    "WorkerLife",
    "estimate_score",
    "find_runs",
    "is_figure",
    "is_run",
    "living_runs",
    "open_samples",
]

State = Literal["running", "completed", "interrupted", "failed", "stopped"]
"""`stopped`: no kernel owns the run, and none has written its summary."""

_CONFIG = "config.yaml"
_SUMMARY = "summary.json"


class _KnownSummary(msgspec.Struct, kw_only=True):
    """The fields of a summary that views use."""

    status: str
    reason: str = ""
    verdict: Verdict | None = None
    version: int = 0
    steps: int = 0
    wall_s: float
    ledger: dict[str, int] = {}
    reasons: dict[str, int] = {}
    staleness: dict[int, int] = {}
    problems: list[str] = []


class RunFolder:
    """The folder of one run. Each part is read when it is first asked for, and again after `refresh`.

    Raises ConfigError, which names the file, if there is no run or a file is damaged. It is not
    thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / _CONFIG).is_file():
            raise ConfigError(f"{folder} holds no run: it has no {_CONFIG}")
        self.folder = folder.absolute()
        self._reader = MetricsReader(self.folder)
        self._events = EventReader(self.folder)
        self._since: dict[int, str] = {}
        """Number of values -> the step from which on they hold, in words. Empty until a value changes."""

    def refresh(self) -> None:
        """Forget what may have changed. Of the metrics, the next call reads only appended lines."""
        for name in ("config", "summary", "status", "state", "history", "_metrics"):
            self.__dict__.pop(name, None)

    def require_trust(self, *, trusted: bool) -> None:
        """Raise ConfigError if another user owns the folder, unless `trusted`: its config names code."""
        require_trust(self.folder, trusted=trusted)

    @property
    def name(self) -> str:
        """The run's name, from its run file."""
        return str(self.config.get("name", self.folder.name))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run file as composed. Values from the environment are references here, not values."""
        return read_document(self.folder / _CONFIG)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` that belong to steps, in order."""
        return self._metrics.steps

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Lines of evaluations in `metrics.jsonl`, in order. `step` is the evaluated version."""
        return self._metrics.evaluations

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        """The content of `summary.json`; None before the end of the run."""
        file = self.folder / _SUMMARY
        try:
            text = read_record(file)
            msgspec.json.decode(text, type=_KnownSummary)
            return msgspec.json.decode(text, type=dict[str, Any])
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{file} is not the summary of a run: {error}") from error

    @cached_property
    def status(self) -> Status | None:
        """The content of `status.json`, which its kernel wrote last; None if there is none yet."""
        return read_status(self.folder)

    @cached_property
    def state(self) -> State:
        """`running` while a kernel owns the run, otherwise how the run ended."""
        if is_locked(self.folder / "bus" / "kernel.lock"):
            return "running"
        ended = (self.summary or {}).get("status")
        return ended if ended in ("completed", "interrupted", "failed") else "stopped"

    @property
    def standstill(self) -> str:
        """Says in a sentence that the owning kernel does not work; empty if it works or the run has ended."""
        if self.status is None or self.state != "running":
            return ""
        return standstill(self.folder, self.status)

    @property
    def verdict(self) -> str:
        """One line: whether the run learns, and what it waits for; empty if no kernel has written it."""
        if self.summary is not None and self.state != "running":
            return self.summary.get("verdict", {}).get("text", "")
        return self.status.verdict.text if self.status is not None and self.status.verdict else ""

    @property
    def started(self) -> float:
        """Unix time at which the run was started for the first time."""
        first = self.folder / "config-1.yaml"  # the values before a resume changed them
        return (first if first.exists() else self.folder / _CONFIG).stat().st_mtime

    @property
    def wall_s(self) -> float | None:
        """Seconds in which a kernel owned the run, up to its newest status or metrics; None without these."""
        if self.summary is not None and self.state != "running":
            return self.summary["wall_s"]
        with suppress(ConfigError):  # views that read `status` get this error there
            if self.status is not None:
                return self.status.wall_s
        newest_lines = (*self.steps[-1:], *self.evaluations[-1:])
        return max((line["time_s"] for line in newest_lines if "time_s" in line), default=None)

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of lines with a finite value. Keys of evaluations begin with `evaluation/`."""
        lines = self.evaluations if key.startswith("evaluation/") else self.steps
        return [(line["step"], float(value)) for line in lines if is_figure(value := line.get(key))]

    @property
    def held_out(self) -> str:
        """The key of `metrics.jsonl` by which the run's evaluations are judged: `evaluation/accuracy`, or
        `evaluation/reward` if some answers have no accuracy. The two are different measures."""
        return held_out_key(self.evaluations)

    def figures(self) -> list[str]:
        """Return the keys of figures, in order of appearance. Lines of one run differ in keys."""
        return [key for key in self._metrics.figures if key not in ("step", "time")]

    def values(self) -> dict[str, str]:
        """Return the values of `config` by their dotted keys, such as `training.lr`, as JSON. A value that
        changed when the run was resumed has its history: `0.0003, from step 17 on 0.0001`."""
        newest = 1 + len([*self.folder.glob("config-*.yaml")])
        if newest > 1 and newest not in self._since:
            begun = dict(self.history.values)  # of values that began at the same version, the newest
            self._since = {number: f"from step {version + 1} on" for version, number in begun.items()}
        files = [(since, self.folder / f"config-{number}.yaml") for number, since in self._since.items()]
        former = [(since, read_document(file)) for since, file in files if file.exists()]
        return values_over_time([*former, (self._since.get(newest, "later"), self.config)])

    def origin(self) -> RunOrigin | None:
        """Return what the run was started with; None if an older stretto started it."""
        return read_origin(self.folder)

    @cached_property
    def history(self) -> RunHistory:
        """What has happened in the run, from its first event on."""
        return RunHistory.of(self.events())

    def events(self, since: float | None = None, until: float | None = None) -> Iterator[TimedEvent]:
        """Yield (Unix time, event) in order, without spans that end after `until` (docs/architecture.md)."""
        return self._events.between(since, until)

    def time_range(self) -> tuple[float, float] | None:
        """Return the times of the first and the newest event, in Unix seconds; None without an event."""
        return self._events.time_range()

    @cached_property
    def samples(self) -> SampleStore:
        """The kept samples. The store also finds samples that the run keeps later."""
        return SampleStore(self.folder)

    def image(self, sha256: str) -> bytes | None:
        """Return the file of an image that a workflow added to a kept sample; None if it is not kept."""
        return SampleImages(self.folder).read(sha256)

    def answers(self, version: int) -> list[KeptAnswer]:
        """Return the kept answers of the evaluation of a version, with their texts, in the order of rows."""
        return read_answers(self.samples, version, texts=True)

    def logs(self) -> list[str]:
        """Return the names of the logs: `kernel`, and the workers."""
        return list(log_files(self.folder))

    def attempts(self) -> list[str]:
        """Return the times (ISO 8601, UTC) at which kernels took over the run, by the kernel's log."""
        if "kernel" not in self.logs():
            return []
        with open_log(self.folder, "kernel") as log:
            return attempts_in(whole_lines(log))

    def log(
        self,
        name: str,
        newest: int,
        *,
        containing: str = "",
        problems: bool = False,
        since: str = "",
        until: str = "",
    ) -> list[str]:
        """Return the `newest` last lines of a log as text, in order. A traceback belongs to its line.

        `containing` ignores case; `problems` returns only warnings and errors; `since` and `until` are times
        as in `attempts`. Raises ConfigError for a name that is not in `logs`.
        """
        wanted = containing.casefold()
        with open_log(self.folder, name) as log:
            lines = lines_between(whole_lines(log), since, until) if since else whole_lines(log)
            if not wanted and not problems:  # convert only the returned lines
                return [log_text(line) for line in deque(lines, maxlen=newest)]
            texts = (log_text(line, problems=problems) for line in lines)
            return list(deque((text for text in texts if text and wanted in text.casefold()), maxlen=newest))

    def checkpoints(self) -> dict[int, Path]:
        """Return version -> folder of its checkpoint, in order. The files are not checked for damage."""
        manifests = sorted(self.folder.glob("checkpoints/step-*/manifest.json"))
        return {int(file.parent.name.removeprefix("step-")): file.parent for file in manifests}

    @cached_property
    def _metrics(self) -> MetricsReader:
        self._reader.read()
        return self._reader


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's: it has the run's values, and a file that a kernel has written."""
    return (folder / _CONFIG).is_file() and any(
        (folder / name).exists() for name in ("bus", STATUS, METRICS, _SUMMARY)
    )


def find_runs(folder: Path) -> list[RunFolder]:
    """Return the run in `folder`, or the runs below it by path; skip hidden, linked and unreadable folders.

    Raises ConfigError if `folder` does not exist.
    """
    if not folder.is_dir():
        raise ConfigError(f"no folder {str(folder)!r}")
    return [RunFolder(path) for path in _run_folders(folder)]


def living_runs() -> list[RunFolder]:
    """Return the runs of this user on this machine that a kernel owns, in the order of their paths."""
    return [RunFolder(folder) for folder in living() if is_run(folder)]


def _run_folders(folder: Path) -> Iterator[Path]:
    for path, subfolders, _ in os.walk(folder):
        if is_run(Path(path)):
            subfolders.clear()  # a run has no runs inside
            yield Path(path)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
