"""Structured logs: JSON lines in a file for every process, readable lines in the kernel's terminal.

`log_to` adds the process's fields (run, role, worker) to every line, `bound` the work's (ticket, version).
"""

import logging
import sys
from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import structlog

from stretto.errors import printable

_HIDDEN = ("run", "role")
"""Fields that people need not read: they are the same in every line of a process."""


def log_to(file: Path | None, *, console: bool = False, **identity: str) -> None:
    """Write this process's log to `file` as JSON lines; if `console`, also to stderr without tracebacks."""
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
    logging.basicConfig(level=logging.WARNING, handlers=[_Standard()], force=True)


def log_nothing() -> None:
    """Drop this process's log, for a command that prints its errors itself."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@contextmanager
def bound(**facts: Any) -> Generator[None]:
    """Add these fields to every line logged in the block."""
    with structlog.contextvars.bound_contextvars(**facts):
        yield


def printable_fields(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a log line that people read, as printable text."""
    return {
        key: printable(value) if isinstance(value, str) else value
        for key, value in event.items()
        if key not in _HIDDEN
    }


class _Tee:
    def __init__(self, file: TextIO | None, console: bool) -> None:
        self._file = file
        self._json = structlog.processors.JSONRenderer()
        self._console = console
        self._complained = False
        self._text = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), pad_event_to=0, sort_keys=False
        )

    def __call__(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        if self._file is not None:
            try:
                self._file.write(f"{self._json(logger, name, dict(event))}\n")
            except OSError as error:  # a full disk must not end the process at its next log line
                if not self._complained:
                    self._complained = True
                    print(f"cannot write {self._file.name}: {error}", file=sys.stderr, flush=True)
        if self._console:
            fields = printable_fields(event)
            if fields.pop("exception", None) and self._file is not None:
                fields["traceback"] = self._file.name
            try:
                print(self._text(logger, name, fields), file=sys.stderr, flush=True)
            except OSError:  # the reader of stderr is gone; the file still gets every line
                self._console = False
        return ""


class _Standard(logging.Handler):
    """Passes records of the standard `logging` module on to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "asyncio" and "eof_received() has no effect when using ssl" in record.getMessage():
            return  # logged at the end of each TLS connection of nats-py, though it closes as it should
        structlog.get_logger().log(record.levelno, record.getMessage(), logger=record.name)
