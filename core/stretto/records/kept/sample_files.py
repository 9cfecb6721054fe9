"""The files below `samples/` in a run's folder: Parquet segments, which a run's sample writer makes.

There are three kinds, joined by the id of a trajectory or the number of its ticket:

- `samples-…`: a row for each trajectory, as its rollout worker finished it;
- `trained-…`: a row for each trajectory that was trained, with what the trainer computed for it;
- `retired-…`: a row for each ticket that was filtered, expired or failed.

A segment is named after the flushes that it holds, `samples-00000001-00000008.parquet`. It never changes. A
segment whose flushes are all in another one was merged into that one, and does not count any more.

`images/` has the files of the images that workflows added to these trajectories (`sample_images.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

Table = Any
"""A `pyarrow.Table`: pyarrow has no types."""
Schema = Any
"""A `pyarrow.Schema`."""

FOLDER = "samples"
SegmentKind = Literal["samples", "trained", "retired"]

_NAME = re.compile(r"\A(samples|trained|retired)-(\d{8})-(\d{8})\.parquet\Z")


class SegmentName(NamedTuple):
    """A segment's file name as its parts."""

    kind: SegmentKind
    first: int
    """Number of its first flush, from 1."""
    last: int

    @property
    def file(self) -> str:
        """The name of the file."""
        return f"{self.kind}-{self.first:08}-{self.last:08}.parquet"

    @classmethod
    def of(cls, path: Path) -> SegmentName | None:
        """Return the parts of a file's name; None if the file is no segment."""
        found = _NAME.match(path.name)
        return cls(found[1], int(found[2]), int(found[3])) if found else None  # pyright: ignore[reportArgumentType]


def segments_in(folder: Path, kind: SegmentKind) -> list[SegmentName]:
    """Return the segments of a kind that count, in the order of their flushes.

    Args:
        folder: the folder `samples` of a run. It need not exist.
    """
    names = (SegmentName.of(path) for path in folder.glob(f"{kind}-*.parquet"))
    counted: list[SegmentName] = []
    for name in sorted((name for name in names if name), key=lambda name: (name.first, -name.last)):
        if not counted or name.last > counted[-1].last:
            counted.append(name)
    return counted


@cache
def schema_of(kind: SegmentKind) -> Schema:
    """Return the columns of a kind of segment. `docs/samples.md` says what they mean."""
    import pyarrow as pa

    text, number, figure = pa.string(), pa.int64(), pa.float64()
    columns: dict[SegmentKind, dict[str, Any]] = {
        "samples": {
            "id": text,
            "purpose": text,
            "ticket": number,
            "attempt": number,
            "index": pa.int32(),
            "sample": pa.int32(),
            "row": number,
            "sequence": number,
            "outcome": text,
            "reason": text,
            "reward": figure,
            "metrics": text,
            "finish": text,
            "length": pa.int32(),
            "sampled": pa.int32(),
            "oldest": pa.int32(),
            "newest": pa.int32(),
            "worker": text,
            "engine": text,
            "seconds": figure,
            "generate_s": figure,
            "score_s": figure,
            "digest": text,
            "prompt_text": text,
            "text": text,
            "messages": text,
            "dataset_row": text,
            "images": text,
            "tokens": pa.list_(pa.int32()),
            "loss_mask": pa.list_(pa.bool_()),
            "logprobs": pa.list_(pa.float32()),
            "versions": pa.list_(pa.int32()),
            "kept_counts": pa.list_(pa.uint16()),
            "kept_ids": pa.list_(pa.int32()),
        },
        "trained": {
            "id": text,
            "ticket": number,
            "sequence": number,
            "step": number,
            "incarnation": number,
            # One value for each sampled token; a single value if all are equal.
            "advantages": pa.list_(pa.float32()),
            "importance_weights": pa.list_(pa.float32()),
        },
        "retired": {"ticket": number, "sequence": number, "outcome": text, "reason": text},
    }
    return pa.schema(list(columns[kind].items()))


def with_columns(kind: SegmentKind, table: Table, columns: Sequence[str]) -> Table:
    """Return a table that was read from a segment with these columns, in this order. Those that the segment
    lacks, because an older version of stretto wrote it, are null."""
    import pyarrow as pa

    schema = schema_of(kind)
    for name in columns:
        if name not in table.column_names:
            table = table.append_column(schema.field(name), pa.nulls(len(table), schema.field(name).type))
    return table.select(list(columns))
