"""The segments of kept samples on disk: write them, merge small ones, and remove old ones.

A segment is complete under its name or absent. After `write` it is on disk, also after a power cut.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import compute
from pyarrow import parquet as pq

from stretto.records.kept.sample_files import (
    Schema,
    SegmentKind,
    SegmentName,
    Table,
    schema_of,
    segments_in,
    with_columns,
)

_KINDS: tuple[SegmentKind, ...] = ("samples", "trained", "retired")
_FAN = 8
"""Number of segments of one tier that are merged into one."""
_SMALL = 2**18
"""Bytes below which a segment belongs to the lowest tier. Each higher tier is `_FAN` times larger."""
_LARGEST = 2**29
"""Segments of this many bytes are not merged any more."""
_TIDY = 2**26
"""At the end of a run, segments of up to this many bytes together become one."""
_PARTS = 4
"""If only the last steps are kept, a segment spans at most one of this many parts of them."""
_GROUP_ROWS = 4096
_GROUP_BYTES = 2**25
"""`_GROUP_ROWS` and `_GROUP_BYTES` bound a row group: a reader of one row reads all of its group."""
_LEVEL = 3
"""Level of zstd."""

_REPEATED = (
    *("purpose", "outcome", "reason", "metrics", "finish", "worker", "engine", "digest", "prompt_text"),
    *("dataset_row", "tokens.list.element", "versions.list.element", "advantages.list.element"),
)
"""Columns in which values repeat: they are written with a dictionary."""
_FLOATS = ("logprobs.list.element",)
"""Columns that compress better with their bytes split by significance."""
_STATISTICS = ("purpose", "ticket", "sequence", "step", "newest", "length", "reward")


class SegmentWriter:
    """The segments in the folder `samples` of one run. One process at a time writes them.

    Args:
        folder: the folder. It is created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._remove_leftovers()
        self._flush = max((name.last for kind in _KINDS for name in segments_in(folder, kind)), default=0)

    def write(self, kind: SegmentKind, table: Table) -> None:
        """Write rows as a new segment.

        Raises:
            OSError: if the disk is full or cannot be written.
        """
        self._flush += 1
        self._put(SegmentName(kind, self._flush, self._flush), [table])

    def merge(self, last: int = 0) -> bool:
        """Merge some small segments into a larger one. Return False if there was nothing to merge.

        Args:
            last: if the run keeps the samples of this many steps only, segments stay so small that the old
                ones can be removed; 0 if it keeps all.
        """
        merged = [self._merge_kind(kind, last) for kind in _KINDS]
        return any(merged)

    def tidy(self) -> None:
        """Merge all small segments, at the end of a run."""
        for kind in _KINDS:
            names = segments_in(self._folder, kind)
            if len(names) > 1 and sum(map(self._size, names)) <= _TIDY:
                self._replace(names)

    def prune(self, below: int, kind: SegmentKind, column: str, *, but_answers: bool = False) -> bool:
        """Remove the oldest segments of a kind in which no value of a column is `below` or higher. Return
        whether there were any.

        Args:
            but_answers: keep their rows of evaluations.
        """
        removed = False
        for name in segments_in(self._folder, kind):
            if self._most(name, column) >= below:
                break
            if but_answers and not self._has_training(name):
                continue
            answers = self._answers_in(name) if but_answers else []
            if answers:
                self._put(name, answers)
            else:
                (self._folder / name.file).unlink()
            removed = True
        return removed

    def images(self) -> set[str]:
        """Return the names of the added images of all rows."""
        names: set[str] = set()
        for name in segments_in(self._folder, "samples"):
            table = pq.ParquetFile(self._folder / name.file).read(["images"])
            for text in with_columns("samples", table, ["images"])["images"].unique().to_pylist():
                images: list[str | int] = msgspec.json.decode(text) if text else []
                names.update(image for image in images if isinstance(image, str))
        return names

    def rows_since(
        self, sequence: int, kind: SegmentKind, columns: Iterable[str]
    ) -> Iterator[dict[str, Any]]:
        """Yield these columns of the rows that came from this place of the log or a later one."""
        for name in segments_in(self._folder, kind):
            if self._most(name, "sequence") >= sequence:
                file = pq.ParquetFile(self._folder / name.file)
                rows: list[dict[str, Any]] = file.read([*columns, "sequence"]).to_pylist()
                yield from (row for row in rows if row["sequence"] >= sequence)

    # ------------------------------------------------------------------------------------ private

    def _remove_leftovers(self) -> None:
        """Remove what a killed writer has left: unfinished files, and segments that were merged."""
        counted = {name.file for kind in _KINDS for name in segments_in(self._folder, kind)}
        for path in self._folder.glob("*.parquet"):
            if path.name not in counted:
                path.unlink()

    def _merge_kind(self, kind: SegmentKind, last: int) -> bool:
        names = segments_in(self._folder, kind)
        sizes = [self._size(name) for name in names]
        limit = _SMALL
        while limit < _LARGEST:
            start = len(names)
            while start and sizes[start - 1] < limit:
                start -= 1
            if len(names) - start >= _FAN and not self._spans(names[start:], last):
                self._replace(names[start:])
                return True
            limit *= _FAN
        return False

    def _spans(self, names: list[SegmentName], last: int) -> bool:
        """Return whether segments span more steps than may be in one, if only the last ones are kept."""
        columns: dict[SegmentKind, str] = {"samples": "newest", "trained": "step"}
        if not last or names[0].kind not in columns:
            return False
        column = columns[names[0].kind]
        trained = [self._most(name, column) for name in names if self._has_training(name)]
        return bool(trained) and trained[-1] - trained[0] > last // _PARTS

    def _replace(self, names: list[SegmentName]) -> None:
        """Write the rows of some segments that follow each other as one, and remove these."""
        merged = SegmentName(names[0].kind, names[0].first, names[-1].last)
        self._put(merged, (table for name in names for table in self._row_groups(name)))
        for name in names:
            (self._folder / name.file).unlink()

    def _put(self, name: SegmentName, tables: Iterable[Table]) -> None:
        aside = self._folder / f".{name.file}.parquet"
        schema = schema_of(name.kind)
        columns = set(_leaves(schema))
        options: dict[str, Any] = {
            "compression": "zstd",
            "compression_level": _LEVEL,
            "use_dictionary": [each for each in _REPEATED if each in columns],
            "column_encoding": {each: "BYTE_STREAM_SPLIT" for each in _FLOATS if each in columns},
            "write_statistics": [each for each in _STATISTICS if each in columns],
            "data_page_size": 2**20,
        }
        with aside.open("wb") as file:
            with pq.ParquetWriter(file, schema, **options) as writer:
                for group in _grouped(tables):
                    writer.write_table(group, row_group_size=_GROUP_ROWS)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(self._folder / name.file)
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _row_groups(self, name: SegmentName) -> Iterator[Table]:
        file = pq.ParquetFile(self._folder / name.file)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            yield with_columns(name.kind, table, schema_of(name.kind).names)

    def _answers_in(self, name: SegmentName) -> list[Table]:
        of_columns: Any = compute  # pyarrow defines its functions when it is imported
        groups = self._row_groups(name)
        tables = (table.filter(of_columns.equal(table["purpose"], "eval")) for table in groups)
        return [table for table in tables if len(table)]

    def _size(self, name: SegmentName) -> int:
        return (self._folder / name.file).stat().st_size

    def _most(self, name: SegmentName, column: str) -> int:
        """Return the highest value of a column in a segment; -1 if it has none."""
        return max((each.max for each in self._statistics(name, column) if each is not None), default=-1)

    def _has_training(self, name: SegmentName) -> bool:
        """Whether a segment has, or may have, rows that are not of evaluations."""
        if name.kind != "samples":
            return True
        return any(each is None or each.max != "eval" for each in self._statistics(name, "purpose"))

    def _statistics(self, name: SegmentName, column: str) -> list[Any]:
        """Return the statistics of a column in each row group; None where there are none."""
        metadata = pq.read_metadata(self._folder / name.file)
        place = metadata.schema.names.index(column)
        found = [
            metadata.row_group(group).column(place).statistics for group in range(metadata.num_row_groups)
        ]
        return [each if each is not None and each.has_min_max else None for each in found]


def _leaves(schema: Schema) -> list[str]:
    """Return the columns of a schema by the names that Parquet gives them."""
    return [f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name for field in schema]


def _grouped(tables: Iterable[Table]) -> Iterator[Table]:
    """Join tables until they are large enough for a row group."""
    waiting: list[Table] = []
    rows = size = 0
    for table in tables:
        if waiting and (rows + len(table) > _GROUP_ROWS or size + table.nbytes > _GROUP_BYTES):
            yield pa.concat_tables(waiting)
            waiting, rows, size = [], 0, 0
        waiting.append(table)
        rows, size = rows + len(table), size + table.nbytes
    if waiting:
        yield pa.concat_tables(waiting)
