"""Structured logs: JSON lines in a file for every process, readable lines in the kernel's terminal.

Whoever logs calls `structlog.get_logger()`; what identifies the process (run, role, worker) is bound
here once, and `bound` adds what identifies the work (ticket, version).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import structlog

__all__ = ["bound", "log_to"]


def log_to(file: Path | None, *, console: bool = False, **identity: str) -> None:
    """Send this process's log to a file of JSON lines, and to stderr as text if `console`. A traceback goes
    to the file alone; the text names the file."""
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    stream = file.open("a", buffering=1) if file is not None else None
    structlog.configure(
        processors=[*processors, _Tee(stream, console)],
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**identity)
    # Libraries that use the standard module are heard when they warn.
    logging.basicConfig(level=logging.WARNING, handlers=[_Standard()], force=True)


@contextmanager
def bound(**facts: Any) -> Generator[None]:
    """Facts that every line logged in the block carries."""
    with structlog.contextvars.bound_contextvars(**facts):
        yield


class _Tee:
    """The last processor: writes the line wherever it should go."""

    def __init__(self, file: TextIO | None, console: bool) -> None:
        self._file = file
        self._json = structlog.processors.JSONRenderer()
        self._console = console
        self._text = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), pad_event_to=0, sort_keys=False
        )

    def __call__(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        if self._file is not None:
            self._file.write(f"{self._json(logger, name, dict(event))}\n")
        if self._console:
            shown = {key: value for key, value in event.items() if key not in ("run", "role")}
            if shown.pop("exception", None) and self._file is not None:
                shown["traceback"] = self._file.name
            try:
                print(self._text(logger, name, shown), file=sys.stderr, flush=True)
            except OSError:  # whoever read it is gone; the file has it all
                self._console = False
        return ""


class _Standard(logging.Handler):
    """Passes records of the standard module on."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, record.getMessage(), logger=record.name)
