"""The lines of `metrics.jsonl`: one JSON object for each train step and each evaluation."""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeGuard, cast

import msgspec

from stretto.errors import ConfigError
from stretto.records.files import open_record

METRICS = "metrics.jsonl"
ACCURACY = "evaluation/accuracy"
"""The value is null if some answer has no accuracy, or no row has a result."""
HELD_OUT_REWARD = "evaluation/reward"
HELD_OUT = (ACCURACY, HELD_OUT_REWARD)
"""Each run's evaluations are judged by one of these keys; see `held_out_key`."""
HELD_OUT_LOSS = "held_out/loss"
MAIN_FIGURES = ("reward", "loss", HELD_OUT_LOSS, "entropy", "grad_norm")
"""Keys of the figures that plots, comparisons and the live view show of every run that has them."""

_decode = msgspec.json.Decoder().decode
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _KnownLine(msgspec.Struct, kw_only=True):
    """The fields of a line that views use besides its figures."""

    step: _Count
    time_s: float = 0.0
    ledger: dict[str, _Count] = {}
    not_trained: dict[str, _Count] = {}


_TAIL_BYTES = 256
"""Bytes before the reader's position that are compared to notice a cut file."""


def parse_line(text: bytes) -> dict[str, Any] | str:
    """Return the line of metrics in a text, or why the text is not such a line."""
    try:
        line = _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"not JSON ({error})"
    if not isinstance(line, dict) or not isinstance(cast("dict[str, Any]", line).get("step"), int):
        return "not a JSON object with a `step`"
    try:
        msgspec.convert(line, _KnownLine)
    except msgspec.ValidationError as error:
        return str(error)
    return cast("dict[str, Any]", line) if text.endswith(b"\n") else "not a whole line"


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Return whether a line belongs to an evaluation, and not to a step."""
    return "evaluation/samples" in line


def held_out_key(evaluations: Iterable[Mapping[str, Any]]) -> str:
    """Return the accuracy's key if all evaluations with a result have an accuracy, else the reward's key.
    `stretto.kernel.schedule.health.held_out` has the same rule."""
    with_result = [line for line in evaluations if any(is_figure(line.get(key)) for key in HELD_OUT)]
    return ACCURACY if all(is_figure(line.get(ACCURACY)) for line in with_result) else HELD_OUT_REWARD


def is_figure(value: Any) -> TypeGuard[float]:
    """Return whether a value of a line is a finite number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # JSON has integers that no float can hold; `math.isfinite` raises for them.
    return is_number and abs(value) <= sys.float_info.max


class MetricsReader:
    """Reads metrics while a kernel may append lines or cut them. A line without a newline does not count."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / METRICS
        self._forget()

    def _forget(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.figures: dict[str, None] = {}
        """Keys with a finite number in some line, in order of appearance."""
        self._inode = 0
        self._offset = 0
        self._tail = b""
        self._lines = 0

    def read(self) -> None:
        """Read appended lines, or all if the file was cut or replaced. ConfigError for a malformed line."""
        try:
            with open_record(self._file) as file:
                state = os.fstat(file.fileno())
                file.seek(max(0, self._offset - len(self._tail)))
                if state.st_ino != self._inode or file.read(len(self._tail)) != self._tail:
                    self._forget()
                    self._inode = state.st_ino
                    file.seek(0)
                self._take_in(file.read())
        except FileNotFoundError:
            self._forget()
        except OSError as error:
            raise ConfigError(f"{self._file} cannot be read: {error}") from error

    def _take_in(self, text: bytes) -> None:
        complete = text[: text.rfind(b"\n") + 1]
        if not complete:
            return
        for raw_line in complete.splitlines(keepends=True):
            self._lines += 1
            line = parse_line(raw_line)
            if isinstance(line, str):
                fault = f"{self._file}:{self._lines}: {line}"
                self._forget()
                raise ConfigError(fault)
            (self.evaluations if is_evaluation(line) else self.steps).append(line)
            for key, value in line.items():
                if key not in self.figures and is_figure(value):
                    self.figures[key] = None
        self._offset += len(complete)
        self._tail = (self._tail + complete)[-_TAIL_BYTES:]
