"""Faults of real files: a process is killed in a write or before a rename, or the disk is full."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stretto.simulation.loop import ProcessEnded, SimulatedProcess, current_process

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class SimulatedFiles:
    """The files of all processes of a universe."""

    def __init__(self) -> None:
        self.observers: list[Callable[[str, str, bytes, bytes], None]] = []
        """Called with the process's name and `file.rename.NAME` before a file gets its final name."""
        self.full_until = 0.0
        self._tearing: SimulatedProcess | None = None

    def tear(self, process: SimulatedProcess) -> None:
        """Kill a process in the middle of its next write."""
        self._tearing = process

    def places(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield the replacements of functions of the standard library: (module, name, function)."""
        for name in ("unlink", "rmdir", "mkdir"):
            yield os, name, _of_the_living(getattr(os, name))
        for name in ("rename", "replace"):
            yield os, name, self._renaming(getattr(os, name))
        yield os, "fsync", self._filling(os.fsync)
        yield os, "open", self._opening(os.open, lambda flags: bool(flags & _WRITING))
        for module in (io, builtins):
            yield module, "open", self._opening(io.open, lambda mode: mode[0] != "r" or "+" in mode)

    def _renaming(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def rename(source: Any, target: Any, **options: Any) -> None:
            if process := _living_process():
                for observe in self.observers:
                    observe(process.name, f"file.rename.{Path(target).name}", b"", b"")
                _living_process()  # raises if an observer has killed the process
            function(source, target, **options)

        return rename

    def _filling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **options: Any) -> Any:
            process = _living_process()
            if process and process.loop.time() < self.full_until:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **options)

        return write

    def _opening(self, function: Callable[..., Any], writes: Callable[[Any], bool]) -> Callable[..., Any]:
        filling = self._filling(function)

        def open_file(file: Any, *args: Any, **options: Any) -> Any:
            if not writes(args[0] if args else options.get("mode", "r")):
                return function(file, *args, **options)
            opened = filling(file, *args, **options)
            process = current_process()
            if process is not None and process is self._tearing and hasattr(opened, "write"):
                self._tearing = None
                return _TornFile(opened, process)
            return opened

        return open_file


class _TornFile:
    """A file whose process is killed in the middle of a write."""

    def __init__(self, file: Any, process: SimulatedProcess) -> None:
        self._file, self._process = file, process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _TornFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, data: Any) -> None:
        self._file.write(data[: len(data) // 2])
        self._file.close()
        self._process.end(-9)
        raise ProcessEnded

    def writelines(self, lines: Any) -> None:
        self.write(next(iter(lines)))


def _of_the_living(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        _living_process()
        return function(*args, **options)

    return call


def _living_process() -> SimulatedProcess | None:
    """Return the process whose code runs, None outside of processes. Raises ProcessEnded if it has ended."""
    process = current_process()
    if process is not None and process.status is not None:
        raise ProcessEnded
    return process
