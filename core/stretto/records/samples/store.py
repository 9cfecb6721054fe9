"""The kept samples of a run: find trajectories by their fields, and read them.

A row is one trajectory, as a plain dict; `docs/samples.md` lists its fields. A row appears when
the trajectory's outcome is known. The store reads while the run's sample writer adds segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.bus.messages.tickets import Purpose
from stretto.errors import ConfigError
from stretto.records.files import open_record
from stretto.records.samples.files import FOLDER, SegmentName, Table, schema, segments_in

Bounds = tuple[float | None, float | None]
"""Lowest and highest value, both included; None for no bound."""
SampleOutcome = Literal["trained", "filtered", "expired", "failed", "evaluated"]

CHEAP_COLUMNS = (
    *("id", "purpose", "ticket", "attempt", "index", "sample", "row", "sequence"),
    *("outcome", "reason", "step"),
    *("reward", "metrics", "finish", "length", "sampled", "oldest", "newest", "staleness"),
    *("source", "variant", "worker", "engine", "seconds", "generate_s", "score_s", "digest", "images"),
)
"""Fields that every row has."""
TEXT_COLUMNS = ("prompt_text", "text", "messages", "dataset_row")
"""Fields that rows have with `texts=True`."""
TOKEN_COLUMNS = (
    *("tokens", "loss_mask", "logprobs", "versions", "kept_counts", "kept_ids"),
    *("advantages", "importance_weights"),
)
"""Fields that rows have with `tokens=True`."""
ORDERS = ("sequence", "reward", "length", "staleness", "step", "ticket", "seconds")
_JSON = {"metrics", "images", "messages", "dataset_row"}
"""Fields that a segment stores as JSON."""

_INDEX = (
    *("purpose", "ticket", "sequence", "outcome", "step", "reward", "finish", "length", "sampled"),
    *("staleness", "source", "variant", "worker", "engine", "seconds"),
)
"""Fields that are read for all rows of a store, to select and order rows."""
_OPEN_TRIES = 20
"""Number of tries to open all files: the writer may join them to a segment meanwhile."""


class SampleFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows to find: rows that fit every condition that is set."""

    ticket: int | None = None
    purpose: Purpose | None = None
    step: Bounds = (None, None)
    """The train step, numbered as in `metrics.jsonl`; for an evaluation, the version."""
    reward: Bounds = (None, None)
    length: Bounds = (None, None)
    staleness: Bounds = (None, None)
    finish: str | None = None
    outcome: SampleOutcome | None = None
    worker: str | None = None
    """The rollout worker, or the inference worker of the last token."""
    source: str | None = None
    """Name of the dataset's part."""
    variant: str | None = None
    text: str | None = None
    """A text that the prompt or the answer contains, whatever the case of its letters."""


_EVERY = SampleFilter()


class SampleStore:
    """The kept samples in a run's folder. Several calls share the data read; not thread-safe."""

    columns = (*CHEAP_COLUMNS, *TEXT_COLUMNS, *TOKEN_COLUMNS)

    def __init__(self, folder: Path | str) -> None:
        self._segments = _SegmentReader(Path(folder) / FOLDER)
        self._index: tuple[object, _Index] | None = None

    def find(
        self,
        filter: SampleFilter = _EVERY,
        *,
        limit: int | None = 50,
        offset: int = 0,
        order: str = "sequence",
        texts: bool = True,
        tokens: bool = False,
    ) -> list[dict[str, Any]]:
        """Return at most `limit` fitting rows, in order from `offset` on. `order` is one of `ORDERS`; `-`
        before it means highest first, and rows without the value come last.

        `texts` and `tokens` also read `TEXT_COLUMNS` and `TOKEN_COLUMNS`.
        """
        index, matches = self._find(filter, order)
        rows = islice(matches, offset, None if limit is None else offset + limit)
        return self._rows(index, np.fromiter(rows, np.int64), texts=texts, tokens=tokens)

    def count(self, filter: SampleFilter = _EVERY) -> int:
        """Return the number of rows that fit."""
        return sum(1 for _ in self._find(filter)[1])

    def points(
        self, filter: SampleFilter = _EVERY, *, most: int = 2000
    ) -> tuple[list[tuple[str, float, int]], int]:
        """Return (id, reward, sampled tokens) of fitting rows with a reward, in the log's order, and their
        number. If there are more than `most`, return only rows at equal distances."""
        index, rows = self._find(filter, "sequence")
        fitting, rewards = np.fromiter(rows, np.int64), index.values("reward")
        fitting = fitting[~np.isnan(rewards[fitting])]
        shown = fitting[:: max(1, -(-len(fitting) // most))]
        points = self._segments.rows_at(index.parts[shown], index.offsets[shown], ("id", "reward", "sampled"))
        return [(point["id"], point["reward"], point["sampled"]) for point in points], len(fitting)

    def tickets(
        self, filter: SampleFilter = _EVERY, *, limit: int = 50, offset: int = 0
    ) -> list[tuple[Purpose, int]]:
        """Return tickets with fitting rows, from `offset` on; the ticket with the newest such row first."""
        index, rows = self._find(filter, "-sequence")
        return list(islice(index.tickets(rows), offset, offset + limit))

    def ticket(self, number: int, purpose: Purpose = "train") -> list[dict[str, Any]]:
        """Return all rows of one ticket, with texts and tokens: of every attempt, in the order of the log."""
        return self.find(SampleFilter(ticket=number, purpose=purpose), limit=None, tokens=True)

    def staleness(self) -> dict[int, int]:
        """Return staleness -> number of trained trajectories, the lowest first."""
        return self._read_index(None).staleness()

    def _read_index(self, ticket: int | None) -> _Index:
        segments = self._segments.refresh()
        if self._index is not None and self._index[0] == segments:
            return self._index[1]
        index = _Index(self._segments.table(_INDEX, ticket))
        if ticket is None:
            self._index = segments, index
        return index

    def _find(self, filter: SampleFilter, order: str = "") -> tuple[_Index, Iterable[int]]:
        index = self._read_index(filter.ticket)
        rows = index.select(filter)
        rows = index.ordered(rows, order) if order else rows
        return index, rows.tolist() if filter.text is None else self._containing(index, rows, filter.text)

    def _containing(self, index: _Index, found: NDArray[np.int64], text: str) -> Iterator[int]:
        """Yield found rows that contain a text; read parts only as the caller asks for more rows."""
        pc = _compute()
        contains: dict[int, NDArray[np.bool_]] = {}
        for row, part in zip(found.tolist(), index.parts[found].tolist(), strict=True):
            if part not in contains:
                table = self._segments.read(part, ("prompt_text", "text"))
                matches = (pc.match_substring(column, text, ignore_case=True) for column in table.columns)
                contains[part] = np.logical_or(*map(_bools, matches))
            if contains[part][index.offsets[row]]:
                yield row

    def _rows(
        self, index: _Index, found: NDArray[np.int64], *, texts: bool, tokens: bool
    ) -> list[dict[str, Any]]:
        names = [*CHEAP_COLUMNS, *(TEXT_COLUMNS if texts else ()), *(TOKEN_COLUMNS if tokens else ())]
        rows = self._segments.rows_at(index.parts[found], index.offsets[found], names)
        for row in rows:
            for name in _JSON & row.keys():
                row[name] = msgspec.json.decode(row[name]) if row[name] else None
            if tokens:
                for name in ("advantages", "importance_weights"):
                    row[name] = _spread(row["loss_mask"], row[name])
        return [{name: row[name] for name in self.columns if name in row} for row in rows]


def open_samples(folder: Path) -> SampleStore:
    """Return the samples of the run in `folder`."""
    if not (folder / FOLDER).is_dir():
        raise ConfigError(
            f"{folder} holds no samples: it is no run, it samples nothing, or it has `samples.keep: none`"
        )
    return SampleStore(folder)


class _SegmentReader:
    """The segments of a run. They stay open: the writer may remove their files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[SegmentName, Any] = {}
        self._tables: dict[SegmentName, Table] = {}
        self._parts: list[tuple[SegmentName, int]] = []
        """All row groups, each by its segment and its number there."""

    def refresh(self) -> tuple[SegmentName, ...]:
        from pyarrow import ArrowException
        from pyarrow import parquet as pq

        for _ in range(_OPEN_TRIES):
            names = segments_in(self._folder)
            try:
                for name in names:
                    if name not in self._open:
                        open_record(self._folder / name.file).close()  # pyarrow would wait at a pipe
                self._open = {
                    name: self._open.get(name) or pq.ParquetFile(self._folder / name.file, memory_map=True)
                    for name in names
                }
            except FileNotFoundError:
                continue  # a file is part of a segment now: list again
            except (ArrowException, OSError) as error:
                raise ConfigError(f"{self._folder}: a segment of samples cannot be read: {error}") from error
            self._tables = {name: table for name, table in self._tables.items() if name in self._open}
            self._parts = [
                (name, group) for name, file in self._open.items() for group in range(file.num_row_groups)
            ]
            return tuple(names)
        raise ConfigError(f"{self._folder}: the segments of samples change faster than they can be opened")

    def table(self, columns: Sequence[str], ticket: int | None) -> Table:
        """Return these columns of all rows, or of all row groups that may have a ticket, with the number of
        each row's row group (`part`) and its place there (`offset`)."""
        import pyarrow as pa

        columns = list(columns)
        parts = [part for part in range(len(self._parts)) if ticket is None or self._may_have(part, ticket)]
        if ticket is not None:
            tables = [self.read(part, columns) for part in parts]
        else:
            for name in self._open.keys() - self._tables.keys():
                self._tables[name] = self._open[name].read(columns)
            tables = [self._tables[name] for name in self._open]
        sizes = [self._metadata(part).num_rows for part in parts]
        numbers = np.repeat(parts, sizes).astype(np.int64)
        offsets = np.concatenate([np.arange(size) for size in (0, *sizes)]).astype(np.int64)
        empty = pa.Table.from_batches([], schema=pa.schema([schema().field(name) for name in columns]))
        table = pa.concat_tables([empty, *tables], promote_options="default")  # old segments lack columns
        return table.append_column("part", _numbers(numbers)).append_column("offset", _numbers(offsets))

    def _may_have(self, part: int, ticket: int) -> bool:
        name, _ = self._parts[part]
        column = self._open[name].metadata.schema.names.index("ticket")
        statistics = self._metadata(part).column(column).statistics
        return statistics is None or statistics.min <= ticket <= statistics.max

    def _metadata(self, part: int) -> Any:
        name, group = self._parts[part]
        return self._open[name].metadata.row_group(group)

    def read(self, part: int, columns: Sequence[str]) -> Table:
        name, group = self._parts[part]
        return self._open[name].read_row_group(group, list(columns))

    def rows_at(
        self, parts: NDArray[np.int64], offsets: NDArray[np.int64], columns: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return row `offsets[i]` of part `parts[i]` for each i. Each part, a row group, is read once."""
        rows: list[dict[str, Any]] = [{}] * len(parts)
        for part in np.unique(parts).tolist():
            [positions] = np.nonzero(parts == part)
            part_rows = self.read(part, columns).take(_numbers(offsets[positions])).to_pylist()
            for number, row in zip(positions, part_rows, strict=True):
                rows[number] = row
        return rows


class _Index:
    def __init__(self, samples: Table) -> None:
        self._samples = samples
        self.parts = _ints(samples["part"])
        self.offsets = _ints(samples["offset"])

    def select(self, filter: SampleFilter) -> NDArray[np.int64]:
        samples = self._samples
        fits = np.ones(len(samples), bool)
        for name in ("ticket", "purpose", "finish", "outcome", "source", "variant"):
            if (value := getattr(filter, name)) is not None:
                fits &= _equal(samples[name], value)
        if filter.worker is not None:
            fits &= _equal(samples["worker"], filter.worker) | _equal(samples["engine"], filter.worker)
        for name in ("step", "reward", "length", "staleness"):
            low, high = cast("Bounds", getattr(filter, name))
            if (low, high) != (None, None):
                values = self.values(name)  # NaN fits no bound
                fits &= values >= (-np.inf if low is None else low)
                fits &= values <= (np.inf if high is None else high)
        return np.flatnonzero(fits)

    def tickets(self, rows: Iterable[int]) -> Iterator[tuple[Purpose, int]]:
        """Yield (purpose, ticket), each once, reading no more rows than needed."""
        numbers, is_eval = _ints(self._samples["ticket"]), _equal(self._samples["purpose"], "eval")
        seen: set[tuple[Purpose, int]] = set()
        for row in rows:
            ticket: tuple[Purpose, int] = ("eval" if is_eval[row] else "train", int(numbers[row]))
            if ticket not in seen:
                seen.add(ticket)
                yield ticket

    def ordered(self, found: NDArray[np.int64], order: str) -> NDArray[np.int64]:
        """Return rows in an order (see `SampleStore.find`); rows of equal values in the order of the log."""
        name = order.removeprefix("-")
        if name not in ORDERS:
            raise ConfigError(f"samples cannot be ordered by {order!r}; expected one of {', '.join(ORDERS)}")
        values = self.values(name)[found]
        keys = found, _ints(self._samples["sequence"])[found], -values if order.startswith("-") else values
        return found[np.lexsort(keys)]  # NaN is last

    def staleness(self) -> dict[int, int]:
        values = self.values("staleness")
        values, counts = np.unique(values[~np.isnan(values)], return_counts=True)
        return dict(zip(values.astype(int).tolist(), counts.tolist(), strict=True))

    def values(self, name: str) -> NDArray[np.float64]:
        return _floats(self._samples[name])


def _compute() -> Any:
    """Return pyarrow's module of column functions, which defines them only at its import."""
    from pyarrow import compute

    return compute


# pyarrow's ordinary conversions import pandas, which takes half a second. Pass buffers instead.


def _array(kind: Any, *buffers: NDArray[Any]) -> Any:
    """Return a pyarrow array of numbers, or of one text, from the buffers that it consists of."""
    import pyarrow as pa

    length = len(buffers[0]) if len(buffers) == 1 else 1
    return pa.Array.from_buffers(
        kind, length, [None, *(pa.py_buffer(np.ascontiguousarray(buffer)) for buffer in buffers)]
    )


def _numbers(values: NDArray[np.int64]) -> Any:
    import pyarrow as pa

    return _array(pa.int64(), values)


def _equal(column: Any, value: str | int) -> NDArray[np.bool_]:
    import pyarrow as pa

    if isinstance(value, int):
        wanted = _numbers(np.array([value]))
    else:
        text = np.frombuffer(value.encode(), np.uint8)
        wanted = _array(pa.string(), np.array([0, len(text)], np.int32), text)
    return _bools(_compute().is_in(column, value_set=wanted))


def _bools(column: Any) -> NDArray[np.bool_]:
    """Return a column of booleans; False where a value is missing."""
    return np.nan_to_num(_floats(column)).astype(np.bool_)


def _ints(column: Any) -> NDArray[np.int64]:
    return _joined(column, np.int64)


def _floats(column: Any) -> NDArray[np.float64]:
    """Return a column of numbers; NaN where a value is missing."""
    import pyarrow as pa

    missing = _array(pa.float64(), np.array([np.nan]))[0]
    return _joined(_compute().fill_null(column.cast(pa.float64()), missing), np.float64)


def _joined(column: Any, kind: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *(np.from_dlpack(chunk) for chunk in column.chunks)])


def _spread(mask: Sequence[bool], values: Sequence[float] | None) -> list[float | None] | None:
    """Return a value for each token, None where the policy did not sample; None for a row without figures."""
    if not values:
        return None
    remaining = iter([*values] * sum(mask) if len(values) == 1 else values)
    return [next(remaining) if sampled else None for sampled in mask]
