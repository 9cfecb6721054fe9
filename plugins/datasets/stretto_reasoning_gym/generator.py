"""The process that generates rows, and the class with which its owner uses it.

Some tasks draw from sets, whose order depends on the hash seed of the process. With a fixed hash seed the
rows are the same in every process of a run, and in every run. The library and its imports stay out of the
kernel and the rollout workers.

The pipes carry frames: 4 bytes of length, then msgpack. The process reads an `Order` and answers with an
error message, empty if the order is valid. Then it reads an index and answers with an `Entry`, until the
input ends.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any, BinaryIO, cast

import msgspec

from stretto.errors import ConfigError, offer

_HEAD = struct.Struct(">I")
_START_S = 60.0
"""Time limit for importing the library and creating the tasks."""
_ROW_S = 60.0
_TUPLE, _INTEGER = "__tuple__", "__integer__"


class TaskOrder(msgspec.Struct, frozen=True):
    """One task."""

    name: str
    weight: float
    options: dict[str, Any]


class Order(msgspec.Struct, frozen=True):
    """The tasks and settings that determine the rows."""

    tasks: tuple[TaskOrder, ...]
    size: int
    seed: int
    system: str | None


class Entry(msgspec.Struct, frozen=True):
    """One row, as plain data."""

    task: str
    options: dict[str, Any]
    instruction: str
    question: str
    answer: Any
    metadata: dict[str, Any]
    error: str = ""
    """Why the row could not be generated; else empty."""


# ------------------------------------------------------------------------------------- the owner


class Generator:
    """Starts the process with the first request for a row. Any thread may call it. It ends with its owner."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._asking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __del__(self) -> None:
        self._end()

    def entry(self, index: int) -> Entry:
        """Return the row at an index.

        Raises:
            ConfigError: if a task is unknown, or lacks or rejects an option; if the row cannot be generated,
                or not in time.
        """
        with self._asking:
            if self._process is None:
                self._start()
            entry: Entry = self._ask(index, Entry, _ROW_S)
        if entry.error:
            raise ConfigError(f"row {index} of reasoning_gym: {entry.error}")
        return entry

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import {__name__} as generator; generator.main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        if error := self._ask(self._order, str, _START_S):
            self._end()
            raise ConfigError(error)

    def _ask(self, question: Any, kind: Any, timeout_s: float) -> Any:
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        deadline = time.monotonic() + timeout_s
        try:
            _write(cast("BinaryIO", stdin), question)
            [size] = _HEAD.unpack(_read_exactly(stdout.fileno(), _HEAD.size, deadline))
            return msgspec.msgpack.decode(_read_exactly(stdout.fileno(), size, deadline), type=kind)
        except TimeoutError:
            self._end()
            raise ConfigError(
                f"reasoning_gym made no row within {timeout_s:g} s; choose other options of the task"
            ) from None
        except (OSError, EOFError) as error:
            status = self._process.wait()
            self._end()
            raise ConfigError(f"the process that generates rows ended with status {status}") from error

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _read_exactly(descriptor: int, size: int, deadline: float) -> bytes:
    """Read exactly `size` bytes from a pipe. Raises TimeoutError after the deadline, EOFError at the end."""
    data = bytearray()
    while len(data) < size:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        part = os.read(descriptor, size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _write(file: BinaryIO, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    file.write(_HEAD.pack(len(data)) + data)
    file.flush()


# -------------------------------------------------------------------------------------- plain data


def plain(value: Any) -> Any:
    """Convert a value of the library to data that msgpack can encode and `restore` converts back: tuples,
    and integers of more than 64 bits, are marked.

    Raises:
        TypeError: if the value is not plain data.
    """
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, tuple):
        return {_TUPLE: [plain(item) for item in cast("tuple[Any, ...]", value)]}
    if isinstance(value, list):
        return [plain(item) for item in cast("list[Any]", value)]
    if hasattr(value, "tolist"):  # a numpy value
        return plain(value.tolist())
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return {_INTEGER: str(value)}
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"{type(value).__name__} is not plain data: {value!r:.60}")


def restore(value: Any) -> Any:
    """Return the value that `plain` converted."""
    if isinstance(value, list):
        return [restore(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    mapping = cast("dict[Any, Any]", value)
    if mapping.keys() == {_TUPLE}:
        return tuple(restore(item) for item in mapping[_TUPLE])
    if mapping.keys() == {_INTEGER}:
        return int(mapping[_INTEGER])
    return {key: restore(item) for key, item in mapping.items()}


# ------------------------------------------------------------------------------------- the process


def _make_dataset(order: Order) -> Any:
    """Make the library's dataset.

    Raises:
        ConfigError: for an unknown task or an unknown option.
    """
    from reasoning_gym.composite import CompositeConfig, CompositeDataset, DatasetSpec
    from reasoning_gym.factory import DATASETS, create_dataset

    known = sorted(DATASETS.keys() - {"composite"})
    for task in order.tasks:
        if task.name not in known:
            raise ConfigError(f"reasoning_gym has no task {task.name!r}{offer(task.name, known, 'tasks')}")
        options = sorted({field.name for field in fields(DATASETS[task.name][1])} - {"seed", "size"})
        for name in task.options:
            if name not in options:
                raise ConfigError(
                    f"task {task.name!r} has no option {name!r}{offer(name, options, 'its options')}"
                )
    if len(order.tasks) == 1:
        [task] = order.tasks
        return create_dataset(task.name, size=order.size, seed=order.seed, **task.options)
    specs = [DatasetSpec(task.name, task.weight, task.options) for task in order.tasks]
    return CompositeDataset(CompositeConfig(order.size, order.seed, specs))


def _instruction(order: Order) -> str:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return "" if order.system is None else SYSTEM_PROMPTS.get(order.system, order.system).strip()


def _entry(order: Order, dataset: Any, index: int, instruction: str) -> Entry:
    row: Mapping[str, Any] = dataset[index]
    name: str = row["metadata"]["source_dataset"]
    options = next(task.options for task in order.tasks if task.name == name)
    return Entry(name, options, instruction, row["question"], plain(row["answer"]), plain(row["metadata"]))


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    order = msgspec.msgpack.decode(_frame(source), type=Order)
    try:
        dataset, instruction = _make_dataset(order), _instruction(order)
    except ConfigError as error:
        _write(sink, str(error))
        return
    except Exception as error:  # noqa: BLE001 - a task may raise anything for bad options; the owner gets it
        _write(sink, f"{', '.join(task.name for task in order.tasks)}: {type(error).__name__}: {error}")
        return
    _write(sink, "")
    while frame := _frame(source):
        index = msgspec.msgpack.decode(frame, type=int)
        try:
            entry = _entry(order, dataset, index, instruction)
        except Exception as error:  # noqa: BLE001 - the owner gets every error of making a row
            entry = Entry("", {}, "", "", None, {}, error=f"{type(error).__name__}: {error}")
        _write(sink, entry)


def _frame(source: BinaryIO) -> bytes:
    """Read the next frame; empty at the end of the input."""
    head = source.read(_HEAD.size)
    return source.read(_HEAD.unpack(head)[0]) if len(head) == _HEAD.size else b""


def main() -> None:
    """Body of the process."""
    # The pipes are for frames alone: everything that the library prints goes to standard error.
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with suppress(BrokenPipeError):  # the owner has gone
        _serve(source, sink)


if __name__ == "__main__":
    main()
