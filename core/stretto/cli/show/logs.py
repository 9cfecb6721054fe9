"""`stretto logs`: the log of a run's kernel, or of one of its workers, as text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

import msgspec
import structlog

from stretto.assembly.logs import printable_fields
from stretto.errors import ConfigError, offer, printable
from stretto.records.files import open_record
from stretto.run_folder import RunFolder

_LOOK_S = 0.3


def log_lines(folder: Path, worker: str, *, newest: int | None, follow: bool) -> Iterator[str]:
    """Yield the lines of a log as text.

    Args:
        worker: the worker whose log it is; `kernel` for the kernel.
        newest: begin with this many lines before the end; None for all.
        follow: continue with new lines until the run has ended.

    Raises:
        ConfigError: if the folder holds no run, or if there is no such log.
    """
    run = RunFolder(folder)
    logs = {file.stem: file for file in sorted((folder / "logs").glob("*.jsonl"))}
    if worker not in logs:
        raise ConfigError(f"{folder} has no log of {worker!r}{offer(worker, logs, 'logs')}")
    text = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0, sort_keys=False)
    try:
        opened = open_record(logs[worker])
    except OSError as error:
        raise ConfigError(f"{logs[worker]} cannot be read: {error}") from error
    with TextIOWrapper(opened, encoding="utf-8", errors="replace") as file:
        for line in deque(_whole_lines(file), maxlen=newest):
            yield _as_text(text, line)
        while follow:
            run.refresh()
            lives = run.state == "running"  # before the last look at the file
            for line in _whole_lines(file):
                yield _as_text(text, line)
            if not lives:
                return
            time.sleep(_LOOK_S)


def _whole_lines(file: IO[str]) -> Iterator[str]:
    """Yield the lines that are complete. A later call continues behind them."""
    while True:
        place = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(place)
            return
        yield line


def _as_text(renderer: structlog.dev.ConsoleRenderer, line: str) -> str:
    """Return a line of a log as people read it. A line that is not JSON stays as it is."""
    try:
        event = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return printable(line.rstrip("\n"))
    fields = printable_fields(event)
    trace = fields.pop("exception", None)
    text = renderer(None, "", {"event": "", **fields})
    return f"{text}\n{trace}" if trace else str(text)
