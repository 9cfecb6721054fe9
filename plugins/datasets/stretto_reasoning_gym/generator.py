"""The process that generates rows, and the class with which another process, its owner, uses it.

Some tasks draw from sets, whose order depends on the process's hash seed. This seed is fixed, so rows are the
same in every process and run. The kernel and the rollout workers do not import the library.

The pipe carries msgpack. The process reads an `Order` and answers with an error message, empty if the order
is valid. Then it answers each index with an `Entry`, until the pipe ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, cast

import msgspec

from stretto.errors import ConfigError, offer

_START_S = 300.0
"""Time limit for the import of the library, which may take minutes, and for the creation of tasks."""
_ROW_S = 60.0
"""Time limit for a row."""
_TUPLE, _INTEGER = "__tuple__", "__integer__"


class TaskOrder(msgspec.Struct, frozen=True):
    """One task, its sampling weight and its options."""

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
    """Why the row could not be generated; empty for a good row."""


class Generator:
    """Starts the process at the first request for a row, and ends it. Any thread may call this object."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._asking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any]

    def __del__(self) -> None:
        self._end()

    def entry(self, index: int) -> Entry:
        with self._asking:
            if self._process is None:
                self._start()
            entry: Entry = self._ask(index, Entry, _ROW_S)
        if entry.error:
            raise ConfigError(f"row {index} of reasoning_gym: {entry.error}")
        return entry

    def _start(self) -> None:
        self._pipe, child_end = Pipe()
        code = f"import {__name__} as generator; generator.main()"
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the library prints goes to standard error
                pass_fds=[child_end.fileno()],
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        if error := self._ask(self._order, str, _START_S):
            self._end()
            raise ConfigError(error)

    def _ask(self, question: Any, kind: Any, timeout_s: float) -> Any:
        assert self._process is not None
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(question))
            if not self._pipe.poll(timeout_s):
                raise TimeoutError
            return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=kind)
        except TimeoutError:
            self._end()
            raise ConfigError(
                f"reasoning_gym has not answered within {timeout_s:g} s; choose other options of the task"
            ) from None
        except (OSError, EOFError) as error:
            status = self._process.wait()
            self._end()
            raise ConfigError(f"the process that generates rows ended with status {status}") from error

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._pipe.close()


def plain(value: Any) -> Any:
    """Convert a value of the library for msgpack. Tuples and integers of more than 64 bits are marked, for
    `restore` to convert them back. Raise TypeError for other types."""
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


def _make_dataset(order: Order) -> Any:
    """Create the library's dataset. Raise ConfigError for an unknown task or an unknown option."""
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


def _serve(pipe: Connection[Any, Any]) -> None:
    def answer(message: Any) -> None:
        pipe.send_bytes(msgspec.msgpack.encode(message))

    order = msgspec.msgpack.decode(pipe.recv_bytes(), type=Order)
    try:
        dataset, instruction = _make_dataset(order), _instruction(order)
    except ConfigError as error:
        answer(str(error))
        return
    except Exception as error:  # noqa: BLE001 - a task may raise anything for bad options; the owner gets it
        answer(f"{', '.join(task.name for task in order.tasks)}: {type(error).__name__}: {error}")
        return
    answer("")
    while True:
        index = msgspec.msgpack.decode(pipe.recv_bytes(), type=int)
        try:
            entry = _entry(order, dataset, index, instruction)
        except Exception as error:  # noqa: BLE001 - the owner gets every error of making a row
            entry = Entry("", {}, "", "", None, {}, error=f"{type(error).__name__}: {error}")
        answer(entry)


def main() -> None:
    with suppress(EOFError, ConnectionError):  # the owner has ended
        _serve(Connection(int(sys.argv[1])))
