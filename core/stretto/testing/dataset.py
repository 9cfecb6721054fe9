"""The contract of datasets as tests."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import msgspec
import pytest

from stretto.component import Kind
from stretto.dataset import Dataset, Row
from stretto.errors import ConfigError
from stretto.models.tokenizer import fault_of
from stretto.testing.component import ComponentConformance, ComponentUnderTest
from stretto.user_code.plain_data import decode_row, encode_row

__all__ = ["DatasetConformance"]

_MOST_ROWS = 64
"""Number of rows that the tests read of a large dataset."""


class DatasetConformance(ComponentConformance):
    """The contract of `stretto.dataset.Dataset`: the same rows by index, in every process and in any order,
    for runs that are resumed and workers that join late."""

    kind: ClassVar[Kind] = "dataset"
    changed: ClassVar[Mapping[str, Any]] = {}
    """Keys of the section that give other rows, for the test of the fingerprint."""

    @pytest.fixture(scope="class")
    @classmethod
    def changed_section(cls, section: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The section of a dataset with other rows; None if there is none."""
        return {**section, **cls.changed} if cls.changed else None

    @pytest.fixture(scope="class")
    @classmethod
    def dataset(cls, under_test: ComponentUnderTest) -> Dataset:
        """The dataset."""
        return under_test.make()

    @pytest.fixture(scope="class")
    @classmethod
    def rows(cls, dataset: Dataset) -> dict[int, Row]:
        """Rows by index: all, or some from the first to the last one of a large dataset."""
        size = len(dataset)
        assert size > 0, "it has no rows"
        chosen = range(0, size, -(-size // _MOST_ROWS))
        return {index: dataset[index] for index in sorted({*chosen, size - 1})}

    def test_every_row_is_a_dict_with_a_prompt_that_the_bus_carries(self, rows: dict[int, Row]) -> None:
        """Text, or chat messages. The row also goes to scoring processes, so it is plain data."""
        for index, row in rows.items():
            assert type(row) is dict, f"row {index} is a {type(row).__name__}; expected a dict"
            odd = [name for name in cast("dict[Any, Any]", row) if not isinstance(name, str)]
            assert not odd, f"row {index} has the column {odd[0]!r}; expected text"
            assert "prompt" in row, f"row {index} has no column 'prompt'; its columns: {', '.join(row)}"
            fault = fault_of(row["prompt"])
            assert not fault, f"the prompt of row {index}: {fault}"
            try:
                encode_row(row)
            except (TypeError, ValueError) as error:
                raise AssertionError(f"row {index} is not plain data: {error}") from error

    def test_a_row_does_not_depend_on_the_rows_read_before(
        self, dataset: Dataset, rows: dict[int, Row]
    ) -> None:
        """A resumed run begins in the middle, and a shuffled one reads in any order."""
        order = [*rows, *rows]
        random.Random(2).shuffle(order)
        for index in order:
            assert dataset[index] == rows[index], f"row {index} is another one when it is read again"

    def test_made_again_it_has_the_same_rows(
        self, under_test: ComponentUnderTest, dataset: Dataset, rows: dict[int, Row]
    ) -> None:
        """The last one first, and the same number of them."""
        again: Dataset = under_test.make()
        assert len(again) == len(dataset), f"{len(dataset)} rows, and then {len(again)}"
        for index in reversed(rows):
            assert again[index] == rows[index], f"row {index} is another one when the dataset is made again"
        assert isinstance(again.fingerprint, str), f"its fingerprint is {again.fingerprint!r}"
        assert again.fingerprint, "its fingerprint is empty"
        assert again.fingerprint == dataset.fingerprint, "its fingerprint differs when it is made again"

    def test_another_process_has_the_same_rows(
        self, under_test: ComponentUnderTest, dataset: Dataset, rows: dict[int, Row]
    ) -> None:
        """Kernel and rollout workers make the dataset, each with hash seeds of its own."""
        facts = (under_test.composed.document, under_test.context(worker="rollout-0"), list(rows))
        done = subprocess.run(
            [sys.executable, "-c", _OTHER_PROCESS],
            input=msgspec.msgpack.encode(facts),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": "4711"},
            check=True,
        )
        size, fingerprint, sent = msgspec.msgpack.decode(done.stdout)
        assert size == len(dataset), f"{len(dataset)} rows here, and {size} in another process"
        for (index, row), other in zip(rows.items(), sent, strict=True):
            own = decode_row(encode_row(row))
            assert decode_row(other) == own, f"row {index} is another one in another process"
        assert fingerprint == dataset.fingerprint, "its fingerprint differs in another process"

    def test_other_rows_have_another_fingerprint(
        self,
        changed_section: Mapping[str, Any] | None,
        dataset: Dataset,
        rows: dict[int, Row],
        tmp_path_factory: pytest.TempPathFactory,
    ) -> None:
        """A worker with other rows than the kernel's must not continue."""
        if changed_section is None:
            pytest.skip("it names no section with other rows (`changed`)")
        folder = tmp_path_factory.mktemp("changed") / "run"
        other = ComponentUnderTest(self.kind, changed_section, self.run, self.plugins, folder).make()
        same = len(other) == len(dataset) and all(other[index] == row for index, row in rows.items())
        assert not same, "`changed` gives the same rows"
        assert other.fingerprint != dataset.fingerprint, "other rows have the same fingerprint"

    def test_there_is_no_row_after_the_last_one(self, dataset: Dataset) -> None:
        """`for row in dataset` would otherwise never end."""
        try:
            row = dataset[len(dataset)]
        except (IndexError, ConfigError):
            return
        raise AssertionError(f"it has {len(dataset)} rows, and a row after the last one: {row}")


_OTHER_PROCESS = """
import sys
from contextlib import redirect_stdout
import msgspec
from stretto.assembly.compose import compose_mapping
from stretto.user_code.plain_data import encode_row
from stretto.component import Context

facts = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[dict, Context, list[int]])
document, context, indices = facts
with redirect_stdout(sys.stderr):
    dataset = compose_mapping(document).make("dataset", context)
    answer = (len(dataset), dataset.fingerprint, [encode_row(dataset[index]) for index in indices])
sys.stdout.buffer.write(msgspec.msgpack.encode(answer))
"""
"""Makes the dataset of a composed run, and writes its size, fingerprint and some rows."""
