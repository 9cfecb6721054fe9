"""The runs below a folder, with ids that do not show paths."""

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from stretto.errors import ConfigError
from stretto.records.charts import recent
from stretto.records.comparison import caution, differences, setting
from stretto.records.run_folder import RunFolder, find_runs, is_run, living_runs
from stretto_ui.samples import Samples

_SEARCH_S = 5.0  # minimum time between two searches for new runs
_OPEN = 6
"""Number of runs whose metrics stay in memory. Metrics of a long run take some 100 MB."""
_CURVE = 48  # points of a row's curve
_MOST_KEYS = 40  # differing keys in the list of runs


class ListedRun:
    """One run of the page. `read` lets one thread at a time read it."""

    def __init__(self, root: Path | None, folder: Path) -> None:
        self.folder = folder
        self.path = str(folder if root is None else folder.relative_to(root))
        """The run's folder as seen from the folder of the page; `.` if they are the same."""
        self.id = _digest(self.path)
        self.samples = Samples(folder)
        self._record: RunFolder | None = None
        self.values: dict[str, str] = {}
        self._row: dict[str, Any] = {}
        self._row_stamp: object = None
        self._lock = threading.Lock()

    @contextmanager
    def read(self) -> Generator[RunFolder]:
        """Lend the run's record, after reading new lines of its files."""
        with self._lock:
            self._refuse_links()
            self._record = self._record or RunFolder(self.folder)
            self._record.refresh()
            yield self._record

    def row(self) -> dict[str, Any]:
        stamp = [(state.st_ino, state.st_size, state.st_mtime_ns) for state in _states(self.folder)]
        if stamp != self._row_stamp or self._row["state"] == "running":
            was_open = self._record is not None
            with self.read() as record:
                self.values = record.values()
                same_but_seed = _digest(setting(self.values))
                self._row = {"id": self.id, "path": self.path, "setting": same_but_seed, **_row(record)}
                self._row_stamp = stamp
            if not was_open and self._row["state"] != "running":
                self.close()
        return self._row

    def close(self) -> None:
        """Free the memory of the record."""
        with self._lock:
            self._record = None
        self.samples = Samples(self.folder)

    def _refuse_links(self) -> None:
        if not self.folder.is_dir():
            raise ConfigError(f"{self.path}: the folder of this run is gone")
        below = (self.folder.glob(pattern) for pattern in ("*", "events/*", "samples/**/*"))
        for file in chain.from_iterable(below):
            if file.is_symlink() and not file.resolve().is_relative_to(self.folder):
                raise ConfigError(f"{self.path}/{file.name} is a link that leads out of the run's folder")


class Runs:
    """All runs in and below some folders; without folders, the runs below `runs` and this user's living runs,
    also those found earlier. Requests can read only these runs, by id."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self.folder = Path(os.path.commonpath(self._folders)) if folders else None
        """The deepest folder with all runs in it; None without folders."""
        self._known: dict[str, ListedRun] = {}
        self._open: list[ListedRun] = []
        self._searched = -_SEARCH_S
        self._lock = threading.Lock()

    @property
    def single(self) -> bool:
        """True if the folder itself is a run. This may change while the page is open."""
        return self.folder is not None and is_run(self.folder)

    def all(self) -> list[ListedRun]:
        """Return the runs, new ones included."""
        with self._lock:
            if time.monotonic() >= self._searched + _SEARCH_S:
                below = [record for folder in self._folders for record in find_runs(folder)]
                records = below if self._folders else _here()
                found = {run.id: run for run in (ListedRun(self.folder, record.folder) for record in records)}
                remembered = self._known if self.folder is None else self._known.keys() & found.keys()
                self._known = found | {id: self._known[id] for id in remembered}
                self._searched = time.monotonic()
            return list(self._known.values())

    def get(self, run_id: str) -> ListedRun:
        """Return the run with this id for reading, and close others. Raise KeyError for an unknown id."""
        self.all()
        with self._lock:
            run = self._known[run_id]
            self._open = [*(other_run for other_run in self._open if other_run is not run), run]
            closing, self._open = self._open[:-_OPEN], self._open[-_OPEN:]
        for other_run in closing:
            other_run.close()
        return run


def _here() -> list[RunFolder]:
    below = Path("runs").resolve()
    return [*(find_runs(below) if below.is_dir() else ()), *living_runs()]


def differing(runs: Sequence[ListedRun], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `differing`: key -> the value in each run, and `caution`: why scores are not comparable. The key
    in which most runs differ from the most common value is first."""
    by_key = differences([run.values for run in runs])
    num_unlike = {key: len(values) - Counter(values).most_common(1)[0][1] for key, values in by_key.items()}
    first = {key: by_key[key] for key in sorted(by_key, key=lambda key: -num_unlike[key])[:_MOST_KEYS]}
    measured = [
        (run.values, row["measure"]) for run, row in zip(runs, rows, strict=True) if row["score"] is not None
    ]
    comparable = len({measure for _, measure in measured}) < 2
    return {"differing": first, "caution": caution([values for values, _ in measured], comparable=comparable)}


def _row(record: RunFolder) -> dict[str, Any]:
    steps = record.steps
    last = steps[-1] if steps else {}
    rewards = record.series("reward")
    scores = [value for _, value in record.series(record.held_out)]
    ledger = last.get("ledger", {})
    return {
        "name": record.name,
        "state": record.state,
        "verdict": _verdict(record),
        "advice": last.get("advice", []),
        "failed": ledger.get("failed", 0) / max(1, ledger.get("issued", 0)),
        "step": last.get("step", 0),
        "total": record.config.get("steps", 0),
        "reward": recent([value for _, value in rewards]),
        "curve": rewards[:: max(1, len(rewards) // _CURVE)],
        "score": scores[-1] if scores else None,
        "measure": record.held_out,
        "best": max(scores, default=None),
        "wall_s": record.wall_s,
        "started": record.started,
        "changed": max(state.st_mtime for state in _states(record.folder)),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _verdict(record: RunFolder) -> str:
    with suppress(ConfigError):  # the run's own view says why its status cannot be read
        return record.verdict
    return ""


def _states(folder: Path) -> list[os.stat_result]:
    files = [folder / name for name in ("config.yaml", "metrics.jsonl", "summary.json")]
    return [file.stat() for file in files if file.exists()]
