"""The files below `samples/` in a run's folder: Parquet segments, which a run's sample writer makes.

A segment has a row for each trajectory: the rollout worker's sample, its outcome, and the figures that the
trainer computed for it. There are two kinds of segments, `train-…` and `eval-…`.

The rows of some seconds become a file, `train-00000007-00000007.parquet`. Many files become one segment,
named after its first and last file: `train-00000001-00000064.parquet`. The joined files no longer count.

`images/` has images that workflows added to these trajectories (`images.py`).
"""

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from stretto.bus.messages.tickets import Purpose

Table = Any
"""A `pyarrow.Table`: pyarrow has no types."""
Schema = Any

FOLDER = "samples"

_NAME = re.compile(r"\A(train|eval)-(\d{8})-(\d{8})\.parquet\Z")


class SegmentName(NamedTuple):
    """A segment's file name as its parts."""

    purpose: Purpose
    first: int
    """Number of its first flush, from 1, counted over both kinds."""
    last: int

    @property
    def file(self) -> str:
        """The name of the file."""
        return f"{self.purpose}-{self.first:08}-{self.last:08}.parquet"


def segments_in(folder: Path) -> list[SegmentName]:
    """Return the segments that count, in order by kind."""
    segments: list[SegmentName] = []
    matches = (_NAME.match(path.name) for path in folder.glob("*.parquet"))
    names = (SegmentName(cast("Purpose", each[1]), int(each[2]), int(each[3])) for each in matches if each)
    for name in sorted(names, key=lambda name: (name.purpose, name.first, -name.last)):
        if not segments or name.purpose != segments[-1].purpose or name.last > segments[-1].last:
            segments.append(name)
    return segments


@cache
def schema() -> Schema:
    """Return the columns of a segment. `docs/samples.md` says what they mean."""
    import pyarrow as pa

    text, number, figure = pa.string(), pa.int64(), pa.float64()
    columns: dict[str, Any] = {
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
        "step": number,
        "reward": figure,
        "metrics": text,
        "finish": text,
        "length": pa.int32(),
        "sampled": pa.int32(),
        "oldest": pa.int32(),
        "newest": pa.int32(),
        "staleness": pa.int32(),
        "source": text,
        "variant": text,
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
        # One value for each sampled token; a single value if all are equal. Null without training.
        "advantages": pa.list_(pa.float32()),
        "importance_weights": pa.list_(pa.float32()),
    }
    return pa.schema(list(columns.items()))
