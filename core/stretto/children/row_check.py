"""A process that has a reward's `Component.check_row` look at the rows of a dataset: `check` starts one.

It is told the run on its standard input, and says on its output what it found; what plugins print goes to
stderr.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import msgspec

from stretto.assembly.compose import compose_mapping
from stretto.component import Context
from stretto.user_code.child_process import last_line, run_child

__all__ = ["RowFaults", "faults_of_rows"]

_MOST_ROWS = 10_000
_MOST_S = 4.0
_SHOWN = 5


class RowFaults(msgspec.Struct, frozen=True):
    """What is wrong with the rows of a dataset."""

    rows: int
    """In the dataset."""
    read: int
    """Rows that were looked at: all, or as many, drawn at random, as the bounds of number and time allow."""
    faulty: int
    first: tuple[tuple[int, str], ...]
    """Index and fault of the first few."""


def faults_of_rows(document: Mapping[str, Any], path: str, context: Context, timeout_s: float) -> RowFaults:
    """What the run's reward says of rows, found by a process of its own.

    Args:
        document: the composed run; its reward's component has a `check_row`.
        path: of the dataset's section in it.

    Raises:
        TimeoutError: if that is not known in time.
        ChildProcessError: if the process fails; the text is the last line of what it said.
    """
    told = msgspec.msgpack.encode((document, path, context))
    done = run_child([sys.executable, "-m", __name__], told, timeout_s)
    if done.returncode:
        raise ChildProcessError(last_line(done))
    return msgspec.msgpack.decode(done.stdout, type=RowFaults)


def _faults(document: Mapping[str, Any], path: str, context: Context) -> RowFaults:
    composed = compose_mapping(document)
    check_row, config = composed.components["reward"].check_row, composed.section("reward")
    assert check_row is not None, "rows are read for rewards that check them only"
    dataset = composed.make(path, context)
    rows = len(dataset)
    order = random.Random(0).sample(range(rows), min(rows, _MOST_ROWS))
    end, read, faults = time.monotonic() + _MOST_S, 0, dict[int, str]()
    for index in order:
        if read and time.monotonic() > end:
            break
        columns = {name: value for name, value in dataset[index].items() if name != "prompt"}
        if fault := check_row(config, columns):
            faults[index] = fault
        read += 1
    return RowFaults(rows, read, len(faults), tuple(sorted(faults.items())[:_SHOWN]))


def _main() -> None:
    told = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[dict[str, Any], str, Context])
    with redirect_stdout(sys.stderr):
        faults = _faults(*told)
    sys.stdout.buffer.write(msgspec.msgpack.encode(faults))


if __name__ == "__main__":
    _main()
