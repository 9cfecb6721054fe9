"""A sweep in the terminal: a live table of its runs, or a log line for each event where stderr is no
terminal."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from stretto.errors import printable
from stretto.records.figures import FIGURES, duration_text, recent
from stretto.run_folder import RunFolder

_READ_S = 2.0
"""Seconds between two looks into the folders of the runs under way."""


class SweepView:
    """Shows a sweep while it is under way.

    Args:
        folder: the sweep's folder.
        runs: names of the runs, in their order.
    """

    def __init__(self, folder: Path, runs: Sequence[str]) -> None:
        self._folder = folder
        self._records: dict[str, RunFolder] = {}
        self._rows = {name: self._row(name, "waiting") for name in runs}
        self._console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        self._live = Live(console=self._console, get_renderable=self._table, auto_refresh=False)
        self._read = 0.0

    @contextmanager
    def shown(self) -> Generator[None]:
        """Show the table for the duration of the block, if stderr is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with self._live:
            yield
            self._live.refresh()

    def draw(self, running: Collection[str]) -> None:
        """Read the runs under way now and then, and draw the table."""
        if not self._console.is_terminal or time.monotonic() - self._read < _READ_S:
            return
        for name in running:
            self._rows[name] = self._row(name, "starting")
        self._live.refresh()
        self._read = time.monotonic()

    def started(self, name: str) -> None:
        """A run's process was started."""
        self._rows[name] = self._row(name, "starting")
        self._say(f"{name}: started")

    def ended(self, name: str, status: int) -> None:
        """A run's process has ended with an exit status."""
        self._rows[name] = self._row(name, "failed")
        self._read = 0.0
        state, *rest = self._rows[name][1:]
        text = ", ".join(part for part in rest if part)
        self._say(f"{name}: {state}{f', {text}' if text else ''}")
        if status not in (0, 130):
            self._say(f"{name}: exit status {status}; {self._last_line(name)}", always=True)

    def interrupted(self, count: int, *, again: bool) -> None:
        """The sweep was interrupted, and has asked this number of runs to end."""
        what = "end now" if again else "finish their steps and write checkpoints; interrupt again to end now"
        self._say(f"interrupted: {count} runs {what}", always=True)

    def _say(self, text: str, *, always: bool = False) -> None:
        """Print a line; beside the table, only if it is always to be seen."""
        if always or not self._console.is_terminal:
            self._console.print(f"{time.strftime('%H:%M:%S')} {printable(text)}", soft_wrap=True)

    def _last_line(self, name: str) -> str:
        """Return the last line that a run's process printed, and the file with all lines."""
        file = self._folder / f"{name}.txt"
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("error: ", "failed "))]
        return f"{(errors or lines or [''])[-1]} (all in {file})"

    def _row(self, name: str, otherwise: str) -> list[str]:
        """Return the cells of a run: name, state, step, reward, accuracy, duration.

        Args:
            otherwise: the state if the run has no folder yet.
        """
        if not (self._folder / name / "config.yaml").exists():
            return [name, otherwise, "", "", "", ""]
        if name not in self._records:
            self._records[name] = RunFolder(self._folder / name)
        record = self._records[name]
        record.refresh()
        steps, evaluations = record.steps, record.evaluations
        last = steps[-1] if steps else {}
        reward = recent([value for _, value in record.series("reward")])
        score, shown = evaluations[-1].get(record.held_out) if evaluations else None, FIGURES[record.held_out]
        return [
            name,
            record.state,
            f"step {last.get('step', 0)}/{record.config.get('steps')}",
            "" if reward is None else f"{FIGURES['reward'].label} {FIGURES['reward'].text(reward)}",
            "" if score is None else f"{shown.label} {shown.text(score)}",
            "" if record.wall_s is None else duration_text(record.wall_s),
        ]

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for row in self._rows.values():
            table.add_row(*map(printable, row))
        return table
