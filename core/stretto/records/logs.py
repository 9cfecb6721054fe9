"""The logs in a run's folder as text: one JSON Lines file for the kernel, the supervisor and each worker."""

import re
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

import msgspec
import structlog

from stretto.assembly.logs import printable_fields
from stretto.errors import ConfigError, offer, printable
from stretto.records.files import open_record

_TEXT = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0, sort_keys=False)
_PROBLEMS = ("warning", "error", "critical")
_TIME = re.compile(r'"timestamp": "([^"]*)"')
_BEGINS = re.compile(r'^{"folder": .*"event": "run"')


def log_files(folder: Path) -> dict[str, Path]:
    """Return name of a process -> its log file, ordered by name; the kernel's name is `kernel`."""
    return {file.stem: file for file in sorted((folder / "logs").glob("*.jsonl"))}


def open_log(folder: Path, name: str) -> TextIOWrapper:
    """Open the log of a process. ConfigError if there is none of this name, or it cannot be read."""
    logs = log_files(folder)
    if name not in logs:
        raise ConfigError(f"{folder} has no log of {name!r}{offer(name, logs, 'logs')}")
    try:
        return TextIOWrapper(open_record(logs[name]), encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{logs[name]} cannot be read: {error}") from error


def whole_lines(log: IO[str]) -> Iterator[str]:
    """Yield the complete lines. A later call continues after them."""
    while True:
        position = log.tell()
        line = log.readline()
        if not line.endswith("\n"):
            log.seek(position)
            return
        yield line


def attempts_in(log: Iterable[str]) -> list[str]:
    """Return the times (ISO 8601, UTC) at which kernels took over the run, from the kernel's log."""
    begun = (_TIME.search(line) for line in log if _BEGINS.match(line))
    return [found[1] for found in begun if found]


def lines_between(log: Iterable[str], since: str, until: str) -> Iterator[str]:
    """Yield the lines between two times (ISO 8601, UTC; `until` empty for the end). A line without a time
    belongs to the line before it."""
    time = ""
    for line in log:
        found = _TIME.search(line)
        time = found[1] if found else time
        if since <= time and (not until or time < until):
            yield line


def log_text(line: str, *, problems: bool = False) -> str:
    """Return a line as text for people, unchanged if it is not JSON. `problems`: empty below a warning."""
    try:
        event = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return printable(line.rstrip("\n"))
    if problems and event.get("level") not in _PROBLEMS:
        return ""
    fields = printable_fields(event)
    trace = fields.pop("exception", None)
    text = _TEXT(None, "", {"event": "", **fields})
    return f"{text}\n{trace}" if trace else str(text)
