"""The contract of datasets as tests."""

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
    """The contract of `stretto.dataset.Dataset`: an index gives the same row in every process and in any
    order, because runs are resumed and workers join late."""

    kind: ClassVar[Kind] = "dataset"
    changed: ClassVar[Mapping[str, Any]] = {}
    """Keys of the section that change the rows, for the test of the fingerprint."""

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
        """Index -> row: all rows of a small dataset, or evenly spaced rows of a large one."""
        size = len(dataset)
        assert size > 0, "it has no rows"
        chosen = range(0, size, -(-size // _MOST_ROWS))
        return {index: dataset[index] for index in sorted({*chosen, size - 1})}

    def test_every_row_is_a_dict_with_a_prompt_that_the_bus_carries(self, rows: dict[int, Row]) -> None:
        """The prompt is text or chat messages. A row is plain data, because scoring processes get it too."""
        for index, row in rows.items():
            assert type(row) is dict, f"row {index} is a {type(row).__name__}; expected a dict"
            odd_names = [name for name in cast("dict[Any, Any]", row) if not isinstance(name, str)]
            assert not odd_names, f"row {index} has the column {odd_names[0]!r}; expected text"
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
        """The test reads the rows in reverse order, and compares their number."""
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
        process = subprocess.run(
            [sys.executable, "-c", _OTHER_PROCESS],
            input=msgspec.msgpack.encode(facts),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": "4711"},
            check=True,
        )
        size, fingerprint, other_rows = msgspec.msgpack.decode(process.stdout)
        assert size == len(dataset), f"{len(dataset)} rows here, and {size} in another process"
        for (index, row), other_row in zip(rows.items(), other_rows, strict=True):
            sent_row = decode_row(encode_row(row))
            assert decode_row(other_row) == sent_row, f"row {index} is another one in another process"
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
        changed = ComponentUnderTest(self.kind, changed_section, self.run, self.plugins, folder).make()
        same = len(changed) == len(dataset) and all(changed[index] == row for index, row in rows.items())
        assert not same, "`changed` gives the same rows"
        assert changed.fingerprint != dataset.fingerprint, "other rows have the same fingerprint"

    def test_there_is_no_row_after_the_last_one(self, dataset: Dataset) -> None:
        """Without an error, `for row in dataset` would never end."""
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
"""Program of the other process: make a dataset, and write its size, fingerprint and some rows."""
