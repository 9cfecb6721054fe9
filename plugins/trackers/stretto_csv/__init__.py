"""Tracker `csv`: tables for spreadsheets and pandas, in the run's folder `trackers/csv`.

`steps.csv` and `evaluations.csv` have a row for each step and each evaluation, and a column for each figure.
`advice.csv` has a row for each piece of advice that was given or withdrawn.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto import Component, Context, TrackerConfig, hookimpl
from stretto.tracker import Sent, figures, tracker_folder

__all__ = ["CsvTracker"]

_ADVICE = ("rule", "since", "said", "until", "message")


class CsvTracker:
    """Appends to the tables. What they have says what was sent, so no row comes twice."""

    def __init__(self, config: TrackerConfig, context: Context) -> None:
        self._folder = tracker_folder(config, context)
        self._steps = _Table(self._folder / "steps.csv")
        self._evaluations = _Table(self._folder / "evaluations.csv")
        self._advice = _Table(self._folder / "advice.csv")

    def start(self, config: Mapping[str, Any], resumed_at: Sent | None) -> Sent:
        """Open the tables; return what they have."""
        del config, resumed_at
        for table in (self._steps, self._evaluations, self._advice):
            table.open()
        return Sent(step=self._steps.last_step(0), evaluation=self._evaluations.last_step(-1))

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Append a row to `steps.csv`."""
        self._steps.append({"step": metrics["step"], "time": metrics["time"], **figures(metrics)})

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Append a row to `evaluations.csv`."""
        self._evaluations.append({"step": metrics["step"], "time": metrics["time"], **figures(metrics)})

    def advice(self, advice: Mapping[str, Any]) -> None:
        """Append a row to `advice.csv`, unless it is there already."""
        row = {name: "" if advice[name] is None else str(advice[name]) for name in _ADVICE}
        if row not in self._advice.rows():
            self._advice.append(row)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Do nothing: the tables are complete after each row."""


class _Table:
    """A file of comma-separated values. Its columns are the keys of its rows, in the order in which they
    first came."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._columns: list[str] = []

    def open(self) -> None:
        """Read the columns, and cut off a last row that a killed process has left without its end."""
        if not self._file.exists():
            return
        text = self._file.read_bytes()
        with self._file.open("rb+") as file:
            file.truncate(text.rfind(b"\n") + 1)
        with self._file.open(newline="") as file:
            self._columns = next(csv.reader(file), [])

    def rows(self) -> Iterator[dict[str, str]]:
        """Yield the rows."""
        if self._file.exists():
            with self._file.open(newline="") as file:
                yield from csv.DictReader(file)

    def last_step(self, default: int) -> int:
        """Return the step of the last row; `default` if there is no row."""
        last = deque(self.rows(), maxlen=1)
        return int(last[0]["step"]) if last else default

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row. If it has a new column, write the table again."""
        new = [column for column in row if column not in self._columns]
        if new:
            aside = self._file.with_name(f".{self._file.name}")
            aside.unlink(missing_ok=True)
            self._columns += new
            header = {column: column for column in self._columns}
            self._write(aside, [header, *self.rows(), row])
            aside.replace(self._file)
        else:
            self._write(self._file, [row])

    def _write(self, file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        with file.open("a", newline="") as stream:
            csv.DictWriter(stream, self._columns, restval="", lineterminator="\n").writerows(rows)


@hookimpl
def stretto_tracker() -> Iterator[Component[TrackerConfig]]:
    """The component of this package."""
    yield Component(
        "csv", CsvTracker, TrackerConfig, "tables in the run's folder, for spreadsheets and pandas"
    )
