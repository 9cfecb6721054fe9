"""All kept samples of a run, row by row, with their token arrays."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from stretto.bus.messages.tickets import Purpose
from stretto.errors import ConfigError
from stretto.records.samples.files import FOLDER, segments_in
from stretto.records.samples.kept_sample import KeptSample, digest_of

_ROWS_AT_ONCE = 512  # rows that are in memory at once


def kept_rows(
    folder: Path, purpose: Purpose, columns: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the kept samples of a purpose in the order of their segments, with lists as arrays."""
    names = [name for name in segments_in(folder / FOLDER) if name.purpose == purpose]
    if not names:
        return  # a simulated run keeps none, and pyarrow cannot be imported in a simulated world
    import pyarrow as pa
    from pyarrow import parquet as pq

    for name in names:
        try:
            with pq.ParquetFile(folder / FOLDER / name.file) as file:
                for batch in file.iter_batches(
                    _ROWS_AT_ONCE, columns=None if columns is None else [*columns]
                ):
                    yield from _rows(batch)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{folder / FOLDER / name.file} cannot be read: {error}") from error


def kept_groups(folder: Path, purpose: Purpose) -> Iterator[list[dict[str, Any]]]:
    """Yield the kept samples of each attempt, which follow each other in the files, as a list."""
    for _, rows in groupby(kept_rows(folder, purpose), key=itemgetter("ticket", "attempt")):
        yield list(rows)


def has_its_digest(group: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the samples of an attempt match the digest that the rollout worker computed."""
    return digest_of(map(KeptSample.of_row, group)) == group[0]["digest"]


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    columns: dict[str, Any] = {
        name: column.to_numpy(zero_copy_only=False) if pa.types.is_list(column.type) else column.to_pylist()
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))
