"""A process of `stretto check` that calls `Component.check_row` for many rows, or reads some with
the model's processor, which the kernel does not load. It reads the run from stdin and writes a `RowFaults` to
stdout; output of plugins goes to stderr."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import msgspec

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import Composed, compose_mapping
from stretto.chat.prompts import tools_of
from stretto.component import Context
from stretto.dataset import CurriculumDataset, Dataset, Row
from stretto.errors import ConfigError
from stretto.machine.child_process import last_line, run_child
from stretto.models.vision import Vision, keep_torch_out

_MAX_ROWS = 10_000
_MAX_S = 4.0
_READ_S = 1.0  # for images: a processor may take 0.1 s for each
_MAX_SHOWN = 5


class RowFaults(msgspec.Struct, frozen=True):
    """What is wrong with the rows of a dataset."""

    rows: int
    """Number of rows of the dataset."""
    read: int
    """All rows, or at most `_MAX_ROWS` random ones in about `_MAX_S` seconds."""
    faulty: int
    """Number of checked rows with a fault."""
    first: tuple[tuple[int, str], ...]
    """Index and fault of the checked rows with a fault, in the order of the dataset, at most `_MAX_SHOWN`."""

    @classmethod
    def of(cls, rows: int, read: int, faults: Mapping[int, str]) -> RowFaults:
        """Return the faults of a dataset, from index of a row -> fault."""
        return cls(rows, read, len(faults), tuple(sorted(faults.items())[:_MAX_SHOWN]))

    @property
    def count_and_examples(self) -> str:
        """Text for messages: how many rows were checked, and the first faults."""
        faults = "".join(f"\n  row {index + 1}: {fault}" for index, fault in self.first)
        more = "\n  …" if self.faulty > len(self.first) else ""
        return f"(checked: {checked_rows(self.read, self.rows)}):{faults}{more}"


def checked_rows(read: int, rows: int) -> str:
    """Return text for messages: how many rows were read."""
    return "all rows" if read == rows else f"{read:,} of {rows:,} rows, drawn at random"


def row_checks(composed: Composed, section: str) -> list[Callable[[Mapping[str, Any]], str]]:
    """Return the row checks of a section's component and of its parts. Each check returns a fault, or ''."""
    return [
        partial(component.check_row, composed.section(path))
        for path, component in composed.components.items()
        if component.check_row is not None and (path == section or path.startswith(f"{section}.parts."))
    ]


def drawn_rows(rows: int, seconds: float) -> Iterator[int]:
    """Yield the indices of at most `_MAX_ROWS` rows in random order, for at most `seconds`. The time begins
    after the first row, whose check may import a large library."""
    end = math.inf
    for number, index in enumerate(random.Random(0).sample(range(rows), min(rows, _MAX_ROWS))):
        if number == 1:
            end = time.monotonic() + seconds
        elif time.monotonic() > end:
            return
        yield index


def faults_of_rows(
    document: Mapping[str, Any], path: str, section: str, context: Context, timeout_s: float
) -> RowFaults:
    """Check rows of the dataset at the key `path` in a child process, with the components of `section`; for
    `model`, with the model's processor. Raise TimeoutError after `timeout_s`, and
    ChildProcessError, with the last line of the child's stderr, if the child fails."""
    setup = msgspec.msgpack.encode((document, path, section, context))
    done = run_child([sys.executable, "-m", __name__], setup, timeout_s)
    if done.returncode:
        raise ChildProcessError(last_line(done.stderr))
    return msgspec.msgpack.decode(done.stdout, type=RowFaults)


def _faults(document: Mapping[str, Any], path: str, section: str, context: Context) -> RowFaults:
    reads = section == "model"
    if reads:
        keep_torch_out()
    assembly = Assembly(compose_mapping(document))
    dataset: Dataset = assembly.composed.make(path, context)
    checks = [partial(_fault_of_reading, assembly, path)] if reads else row_checks(assembly.composed, section)
    rows = len(dataset)
    read, faults = 0, dict[int, str]()
    for index in drawn_rows(rows, _READ_S if reads else _MAX_S):
        read += 1
        try:
            row = dataset[index]
        except ConfigError:  # the row has no prompt, which another check reports
            continue
        columns = {name: value for name, value in row.items() if reads or name != "prompt"}
        if fault := next(filter(None, (check(columns) for check in checks)), ""):
            part = f"of {dataset.source_of(index)}: " if isinstance(dataset, CurriculumDataset) else ""
            faults[index] = part + fault
    return RowFaults.of(rows, read, faults)


def _fault_of_reading(assembly: Assembly, path: str, row: Row) -> str:
    """Return why the run's vision-language model cannot read a row; empty if it can."""
    assert assembly.config.model is not None, "only runs of vision-language models ask this"
    source = assembly.graph.source
    try:
        tokenizer = Vision(assembly.config.model, assembly.config.dataset).of(row)
        if source.encode is None or path != "dataset":
            tokenizer.encode_prompt(row["prompt"], tools=tools_of(row))
        else:
            for index in range(source.samples):
                source.encode(row, index, tokenizer)
    except ConfigError as error:
        return str(error)
    return ""


def _main() -> None:
    setup = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[dict[str, Any], str, str, Context])
    with redirect_stdout(sys.stderr):
        faults = _faults(*setup)
    sys.stdout.buffer.write(msgspec.msgpack.encode(faults))


if __name__ == "__main__":
    _main()
