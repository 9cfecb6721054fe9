"""Measure the costs of a run: start it for some steps, and read its records."""

import itertools
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from stretto.errors import RunError
from stretto.machine.cores import available_cores
from stretto.machine.scratch import scratch_folder
from stretto.records.run_folder import RunFolder, SampleFilter
from stretto.simulation import composed
from stretto.user_code.guard import end_with_parent

_FIRST, _FIRST_SLOW = 6, 3
"""Steps before the measurement, while the queue fills and libraries warm up; the second for slow runs."""
_SLOW_S = 2.0  # a run is slow if its steps take more seconds
FEWEST_STEPS, _FEWEST_SLOW, _MOST = 12, 6, 60
"""Minimum number of measured steps, the minimum for a slow run, and the maximum."""
# Minimum seconds of measurement, and seconds after which `_FEWEST_SLOW` steps are enough.
_SHORT_S, _LONG_S = 15.0, 30.0
_SAY_S = 10.0  # between two lines of progress
_POLL_S = 0.05
_MOST_LENGTHS = 2048  # about the most answers whose lengths are returned


@dataclass
class Measured:
    """The steady part of a real run: seconds and tokens are means of a step."""

    run: Mapping[str, Any]
    step_s: float
    staleness: float
    processor_s: dict[str, float]
    """Role -> processor seconds in a step."""
    sampled_tokens: float
    generate_s: float
    """Seconds in a step in which an engine works."""
    train_s: float
    """Seconds in a step in which the trainer computes."""
    lengths: tuple[int, ...] = ()
    tokens_per_sampled: float = 1.0
    """Tokens of a batch, prompts included, divided by its sampled tokens."""


def measure(file: Path, overrides: Sequence[str]) -> Measured:
    """Run a run file for some steps, and return the measured costs."""
    run = composed(file, overrides)
    with scratch_folder("stretto-plan-") as (folder, until_ended):
        out = folder / "run"
        # The measured run must leave nothing outside of this folder, and no other program may see it.
        safe_values = (
            *(f"out={out}", f"steps={_FIRST + _MOST + 2}", "evaluation=null", "checkpoint.every=0"),
            *("checkpoint.store=null", "trackers=[]"),
            *("bus.url=null", "bus.credentials=null", "bus.tls=null", "bus.replicas=1"),
        )
        command = [sys.executable, "-m", "stretto", "run", str(file), *overrides, *safe_values]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[until_ended],  # the run still needs the folder if this process is killed
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            )
        try:
            measured = _until_measured(process, out)
        finally:
            _end(process)
        if measured is None:
            tail = (folder / "output").read_text(errors="replace").splitlines()[-5:]
            raise RunError("the measured run ended too early; its last lines:\n" + "\n".join(tail))
        return _read(run, RunFolder(out), measured)


def kept_answers(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the kept trajectories of training tickets that have a sampled token."""
    rows = folder.samples.find(SampleFilter(purpose="train"), limit=None, texts=False)
    return [row for row in rows if row.get("sampled")]


def lengths_of(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], float]:
    """Return the lengths of answers, and the tokens per sampled token; () and 1 without answers."""
    answers = rows[:: 1 + len(rows) // _MOST_LENGTHS]
    if not answers:
        return (), 1.0
    lengths = tuple(row["sampled"] for row in answers)
    return lengths, sum(row["length"] for row in answers) / sum(lengths)


def _until_measured(process: subprocess.Popen[bytes], out: Path) -> range | None:
    """Wait until enough steps are measured, print the progress, and return them; None if the run ends."""
    first: int | None = None
    began_at, said_at = 0.0, time.monotonic()
    while process.poll() is None:
        step, now = _steps_of(out), time.monotonic()
        began_at = began_at or (now if step else 0.0)
        pace = (now - began_at) / (step - 1) if step > 1 else 0.0  # includes the unfinished step
        num_before = _FIRST_SLOW if pace > _SLOW_S else _FIRST
        if first is None and step >= num_before:
            first = step
        end = (first or num_before) + _steps_at(pace)
        if first is not None and step >= end:
            return range(first + 1, step + 1)
        if now - said_at > _SAY_S:
            said_at = now
            left = f"{pace:.1f} s each, about {(end - step) * pace:.0f} s left"
            typer.echo(f"  step {step} of {end}: {left}" if pace else "  the run starts")
        time.sleep(_POLL_S)
    return None


def _steps_at(pace: float) -> int:
    enough_s = max(_SHORT_S, min(FEWEST_STEPS * pace, _LONG_S), _FEWEST_SLOW * pace)
    return min(_MOST, math.ceil(enough_s / pace)) if pace else _MOST


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _steps_of(out: Path) -> int:
    file = out / "metrics.jsonl"
    return sum(b'"step_s"' in line for line in file.open("rb")) if file.exists() else 0


def processor_s(lines: Sequence[Mapping[str, Any]], cores: float) -> dict[str, float]:
    """Return the mean processor seconds of a step, by role, on a machine with this number of cores."""
    roles = [key for key in dict.fromkeys(itertools.chain(*lines)) if key.startswith("cores/")]
    return {
        role.removeprefix("cores/"): cores
        * statistics.mean(line.get(role, 0.0) * line["step_s"] for line in lines)
        for role in roles
    }


def _read(run: Mapping[str, Any], folder: RunFolder, measured: range) -> Measured:
    lines = [line for line in folder.steps if line["step"] in measured]
    step_s, staleness, tokens, generate_s, train_s = (
        statistics.mean(line[key] for line in lines)
        for key in ("step_s", "staleness", "tokens", "generate_busy_s", "train_s")
    )
    used_s, answers = processor_s(lines, available_cores()), lengths_of(kept_answers(folder))
    return Measured(run, step_s, staleness, used_s, tokens, generate_s, train_s, *answers)
