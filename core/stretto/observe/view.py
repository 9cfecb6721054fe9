"""A run in the terminal: the live view, which draws a `Status`, and the final lines."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.bus.messages.events import Evaluation
from stretto.errors import StrettoError, printable
from stretto.machine import clock
from stretto.observe.status import evaluation_statuses
from stretto.records.figures import FIGURES, SCORE, describe_waits, duration_text
from stretto.records.status import Status

_MOST_ROWS = 8
"""Largest number of pieces of advice, of waits and of starting workers that are shown."""
_MOST_CHARACTERS = 2000
"""The view cuts longer texts."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVES = ("reward", "loss", "zero_variance_groups", "entropy", "grad_norm")
"""Figures with a sparkline."""
_OF_STEP = ("length", "staleness", "staleness_max", "staleness_limit", "step_s", "train_s")
"""Other figures of the newest step."""


class View:
    """The live view of a run. It draws only in a terminal."""

    def __init__(self, source: Callable[[], Status | None]) -> None:
        self._source = source
        self._status: Status | None = None
        self._stopped = False
        console = Console(stderr=True)
        self._live = Live(console=console, get_renderable=self._draw, auto_refresh=False)
        self._draws = console.is_terminal

    async def run(self) -> None:
        """Draw four times per second, until it is cancelled."""
        if not self._draws:
            await anyio.sleep_forever()
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
        try:
            self._status = self._source()
        except StrettoError:
            if not self._stopped:
                raise
        if self._status is None:
            return Text("waiting for the first status of the run")
        return drawing(self._status, stopped=self._stopped)


def drawing(status: Status, *, stopped: bool) -> Group:
    """Draw a status, perhaps from another process. If `stopped`, leave out rows that are only true now."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column(overflow="fold")
    for label, text in [*_rows(status), *([] if stopped else _rows_of_now(status))]:
        # Texts of models and rewards must not be read as markup.
        table.add_row(label, Text(printable(text[:_MOST_CHARACTERS])))
    return Group(_bar(status, stopped), table)


def _bar(status: Status, stopped: bool) -> RenderableType:
    bar = Table.grid(padding=(0, 1))
    finished, total, text = status.version, status.steps, f"step {status.version}/{status.steps}"
    if not status.steps and status.evaluating is not None:
        finished, total = status.evaluating.rows, status.evaluating.of
        text = f"row {finished}/{total}"
    text += f"   {duration_text(status.wall_s)}"
    if status.left_s is not None and not stopped:
        text += f"   {duration_text(status.left_s)} left{_clock(status.written + status.left_s)}"
    name = Text(printable(status.name[:_MOST_CHARACTERS]), style="bold")
    bar.add_row(name, ProgressBar(total=total, completed=min(finished, total), width=40), Text(text))
    return bar


def _rows(status: Status) -> Iterator[tuple[str, str]]:
    """Yield the label and the text of each row below the progress bar."""
    newest = {key: value for key, value in status.newest.items() if value is not None}
    yield "folder", _short_path(Path(status.folder))
    if status.verdict is not None:
        yield "verdict", status.verdict.text
    for name in _CURVES:
        # The loss of a policy gradient shows no progress; without rewards, it is the only figure.
        if name in status.recent and (name != "loss" or "reward" not in status.recent):
            curve = sparkline(status.curves.get(name, ()))
            figure = FIGURES[name]
            yield figure.label, f"{figure.text(status.recent[name]):<9} {curve}"  # curves begin in one column
    if newest:
        yield from _rows_of_step(newest)
    if (evaluating := status.evaluating) is not None:
        waits = "" if evaluating.waiting is None else f"   waiting: version {evaluating.waiting}"
        text = f"version {evaluating.version}: {evaluating.rows} of {evaluating.of} rows{waits}"
        yield "evaluating", text
    for evaluation in status.evaluations[-3:]:
        best = "   best so far" if evaluation == status.best and len(status.evaluations) > 1 else ""
        text = f"{_score(evaluation.score)} (version {evaluation.version}){best}"
        yield f"held-out {evaluation.measure}", text
    training = FIGURES["train_tokens_per_s"].text(newest.get("train_tokens_per_s"))
    yield "tokens/s", f"generating {status.generate_tokens_per_s:,.0f}   training {training}"
    if ledger := status.ledger:
        issued, *accounts = ledger.items()
        sums = " + ".join(f"{name.replace('_', ' ')} {count}" for name, count in accounts)
        yield "tickets", f"{issued[0]} {issued[1]} = {sums} ({status.finished} finished)"
    if reasons := _most_frequent(status.reasons, 1):
        yield "main cause", reasons[0]
    for advice in status.advice[:_MOST_ROWS]:
        yield "advice", f"since step {advice.since}: {advice.message}"


def _rows_of_step(newest: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    texts = {key: FIGURES[key].text(newest[key]) for key in _OF_STEP if key in newest}
    if "length" in texts:
        yield FIGURES["length"].label, f"{texts['length']} tokens"
    if "staleness" in texts:
        limit = f"   limit {texts['staleness_limit']}" if "staleness_limit" in texts else ""
        most = f"   max {texts['staleness_max']}" if "staleness_max" in texts else ""
        yield FIGURES["staleness"].label, f"mean {texts['staleness']}{most}{limit}"
    if "step_s" in texts and "train_s" in texts:
        waits = f", {waits}" if (waits := describe_waits(newest)) else ""
        yield FIGURES["step_s"].label, f"{texts['step_s']}, of which training {texts['train_s']}{waits}"


def _rows_of_now(status: Status) -> Iterator[tuple[str, str]]:
    yield "workers", _workers(status)
    for stall in [wait for wait in status.waits if wait.seconds > 10][:_MOST_ROWS]:
        yield "waits", str(stall)
    yield "now", status.now


def _workers(status: Status) -> str:
    ready = sum(worker.ready and not worker.leaving for worker in status.workers)
    leaving = "".join(f"   {worker.worker} leaves" for worker in status.workers if worker.leaving)
    starting = "".join(f"   {worker} {what}" for worker, what in list(status.starting.items())[:_MOST_ROWS])
    restarts = f"   restarts {status.restarts}" if status.restarts else ""
    hanging = [(worker.worker, worker.blocked_s) for worker in status.workers if worker.blocked_s]
    blocked = "".join(f"   {worker} stands still for {seconds:.0f} s" for worker, seconds in hanging)
    return f"{ready} ready{starting}{leaving}{restarts}{blocked}"


def sparkline(points: Sequence[float]) -> str:
    """Return figures as a line of blocks, the lowest as the lowest block."""
    points = [min(1e300, max(-1e300, point / 4)) for point in points[-_MOST_CHARACTERS:]]
    if not points:
        return ""
    low, high = min(points), max(points)
    if high == low:
        return _BLOCKS[0] * len(points)
    return "".join(_BLOCKS[round((point - low) / (high - low) * (len(_BLOCKS) - 1))] for point in points)


def final_lines(summary: Mapping[str, Any], folder: Path) -> str:
    """Return the lines that the terminal shows at the end of a run, as printable text."""
    lines = [f"{summary['status']} at step {summary['steps']} after {duration_text(summary['wall_s'])}"]
    if summary["reason"]:
        lines[0] += f": {summary['reason']}"
    lines.append(f"verdict {summary['verdict']['text']}")
    if evaluations := evaluation_statuses(msgspec.convert(summary["evaluation"], list[Evaluation])):
        label = f"held-out {evaluations[0].measure}"
        points = (f"{_score(each.score)} (version {each.version})" for each in evaluations)
        lines.append(f"{label} {' -> '.join(points)}")
        best = summary["best"]
        if best and best["checkpoint"]:
            score = next(each.score for each in evaluations if each.version == best["version"])
            lines.append(f"best checkpoint {best['checkpoint']}, {label} {_score(score)}")
    ledger = summary["ledger"]
    lines.append(f"tickets {', '.join(f'{name} {count}' for name, count in ledger.items())}")
    if missing := summary["members"]["missing"]:
        lines.append(f"samples {summary['members']['sampled']}, of them {missing} failed and not trained")
    if rows := summary["given_up"]:
        lines.append(f"rows given up {len(rows)}, such as {rows[0]}")
    lines.extend(_variant_lines(summary.get("variants", {})))
    lines.extend(_most_frequent(summary["reasons"], 3))
    lines.append(f"overlap {summary['overlap']:.2f}, restarts {summary['restarts']}")
    if recoveries := summary["recoveries"]:
        seconds = sum(each["seconds"] for each in recoveries)
        repeated = sum(each["repeated"] for each in recoveries)
        lines.append(
            f"trainers or kernels replaced {len(recoveries)} times: {repeated} steps repeated, "
            f"{seconds:.0f} s until the next new ones"
        )
    lines.extend(f"problem: {problem}" for problem in summary["problems"])
    lines.extend(
        f"advice: since step {advice['since']}: {advice['message']}"
        for advice in summary["advice"]
        if advice["until"] is None
    )
    lines.append(f"see {folder}")
    return printable("\n".join(lines))


def _variant_lines(variants: Mapping[str, Any]) -> Iterator[str]:
    first = next(iter(variants), "")
    for name, variant in variants.items():
        figures = [
            f", {figure} {_with_interval(variant['figures'][figure])}"
            + (f" ({_with_interval(difference, sign='+')} against {first})" if difference else "")
            for figure in ("reward", "reward/accuracy", "length")
            if figure in variant["figures"]
            for difference in [variant["difference"].get(figure)]
        ]
        yield f"variant {name}: {variant['groups']} groups{''.join(figures)}"


def _with_interval(figure: Mapping[str, Any], sign: str = "") -> str:
    width = "" if figure["ci95"] is None else f" ± {figure['ci95']:.3g}"
    return f"{figure['mean']:{sign}.4g}{width}"


def _most_frequent(reasons: Mapping[str, int], count: int) -> list[str]:
    commonest = sorted(reasons.items(), key=lambda item: -item[1])[:count]
    return [f"{number} x {reason}" for reason, number in commonest]


def _short_path(folder: Path) -> str:
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _clock(moment: float) -> str:
    """Return the local time of a moment in the next 24 hours, ` (until 14:05)`; empty for another moment."""
    return (
        time.strftime(" (until %H:%M)", time.localtime(moment)) if 0 < moment - clock.wall() < 86_400 else ""
    )


def _score(value: float | None) -> str:
    return "none (no result)" if value is None else SCORE.text(value)
