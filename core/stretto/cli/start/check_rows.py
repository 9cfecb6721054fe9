"""Read rows of a dataset before a run starts, to find those that its first row does not stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stretto.children.row_check import drawn_rows
from stretto.component import Problem
from stretto.dataset import Dataset, Row
from stretto.errors import ConfigError
from stretto.models.tokenizer import fault_of

__all__ = ["ReadRows", "RowForm", "leaked_rows", "read_rows"]

_MAX_S = 1.0
_MAX_SHOWN = 5
_MAX_LEAK = 0.05
"""Generated rows may meet by chance: warn from this share of held-out rows that are also training rows."""


@dataclass(eq=False)
class RowForm:
    """Rows with the same columns, whose values have the same types."""

    index: int
    """The smallest index of such a row that was read."""
    row: Row
    count: int = 0
    """Number of rows that were read."""


@dataclass
class ReadRows:
    """The rows of a dataset that were read: all, or a random part."""

    rows: int
    """Number of rows of the dataset."""
    first: Row
    read: int = 0
    forms: dict[Set[tuple[str, type]], RowForm] = field(default_factory=dict[Set[tuple[str, type]], RowForm])
    """The forms of the rows with a valid prompt."""
    faults: dict[int, str] = field(default_factory=dict[int, str])
    """Index of the rows without a valid prompt -> fault."""
    contents: set[bytes] = field(default_factory=set[bytes])
    """The rows without their ids, encoded."""

    @property
    def checked(self) -> str:
        """How many rows were read, for messages."""
        if self.read == self.rows:
            return "all rows"
        return f"{self.read:,} of {self.rows:,} rows, drawn at random"

    def other_forms(self, most: int) -> list[RowForm]:
        """Return the forms that differ from that of the first row, at most `most`."""
        first = _form_of(self.first)
        return [each for form, each in self.forms.items() if form != first][:most]

    def problems(self, path: str) -> Iterator[Problem]:
        """Yield the problem that rows have no valid prompt."""
        if self.faults:
            first = sorted(self.faults.items())[:_MAX_SHOWN]
            examples = "".join(f"\n  row {index + 1}: {fault}" for index, fault in first)
            yield Problem(
                path,
                f"{len(self.faults):,} of {self.read:,} rows have no valid prompt, and their tickets would "
                f"fail (checked: {self.checked}):{examples}{_ellipsis(len(self.faults))}",
                "warning",
            )


def _ellipsis(number: int) -> str:
    return "\n  …" if number > _MAX_SHOWN else ""


def read_rows(dataset: Dataset) -> ReadRows:
    """Read a dataset whose first row has a valid prompt: as many rows as the time allows."""
    found = ReadRows(len(dataset), dataset[0])
    for index in drawn_rows(found.rows, _MAX_S):
        found.read += 1
        try:
            row = dataset[index]
        except ConfigError as error:
            found.faults[index] = str(error)
            continue
        if fault := fault_of(row["prompt"]) if "prompt" in row else "it has no column 'prompt'":
            found.faults[index] = fault
            continue
        form = found.forms.setdefault(_form_of(row), RowForm(index, row))
        form.count += 1
        if index < form.index:
            form.index, form.row = index, row
        content = {name: value for name, value in row.items() if name != "id"}
        found.contents.add(msgspec.msgpack.encode(content, enc_hook=repr, order="sorted"))
    return found


def leaked_rows(read: Mapping[str, ReadRows]) -> Iterator[Problem]:
    """Warn of held-out rows that are training rows."""
    if len(read) < 2:
        return
    train, held_out = read["dataset"], read["evaluation.dataset"]
    leaked = len(train.contents & held_out.contents)
    if leaked > _MAX_LEAK * len(held_out.contents):
        yield Problem(
            "evaluation.dataset",
            f"{leaked:,} of {held_out.read:,} held-out rows are also rows of `dataset`: their accuracy does "
            f"not show what the policy learns for new rows (checked: {held_out.checked}, and of `dataset` "
            f"{train.checked}); remove them from one of the two",
            "warning",
        )


def _form_of(row: Mapping[str, Any]) -> Set[tuple[str, type]]:
    return frozenset((name, type(value)) for name, value in row.items() if name not in {"prompt", "id"})
