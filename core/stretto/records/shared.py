"""Which files of a run's folder its operator may read from another machine, and which part of each is new.

These are the records: run file, figures, timeline, status, summary, logs, traces and samples. The folders of
the bus, of checkpoints and of trackers are not among them.
"""

from __future__ import annotations

import re
from pathlib import Path

_FOLDERS = ("answers", "logs", "samples", "traces")
_NAME = re.compile(
    rf"(?:(?:{'|'.join(_FOLDERS)})/)?[A-Za-z0-9][A-Za-z0-9._-]{{0,199}}\.(?:json|jsonl|out|parquet|txt|yaml)"
)


def is_record(name: str) -> bool:
    """Return whether a file's path, relative to the run's folder, is that of a record."""
    return _NAME.fullmatch(name) is not None


def record_file(folder: Path, name: str) -> Path | None:
    """Return the file of a record; None if there is none. Links are no records: they may lead out of the
    folder."""
    file = folder / name
    is_linked = file.is_symlink() or file.parent.is_symlink()
    return file if is_record(name) and not is_linked and file.is_file() else None


def record_sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size in bytes and the time of the last change, in nanoseconds, of each record."""
    files = [*folder.glob("*"), *(file for name in _FOLDERS for file in (folder / name).glob("*"))]
    found: dict[str, tuple[int, int]] = {}
    for file in files:
        name = file.relative_to(folder).as_posix()
        if record_file(folder, name) is not None:
            stat = file.stat()
            found[name] = stat.st_size, stat.st_mtime_ns
    return found
