"""A run in the terminal: the live view, and the final lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.errors import printable
from stretto.kernel.fleet import Fleet
from stretto.kernel.report import Report
from stretto.kernel.scheduler import Scheduler

__all__ = ["View", "final_lines", "terminal"]


class View:
    """The live view of a run. It draws nothing if stderr is not a terminal."""

    def __init__(self, title: str, steps: int, report: Report, scheduler: Scheduler, fleet: Fleet) -> None:
        self._title = title
        self._steps = steps
        self._report = report
        self._scheduler = scheduler
        self._fleet = fleet
        self._tokens: list[tuple[float, int]] = []
        self.note = "starting"
        """What the run is doing while it does not train."""
        self._stopped = False
        console = Console(stderr=True)
        self._live = Live(console=console, get_renderable=self._draw, auto_refresh=False)
        self._draws = console.is_terminal

    async def run(self) -> None:
        """Draw four times a second, until cancelled."""
        if self._draws:
            with suppress(OSError):  # the terminal was closed
                self._live.start()
                while True:
                    self._live.refresh()
                    await anyio.sleep(0.25)

    def stop(self) -> None:
        """Draw the final state, which stays in the terminal, and stop drawing."""
        self._stopped = True
        if self._live.is_started:
            with suppress(OSError):
                self._live.refresh()
                self._live.stop()

    def _draw(self) -> RenderableType:
        scheduler = self._scheduler
        bar = Table.grid(padding=(0, 1))
        left_s = None if self._stopped else self._report.left_s()
        left = "" if left_s is None else f"   {_duration(left_s)} left"
        done, total, text = scheduler.version, self._steps, f"step {scheduler.version}/{self._steps}{left}"
        if not self._steps:
            done, total = scheduler.evaluated_rows, scheduler.settings.evaluation_rows
            text = f"row {done}/{total}"
        bar.add_row(
            Text(self._title, style="bold"), ProgressBar(total=total, completed=done, width=40), Text(text)
        )
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right")
        table.add_column(overflow="fold")
        for label, text in self._rows():
            table.add_row(label, Text(printable(text)))  # text of models and rewards is no markup
        return Group(bar, table)

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows below the progress bar: label and text."""
        scheduler, last = self._scheduler, self._report.last
        yield "folder", _short_path(self._report.folder)
        if last:
            if self._report.sampled:
                yield "reward", f"{last['reward']:.3f}   length {last['length']:.1f}"
                limit = f"   limit {last['staleness_limit']}" if "staleness_limit" in last else ""
                yield ("staleness", f"mean {last['staleness']:.2f}   max {last['staleness_max']}{limit}")
            else:
                yield "loss", f"{last['loss']:.4f}"
            yield "step", f"{last['step_s']:.2f} s, of which training {last['train_s']:.2f} s"
        if scheduler.evaluating is not None:
            yield "evaluating", self._evaluating()
        for evaluation in scheduler.evaluations[-3:]:
            yield ("held out", f"version {evaluation.version}: accuracy {_accuracy(evaluation.accuracy)}")
        ledger = scheduler.ledger
        train_speed = f"{last['train_tokens_per_s']:,}" if last else "-"
        yield "tokens/s", f"generating {self._generation_speed():,}   training {train_speed}"
        yield (
            "tickets",
            f"issued {ledger.issued} = trained {ledger.trained} + filtered {ledger.filtered} + expired "
            f"{ledger.expired} + failed {ledger.failed} + in flight {ledger.in_flight} "
            f"({len(scheduler.done_groups)} finished)",
        )
        if reasons := _most_frequent(scheduler.reasons, 1):
            yield "main cause", reasons[0]
        if not self._stopped:
            yield "workers", self._workers()
        for advice in self._report.adviser.open:
            yield "advice", f"since step {advice.since}: {advice.message}"
        if not self._stopped:
            yield self.state()

    def state(self) -> tuple[str, str]:
        """Return the view's last row, label and text: what the run is doing now, or its bottleneck."""
        scheduler = self._scheduler
        if not self._fleet.hears():
            return "now", "waiting for nats-server"
        if self.note:
            return "now", self.note
        if scheduler.evaluating is not None and scheduler.resting:
            return "now", scheduler.waiting_for()
        if slowest := self._report.bottleneck():
            return "bottleneck", slowest
        return "now", "training" if scheduler.training else "generating"

    def _evaluating(self) -> str:
        """Describe the evaluation under way, and the one that waits for it."""
        scheduler = self._scheduler
        version, *waiting = scheduler.needed_versions
        waits = f"   waiting: version {waiting[0]}" if waiting else ""
        rows = scheduler.settings.evaluation_rows
        return f"version {version}: {scheduler.evaluated_rows} of {rows} rows{waits}"

    def _workers(self) -> str:
        ready = {member.worker for member in self._fleet.members.values() if member.ready}
        starting = ", ".join(f"{worker} {what}" for worker, what in self._fleet.starting.items())
        restarts = f"   restarts {self._fleet.restarts}" if self._fleet.restarts else ""
        return f"{len(ready)} ready{'   ' + starting if starting else ''}{restarts}"

    def _generation_speed(self) -> int:
        """Return the sampled tokens a second over the last 20 drawings, about 5 s."""
        self._tokens.append((time.monotonic(), self._fleet.generated_tokens()))
        self._tokens = self._tokens[-20:]
        (start, before), (end, after) = self._tokens[0], self._tokens[-1]
        return round((after - before) / (end - start)) if end > start else 0


def final_lines(summary: Mapping[str, Any], folder: Path) -> str:
    """Return the lines that the terminal shows at the end of a run, as printable text."""
    lines = [f"{summary['status']} at step {summary['steps']} after {summary['wall_s']:.1f} s"]
    if summary["reason"]:
        lines[0] += f": {summary['reason']}"
    evaluation = summary["evaluation"]
    if evaluation:
        points = " -> ".join(
            f"{_accuracy(point['accuracy'])} (version {point['version']})" for point in evaluation
        )
        lines.append(f"held-out accuracy {points}")
        best = summary["best"]
        if best and best["checkpoint"]:
            lines.append(
                f"best checkpoint {best['checkpoint']}, held-out accuracy {_accuracy(best['accuracy'])}"
            )
    ledger = summary["ledger"]
    lines.append(f"tickets {', '.join(f'{name} {count}' for name, count in ledger.items())}")
    lines.extend(_most_frequent(summary["reasons"], 3))
    lines.append(f"overlap {summary['overlap']:.2f}, restarts {summary['restarts']}")
    lines.extend(f"problem: {problem}" for problem in summary["problems"])
    lines.extend(
        f"advice: since step {advice['since']}: {advice['message']}"
        for advice in summary["advice"]
        if advice["until"] is None
    )
    lines.append(f"see {folder}")
    return printable("\n".join(lines))


def _most_frequent(reasons: Mapping[str, int], count: int) -> list[str]:
    """Return the most frequent reasons for which tickets or evaluation rows gave no result, with counts."""
    commonest = sorted(reasons.items(), key=lambda item: -item[1])[:count]
    return [f"{number} x {reason}" for reason, number in commonest]


def _short_path(folder: Path) -> str:
    """Return the folder relative to the working folder if it lies inside it, else its full path."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _duration(seconds: float) -> str:
    """Return a duration as text: `45 s`, `12 min`, `3 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _accuracy(value: float | None) -> str:
    return "none (no result)" if value is None else f"{value:.3f}"


def terminal() -> bool:
    """Whether stderr is a terminal, so that the live view can draw."""
    return sys.stderr.isatty()
