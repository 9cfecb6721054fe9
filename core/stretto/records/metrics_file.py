"""Writes the file `metrics.jsonl` of a run (see `stretto.records.metrics`).

A resumed run moves lines after its checkpoint to `metrics.cut.jsonl`: it repeats or loses their steps.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from stretto.errors import ConfigError, RunError
from stretto.records.metrics import METRICS, parse_line

log = structlog.get_logger()


class MetricsFile:
    """The metrics of the run in a folder. Only the kernel that owns the run may write them."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / METRICS
        self._cut = folder / "metrics.cut.jsonl"

    def read(self) -> list[dict[str, Any]]:
        """Return the lines, without a last line that a kill broke. ConfigError if another line is broken."""
        return [line for _, line in self._lines() if line is not None]

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line to the file."""
        try:
            with self._file.open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {self._file}: {error}") from error

    def cut_after(self, version: int) -> None:
        """Move lines of later steps and evaluations, and a broken last line, to `metrics.cut.jsonl`."""
        remaining: list[bytes] = []
        cut: list[bytes] = []
        for text, line in self._lines():
            (remaining if line is not None and line["step"] <= version else cut).append(text)
        if not cut:
            return
        try:
            _append_and_sync(self._cut, cut)
            new_file = self._file.with_name(".metrics.jsonl")
            new_file.unlink(missing_ok=True)
            _append_and_sync(new_file, remaining)
            new_file.replace(self._file)
        except OSError as error:
            raise RunError(f"cannot write {self._file}: {error}") from error

    def _lines(self) -> list[tuple[bytes, dict[str, Any] | None]]:
        texts = self._file.read_bytes().splitlines(keepends=True) if self._file.exists() else []
        lines: list[tuple[bytes, dict[str, Any] | None]] = []
        for number, text in enumerate(texts, start=1):
            line = parse_line(text)
            if isinstance(line, str) and number < len(texts):
                raise ConfigError(
                    f"{self._file}:{number}: {line}; mend the line or move it elsewhere, then resume again"
                )
            if isinstance(line, str):
                log.warning("the last line is broken", file=str(self._file), line=number, fault=line)
            lines.append((text, None if isinstance(line, str) else line))
        return lines


def _append_and_sync(file: Path, lines: list[bytes]) -> None:
    with file.open("ab") as stream:
        stream.writelines(line if line.endswith(b"\n") else line + b"\n" for line in lines)
        stream.flush()
        os.fsync(stream.fileno())
