"""The kept samples of a run: find trajectories by what is known of them, and read what was kept.

A row is one trajectory, as a plain dict; `docs/samples.md` lists its fields. The store joins what the rollout
worker kept with what the trainer computed, and says what became of the trajectory. It reads while the run's
sample writer adds segments and merges them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import numpy as np

from stretto.bus.messages.tickets import Purpose
from stretto.errors import ConfigError
from stretto.records.files import open_record
from stretto.records.kept.sample_files import (
    FOLDER,
    SegmentKind,
    SegmentName,
    Table,
    schema_of,
    segments_in,
    with_columns,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bounds = tuple[float | None, float | None]
"""Lowest and highest value, both included; None for no bound."""
SampleOutcome = Literal["trained", "filtered", "expired", "failed", "evaluated", "pending"]

CHEAP_COLUMNS = (
    *(
        "id",
        "purpose",
        "ticket",
        "attempt",
        "index",
        "sample",
        "row",
        "sequence",
        "outcome",
        "reason",
        "step",
    ),
    *("reward", "metrics", "finish", "length", "sampled", "oldest", "newest", "staleness"),
    *("worker", "engine", "seconds", "generate_s", "score_s", "digest", "images"),
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
"""Columns by which rows can be ordered."""

_INDEX = (
    *("id", "purpose", "ticket", "sequence", "outcome", "reward", "finish", "length", "sampled"),
    *("oldest", "newest", "worker", "engine", "seconds"),
)
"""Columns of `samples` segments that are read for all rows of a store."""
_OPEN_TRIES = 20
"""The writer replaces segments while a reader opens them; it merges some every few seconds."""


class SampleFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows to find: those that fit every given condition."""

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
    """The rollout worker, or the inference worker that sampled the last token."""
    text: str | None = None
    """A text that the prompt or the answer contains, whatever the case of its letters."""


class SampleStore:
    """The kept samples in a run's folder. Several calls share what was read; not for several threads."""

    columns = (*CHEAP_COLUMNS, *TEXT_COLUMNS, *TOKEN_COLUMNS)
    """All fields of a row."""

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self._kinds: dict[SegmentKind, _SegmentReader] = {
            kind: _SegmentReader(folder / FOLDER, kind) for kind in ("samples", "trained", "retired")
        }
        self._index: tuple[object, _Index] | None = None
        """The segments of the index, and the index of all rows."""

    def find(
        self,
        filter: SampleFilter = SampleFilter(),  # noqa: B008 (frozen)
        *,
        limit: int | None = 50,
        offset: int = 0,
        order: str = "sequence",
        texts: bool = True,
        tokens: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the rows that fit, in order.

        Args:
            limit: most rows to return; None for all.
            offset: number of rows to leave out before the first one.
            order: one of `ORDERS`; with `-` before it, highest first. Rows without the value come last.
            texts: also read the fields of `TEXT_COLUMNS`.
            tokens: also read those of `TOKEN_COLUMNS`.
        """
        index = self._read_index(filter.ticket)
        found = index.ordered(index.select(filter), order)
        if filter.text is not None:
            rows = self._containing(index, found, filter.text)
            found = np.fromiter(islice(rows, offset, None if limit is None else offset + limit), np.int64)
        else:
            found = found[offset : None if limit is None else offset + limit]
        return self._rows(index, found, texts=texts, tokens=tokens)

    def count(self, filter: SampleFilter = SampleFilter()) -> int:  # noqa: B008 (frozen)
        """Return the number of rows that fit."""
        index = self._read_index(filter.ticket)
        found = index.select(filter)
        if filter.text is None:
            return len(found)
        return sum(1 for _ in self._containing(index, found, filter.text))

    def points(
        self,
        filter: SampleFilter = SampleFilter(),  # noqa: B008 (frozen)
        *,
        most: int = 2000,
    ) -> tuple[list[tuple[str, float, int]], int]:
        """Return (id, reward, number of sampled tokens) of rows that fit and have a reward, in the order of
        the log, and the number of all such rows. If these are more than `most`, rows at equal distances are
        returned."""
        index = self._read_index(filter.ticket)
        found = index.select(filter)
        if filter.text is not None:
            found = np.fromiter(self._containing(index, found, filter.text), np.int64)
        return index.points(found, most)

    def tickets(
        self,
        filter: SampleFilter = SampleFilter(),  # noqa: B008 (frozen)
        *,
        limit: int = 50,
        offset: int = 0,
    ) -> list[tuple[Purpose, int]]:
        """Return the tickets that have a row which fits, the one with the newest such row first.

        Args:
            offset: number of tickets to leave out before the first one.
        """
        index = self._read_index(filter.ticket)
        found = index.ordered(index.select(filter), "-sequence")
        rows = found.tolist() if filter.text is None else self._containing(index, found, filter.text)
        return list(islice(index.tickets(rows), offset, offset + limit))

    def ticket(self, number: int, purpose: Purpose = "train") -> list[dict[str, Any]]:
        """Return all rows of one ticket, with texts and tokens: of every attempt, in the order of the log."""
        return self.find(SampleFilter(ticket=number, purpose=purpose), limit=None, tokens=True)

    def staleness(self) -> dict[int, int]:
        """Return staleness -> number of trained trajectories, the lowest first."""
        return self._read_index(None).staleness()

    # ------------------------------------------------------------------------------------ private

    def _read_index(self, ticket: int | None) -> _Index:
        """Return the index of all rows, or of all parts that may have rows of a ticket."""
        segments = tuple(kind.refresh() for kind in self._kinds.values())
        if self._index is not None and self._index[0] == segments:
            return self._index[1]
        samples, trained, retired = self._kinds.values()
        index = _Index(
            samples.table(_INDEX, ticket),
            trained.table(("id", "ticket", "step"), ticket),
            retired.table(("ticket", "outcome", "reason"), ticket),
        )
        if ticket is None:
            self._index = segments, index
        return index

    def _containing(self, index: _Index, found: NDArray[np.int64], text: str) -> Iterator[int]:
        """Yield those of the found rows whose prompt or answer contains a text, in their order. It reads no
        further than the caller asks."""
        pc = _compute()
        known: dict[int, NDArray[np.bool_]] = {}
        samples = self._kinds["samples"]
        for row, part in zip(found.tolist(), index.parts[found].tolist(), strict=True):
            if part not in known:
                table = samples.read(part, ("prompt_text", "text"))
                found_in = [
                    _bools(pc.match_substring(table[name], text, ignore_case=True))
                    for name in table.column_names
                ]
                known[part] = np.logical_or(*found_in)
            if known[part][index.offsets[row]]:
                yield row

    def _rows(
        self, index: _Index, found: NDArray[np.int64], *, texts: bool, tokens: bool
    ) -> list[dict[str, Any]]:
        names = [name for name in CHEAP_COLUMNS if name not in ("step", "staleness")]
        names += TEXT_COLUMNS if texts else ()
        names += TOKEN_COLUMNS[:6] if tokens else ()
        rows = self._kinds["samples"].take(index.parts[found], index.offsets[found], names)
        trained_at = index.trained_at[found]
        computed = self._computed(index, trained_at) if tokens else {}
        for number, place, row in zip(found, trained_at, rows, strict=True):
            row |= index.judgement(number, row)
            row["metrics"] = _from_json(row["metrics"], {})
            row["images"] = _from_json(row["images"], None)
            if texts:
                row["messages"] = _from_json(row["messages"], None)
                row["dataset_row"] = _from_json(row["dataset_row"], None)
            if tokens:
                row |= _spread(computed.get(int(place)), row["loss_mask"])
        return [{name: row[name] for name in self.columns if name in row} for row in rows]

    def _computed(self, index: _Index, trained_at: NDArray[np.int64]) -> dict[int, dict[str, Any]]:
        """Return what trainers computed, by the row of the index of `trained` segments."""
        places = np.unique(trained_at[trained_at >= 0])
        parts, offsets = index.trained_parts[places], index.trained_offsets[places]
        rows = self._kinds["trained"].take(parts, offsets, TOKEN_COLUMNS[6:])
        return dict(zip(places.tolist(), rows, strict=True))


def open_samples(folder: Path) -> SampleStore:
    """Return the samples of the run in `folder`."""
    if not (folder / FOLDER).is_dir():
        raise ConfigError(
            f"{folder} holds no samples: it is no run, it samples nothing, or it has `samples.keep: none`"
        )
    return SampleStore(folder)


class _SegmentReader:
    """The segments of one kind. They stay open: a merge may remove their files."""

    def __init__(self, folder: Path, kind: SegmentKind) -> None:
        self._folder = folder
        self._kind: SegmentKind = kind
        self._open: dict[SegmentName, Any] = {}
        self._tables: dict[SegmentName, Table] = {}
        self._parts: list[tuple[SegmentName, int]] = []
        """All row groups, each by its segment and its number there."""

    def refresh(self) -> tuple[SegmentName, ...]:
        """Open the segments that are new, and return all that count."""
        from pyarrow import ArrowException
        from pyarrow import parquet as pq

        for _ in range(_OPEN_TRIES):
            names = segments_in(self._folder, self._kind)
            try:
                for name in names:
                    if name not in self._open:
                        open_record(self._folder / name.file).close()  # pyarrow would wait at a pipe
                self._open = {
                    name: self._open.get(name) or pq.ParquetFile(self._folder / name.file, memory_map=True)
                    for name in names
                }
            except FileNotFoundError:
                continue  # it was merged just now
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
        kept = schema_of(self._kind)
        empty = pa.Table.from_batches([], schema=pa.schema([kept.field(name) for name in columns]))
        table = pa.concat_tables([empty, *tables])
        return table.append_column("part", _numbers(numbers)).append_column("offset", _numbers(offsets))

    def _may_have(self, part: int, ticket: int) -> bool:
        """Whether a row group may have rows of a ticket, by its statistics."""
        name, _ = self._parts[part]
        column = self._open[name].metadata.schema.names.index("ticket")
        statistics = self._metadata(part).column(column).statistics
        return statistics is None or statistics.min <= ticket <= statistics.max

    def _metadata(self, part: int) -> Any:
        name, group = self._parts[part]
        return self._open[name].metadata.row_group(group)

    def read(self, part: int, columns: Sequence[str]) -> Table:
        """Return these columns of one row group."""
        name, group = self._parts[part]
        table = self._open[name].read_row_group(group, list(columns))
        return with_columns(self._kind, table, columns)

    def take(
        self, parts: NDArray[np.int64], offsets: NDArray[np.int64], columns: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return rows as dicts, in the given order."""
        rows: list[dict[str, Any]] = [{}] * len(parts)
        for part in np.unique(parts).tolist():
            [wanted] = np.nonzero(parts == part)
            found = self.read(part, columns).take(_numbers(offsets[wanted])).to_pylist()
            for number, row in zip(wanted, found, strict=True):
                rows[number] = row
        return rows


class _Index:
    """What conditions need of all rows, and what became of each."""

    def __init__(self, samples: Table, trained: Table, retired: Table) -> None:
        pc = _compute()
        self._samples = samples
        self.parts = _ints(samples["part"])
        self.offsets = _ints(samples["offset"])
        self.trained_parts = _ints(trained["part"])
        self.trained_offsets = _ints(trained["offset"])
        # A step may be trained again after a restart. Its last record counts, so look from the end.
        at = np.full(len(samples), -1)
        if len(trained):
            latest = pc.take(trained["id"], _numbers(np.arange(len(trained))[::-1]))
            at = np.nan_to_num(_floats(pc.index_in(samples["id"], value_set=latest)), nan=-1).astype(np.int64)
        self.trained_at = np.where(at >= 0, len(trained) - 1 - at, -1)
        """For each row, its row of `trained`; -1 if it was not trained."""
        is_eval = _equal(samples["purpose"], "eval")
        newest = _floats(samples["newest"])
        steps = np.append(_floats(trained["step"]), np.nan)[self.trained_at]
        done = _equal(samples["outcome"], "done")
        self._step = np.where(is_eval & done, newest, steps)
        self._staleness = np.where(is_eval, np.nan, steps - 1 - _floats(samples["oldest"]))
        self._outcome, self._reasons = _outcomes(samples, trained, retired, self.trained_at, is_eval)

    def select(self, filter: SampleFilter) -> NDArray[np.int64]:
        """Return the rows that fit all conditions but that on the text."""
        samples = self._samples
        fits = np.ones(len(samples), bool)
        for name in ("ticket", "purpose", "finish"):
            if (value := getattr(filter, name)) is not None:
                fits &= _equal(samples[name], value)
        if filter.outcome is not None:
            fits &= self._outcome == filter.outcome
        if filter.worker is not None:
            fits &= _equal(samples["worker"], filter.worker) | _equal(samples["engine"], filter.worker)
        for name in ("step", "reward", "length", "staleness"):
            low, high = cast("Bounds", getattr(filter, name))
            if (low, high) != (None, None):
                values = self._values(name)
                fits &= ~np.isnan(values)
                fits &= (values >= (-np.inf if low is None else low)) & (
                    values <= (np.inf if high is None else high)
                )
        return np.flatnonzero(fits)

    def tickets(self, rows: Iterable[int]) -> Iterator[tuple[Purpose, int]]:
        """Yield purpose and ticket of rows, each ticket once. It asks for no more rows than it needs."""
        numbers, is_eval = _ints(self._samples["ticket"]), _equal(self._samples["purpose"], "eval")
        seen: set[tuple[Purpose, int]] = set()
        for row in rows:
            ticket: tuple[Purpose, int] = ("eval" if is_eval[row] else "train", int(numbers[row]))
            if ticket not in seen:
                seen.add(ticket)
                yield ticket

    def points(self, rows: NDArray[np.int64], most: int) -> tuple[list[tuple[str, float, int]], int]:
        """See `SampleStore.points`."""
        rewards = _floats(self._samples["reward"])
        rows = np.sort(rows[~np.isnan(rewards[rows])])
        shown = rows[:: max(1, -(-len(rows) // most))]
        ids = self._samples["id"].take(_numbers(shown)).to_pylist()
        sampled = _ints(self._samples["sampled"])[shown]
        return list(zip(ids, rewards[shown].tolist(), sampled.tolist(), strict=True)), len(rows)

    def ordered(self, found: NDArray[np.int64], order: str) -> NDArray[np.int64]:
        """Return rows in an order (see `SampleStore.find`); equal ones in the order of the log."""
        name = order.removeprefix("-")
        if name not in ORDERS:
            raise ConfigError(f"samples cannot be ordered by {order!r}; expected one of {', '.join(ORDERS)}")
        values = self._values(name)[found]
        return found[np.lexsort((found, -values if order.startswith("-") else values))]  # NaN is last

    def staleness(self) -> dict[int, int]:
        """Return staleness -> number of trained trajectories, the lowest first."""
        values, counts = np.unique(self._staleness[~np.isnan(self._staleness)], return_counts=True)
        return dict(zip(values.astype(int).tolist(), counts.tolist(), strict=True))

    def judgement(self, row: int, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return what became of a row."""
        step, staleness = self._step[row], self._staleness[row]
        return {
            "outcome": str(self._outcome[row]),
            "reason": kept["reason"]
            or self._reasons.get(kept["ticket"] if kept["purpose"] == "train" else -1)
            if self._outcome[row] != "trained"
            else None,
            "step": None if np.isnan(step) else int(step),
            "staleness": None if np.isnan(staleness) else int(staleness),
        }

    def _values(self, name: str) -> NDArray[np.float64]:
        if name == "step":
            return self._step
        return self._staleness if name == "staleness" else _floats(self._samples[name])


def _outcomes(
    samples: Table,
    trained: Table,
    retired: Table,
    trained_at: NDArray[np.int64],
    is_eval: NDArray[np.bool_],
) -> tuple[NDArray[np.str_], dict[int, str]]:
    """Return what became of each row, and the reasons of tickets that were retired."""
    tickets = _ints(samples["ticket"])
    outcome = np.asarray(samples["outcome"].to_pylist() or [""], "U9")[: len(samples)]
    done = outcome == "done"
    outcome[done] = "pending"
    outcome[done & is_eval] = "evaluated"
    accounts = {row["ticket"]: row for row in retired.to_pylist()}  # the last one counts
    reasons = {ticket: row["reason"] for ticket, row in accounts.items()}
    open_rows = np.flatnonzero(done & ~is_eval & (trained_at < 0))
    other_attempt = np.isin(tickets[open_rows], np.unique(_ints(trained["ticket"])))
    outcome[open_rows[other_attempt]] = "expired"
    for row in open_rows[np.isin(tickets[open_rows], list(accounts))].tolist():
        outcome[row] = accounts[int(tickets[row])]["outcome"]
    outcome[trained_at >= 0] = "trained"
    return outcome, reasons


def _compute() -> Any:
    """Return pyarrow's functions of columns, which it defines only when it is imported."""
    from pyarrow import compute

    return compute


# Where pandas is installed, pyarrow imports it, for half a second, as soon as it converts a Python value, or
# a column to numpy in the usual way. The functions below hand over memory instead.


def _array(kind: Any, *buffers: NDArray[Any]) -> Any:
    """Return a pyarrow array of numbers, or of one text, from the buffers that it consists of."""
    import pyarrow as pa

    length = len(buffers[0]) if len(buffers) == 1 else 1
    return pa.Array.from_buffers(
        kind, length, [None, *(pa.py_buffer(np.ascontiguousarray(each)) for each in buffers)]
    )


def _numbers(values: NDArray[np.int64]) -> Any:
    import pyarrow as pa

    return _array(pa.int64(), values)


def _equal(column: Any, value: str | int) -> NDArray[np.bool_]:
    """Return which rows of a column have a value; a row without one does not."""
    import pyarrow as pa

    if isinstance(value, int):
        wanted = _numbers(np.array([value]))
    else:
        text = np.frombuffer(value.encode(), np.uint8)
        wanted = _array(pa.string(), np.array([0, len(text)], np.int32), text)
    return _bools(_compute().is_in(column, value_set=wanted))


def _bools(column: Any) -> NDArray[np.bool_]:
    """Return a column of truths; False where it has none."""
    return np.nan_to_num(_floats(column)).astype(np.bool_)


def _ints(column: Any) -> NDArray[np.int64]:
    """Return a column of integers that has a value in every row."""
    return _joined(column, np.int64)


def _floats(column: Any) -> NDArray[np.float64]:
    """Return a column of numbers; NaN where it has none."""
    import pyarrow as pa

    missing = _array(pa.float64(), np.array([np.nan]))[0]
    return _joined(_compute().fill_null(column.cast(pa.float64()), missing), np.float64)


def _joined(column: Any, kind: type[np.generic]) -> NDArray[Any]:
    """Return a column of numbers that has a value in every row."""
    return np.concatenate([np.empty(0, kind), *(np.from_dlpack(chunk) for chunk in column.chunks)])


def _from_json(text: str | None, missing: Any) -> Any:
    return msgspec.json.decode(text) if text else missing


def _spread(computed: Mapping[str, Any] | None, loss_mask: Iterable[bool] | None) -> dict[str, Any]:
    """Return what the trainer computed with one value for each token: None for tokens that the policy did not
    sample, and None in place of the whole list for a row that was not trained."""
    if computed is None or loss_mask is None:
        return {"advantages": None, "importance_weights": None}
    mask = list(loss_mask)
    return {name: _spread_over(mask, values) for name, values in computed.items()}


def _spread_over(mask: Sequence[bool], values: Sequence[float] | None) -> list[float | None] | None:
    if not values:
        return None
    each = iter([*values] * sum(mask) if len(values) == 1 else values)
    return [next(each) if sampled else None for sampled in mask]
