"""Tracker `csv`: tables for spreadsheets and pandas, in the run's folder `trackers/csv`.

`steps.csv` and `evaluations.csv` have a row for each step and each evaluation, and a column for each figure.
`advice.csv` has a row for each piece of advice that was given or withdrawn. `samples.csv` has a row for each
sample.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stretto import Component, Context, TrackerConfig, hookimpl
from stretto.tracker import SAMPLE_FIELDS, Sent, figures, sample_cells, tracker_folder

__all__ = ["CsvTracker"]

_ADVICE = ("rule", "since", "said", "until", "message")
_FORMULA = tuple("=+-@＝＋－＠")
"""Spreadsheets read a text that begins with one of these as a formula."""


class CsvTracker:
    """Appends to the tables. What they have says what was sent, so no row comes twice."""

    def __init__(self, config: TrackerConfig, context: Context) -> None:
        self._folder = tracker_folder(config, context)
        self._steps = _Table(self._folder / "steps.csv")
        self._evaluations = _Table(self._folder / "evaluations.csv")
        self._advice = _Table(self._folder / "advice.csv")
        self._samples = _Table(self._folder / "samples.csv")

    def start(self, config: Mapping[str, Any], resumed_at: Sent | None) -> Sent:
        """Open the tables; return what they have."""
        del config
        for table in (self._steps, self._evaluations, self._advice):
            table.cut_torn_row()
            table.open()
        sent = resumed_at or Sent()
        self._samples.open()
        self._samples.keep(lambda row: _is_noted(row, sent))
        return msgspec.structs.replace(
            sent, step=self._steps.last_step(0), evaluation=self._evaluations.last_step(-1)
        )

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

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to `samples.csv`. No text in it is a formula for a spreadsheet."""
        cells = (dict(zip(SAMPLE_FIELDS, sample_cells(row), strict=True)) for row in rows)
        self._samples.extend([{name: _as_text(cell) for name, cell in row.items()} for row in cells])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Do nothing: the tables are complete after each row."""


def _is_noted(row: Mapping[str, str | None], sent: Sent) -> bool:
    """Whether a row of `samples.csv` is whole, and belongs to samples that were sent. Those of others come
    again. The last row may lack columns."""
    if None in row.values():
        return False
    return int(row["step"] or 0) <= (sent.samples if row["purpose"] == "train" else sent.evaluation_samples)


def _as_text(cell: str | float | None) -> str | float | None:
    """Return a cell that no spreadsheet reads as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.lstrip().startswith(_FORMULA) else cell


class _Table:
    """A file of comma-separated values. Its columns are the keys of its rows, in the order in which they
    first came."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._columns: list[str] = []

    def cut_torn_row(self) -> None:
        """Cut off a last row that a killed process has left without its end. No cell has a line break."""
        if self._file.exists():
            text = self._file.read_bytes()
            with self._file.open("rb+") as file:
                file.truncate(text.rfind(b"\n") + 1)

    def open(self) -> None:
        """Read the columns."""
        if self._file.exists():
            with self._file.open(newline="") as file:
                self._columns = next(csv.reader(file), [])

    def keep(self, fits: Callable[[Mapping[str, str | None]], bool]) -> None:
        """Remove the rows that do not fit."""
        rows = list(self.rows())
        fitting = [row for row in rows if fits(row)]
        if len(fitting) < len(rows):
            self._replace(fitting)

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
        """Append a row."""
        self.extend([row])

    def extend(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows. If they have a new column, write the table again."""
        new = [column for row in rows for column in row if column not in self._columns]
        if new:
            former = list(self.rows())
            self._columns += dict.fromkeys(new)
            self._replace([*former, *rows])
        else:
            self._write(self._file, rows)

    def _replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        aside = self._file.with_name(f".{self._file.name}")
        aside.unlink(missing_ok=True)
        self._write(aside, [{column: column for column in self._columns}, *rows])
        aside.replace(self._file)

    def _write(self, file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        with file.open("a", newline="") as stream:
            csv.DictWriter(stream, self._columns, restval="", lineterminator="\n").writerows(rows)


@hookimpl
def stretto_tracker() -> Iterator[Component[TrackerConfig]]:
    """The component of this package."""
    yield Component(
        "csv", CsvTracker, TrackerConfig, "tables in the run's folder, for spreadsheets and pandas"
    )
