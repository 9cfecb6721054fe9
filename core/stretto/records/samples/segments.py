"""Writes and removes segments of kept samples. A segment is complete or absent, also after a power cut."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import parquet as pq

from stretto.bus.messages.tickets import Purpose
from stretto.machine.private_file import sync
from stretto.records.samples.files import SegmentName, Table, segments_in

FLUSHES = 64
"""Number of flushes in a segment. A thousand steps, each flushed on its own, make at most 15 segments and 63
files that are not yet in a segment; a week with a flush every three seconds makes 3,150 segments."""
_SEGMENT_BYTES = 2**25
"""Flushes of this many bytes in all make a segment too: a segment is built in memory."""
_GROUP_ROWS = 4096
_GROUP_BYTES = 2**25
"""Limits of a Parquet row group: a reader of one row reads the whole row group."""
_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 3,
    # Columns in which values repeat.
    "use_dictionary": [
        *("purpose", "outcome", "reason", "metrics", "finish", "worker", "engine", "digest", "prompt_text"),
        *("dataset_row", "tokens.list.element", "versions.list.element", "advantages.list.element"),
    ],
    # Logprobs compress better with their bytes split by significance.
    "column_encoding": {"logprobs.list.element": "BYTE_STREAM_SPLIT"},
    "write_statistics": ["ticket", "sequence", "newest"],
    "data_page_size": 2**20,
}


class SegmentWriter:
    """The segments in the folder `samples` of one run. One process at a time writes them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        names = segments_in(folder)
        for path in {*folder.glob("*.parquet")} - {folder / name.file for name in names}:
            path.unlink()  # a killed writer has left it: unfinished, or a flush of a segment
        self._flush = max((name.last for name in names), default=0)

    def write(self, purpose: Purpose, table: Table) -> None:
        """Write the rows of a flush; OSError if the disk is full or cannot be written."""
        self._flush += 1
        self._put(SegmentName(purpose, self._flush, self._flush), table)

    def close(self, purpose: Purpose, flushes: int) -> None:
        """Join single flushes to a segment, if there are `flushes` of them, or they have many bytes."""
        names = [name for name in self._names(purpose) if name.first == name.last]
        paths = [self._folder / name.file for name in names]
        size = sum(path.stat().st_size for path in paths)
        if len(names) > 1 and (len(names) >= flushes or size >= _SEGMENT_BYTES):
            tables = [pq.ParquetFile(path).read() for path in paths]
            rows = pa.concat_tables(tables, promote_options="default")  # an older stretto wrote fewer columns
            self._put(SegmentName(purpose, names[0].first, names[-1].last), rows)
            for path in paths:
                path.unlink()

    def prune(self, purpose: Purpose, below: int) -> bool:
        """Remove the oldest segments, with versions below `below`. Return whether any was removed."""
        removed = False
        for name in self._names(purpose):
            if self._most(name, "newest") >= below:
                break
            (self._folder / name.file).unlink()
            removed = True
        return removed

    def images(self) -> set[str]:
        """Return the names of the added images of all rows."""
        names: set[str] = set()
        for name in segments_in(self._folder):
            column = pq.ParquetFile(self._folder / name.file).read(["images"])["images"]
            for text in column.unique().to_pylist():
                images: list[str | int] = msgspec.json.decode(text) if text else []
                names.update(image for image in images if isinstance(image, str))
        return names

    def attempts_since(self, sequence: int) -> Iterator[tuple[Purpose, int, int]]:
        """Yield (purpose, ticket, attempt) of rows whose outcome has this sequence number or a higher one."""
        for name in segments_in(self._folder):
            if self._most(name, "sequence") >= sequence:
                table = pq.ParquetFile(self._folder / name.file).read(["ticket", "attempt", "sequence"])
                for row in table.to_pylist():
                    if row["sequence"] >= sequence:
                        yield name.purpose, row["ticket"], row["attempt"]

    def _names(self, purpose: Purpose) -> list[SegmentName]:
        return [name for name in segments_in(self._folder) if name.purpose == purpose]

    def _put(self, name: SegmentName, table: Table) -> None:
        unfinished = self._folder / f".{name.file}.parquet"
        rows_per_group = max(1, min(_GROUP_ROWS, _GROUP_BYTES * len(table) // max(1, table.nbytes)))
        with unfinished.open("wb") as file:
            pq.write_table(table, file, row_group_size=rows_per_group, **_OPTIONS)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(self._folder / name.file)
        sync(self._folder)

    def _most(self, name: SegmentName, column: str) -> int:
        metadata = pq.read_metadata(self._folder / name.file)
        position = metadata.schema.names.index(column)
        groups = range(metadata.num_row_groups)
        statistics = [metadata.row_group(group).column(position).statistics for group in groups]
        return max((stats.max for stats in statistics if stats is not None and stats.has_min_max), default=-1)
