"""What a run has kept of its training: the batches in their order, their digests, and the groups' data.

The journal has the batches and the digests of all steps. The data of a group is in the kept samples; for the
newest groups it may be in the log alone. Both are read from the run's folder, which stays as it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.array import Array
from stretto.bus.messages.tickets import (
    GroupDone,
    GroupFailed,
    StoredImage,
    TrainedRow,
    TrainedRows,
    TrajectoryBundle,
    WireTrajectory,
)
from stretto.bus.messages.training import RowRef
from stretto.cli.audit.audit_records import JournalRecord, read_journal
from stretto.cli.audit.audit_store import StoredRun, open_store
from stretto.component import NonNegativeInt
from stretto.engine import Digest
from stretto.errors import ConfigError, RunError
from stretto.models.images import ImageFile
from stretto.process.replay import Attempt, RecordedBatch, RecordedGroup, rows_of
from stretto.records.kept.kept_sample import KeptSample, digest_of
from stretto.records.kept.sample_files import FOLDER, SegmentKind, schema_of, segments_in, with_columns
from stretto.records.kept.sample_images import SampleImages

_ROWS_AT_ONCE = 512
_LEAST_WEIGHT = float(np.finfo(np.float32).tiny)
"""A weight that was rounded to 0 counts as this one."""


# ------------------------------------------------------------------------------ batches and digests


@dataclass(frozen=True)
class Recording:
    """The batches of a run that are in force, and what their steps led to."""

    batches: Mapping[int, RecordedBatch]
    """Version -> batch, in order and without a gap."""
    digests: Mapping[int, str]
    """Version -> digest of its weights, of complete steps."""
    values: Sequence[tuple[int, int]]
    """(version from which they are in force, number of the values), in order."""
    draws: Mapping[int, int]
    """Ticket -> row of the dataset, of the tickets that a curriculum drew."""
    breaks: Sequence[int] = ()
    """Versions at which a new incarnation began."""

    def values_at(self, version: int) -> int:
        """Return the number of the values with which the batch of a version was made."""
        return next(number for start, number in reversed(self.values) if start <= version)


def read_recording(folder: Path) -> Recording:
    """Read the journal of a run that has ended, or whose kernel is dead."""
    return _recording_of(folder, anyio.run(_read_journal, folder))


@dataclass(frozen=True)
class ReplayJournal:
    """The journal of a replay."""

    digests: Mapping[int, str]
    """Version -> digest of its weights."""
    layouts: Mapping[int, str]
    """Version -> layout in which its batch was trained."""


def read_replayed(folder: Path) -> ReplayJournal:
    """Read the journal of a replay."""
    journal = anyio.run(_read_journal, folder)
    return ReplayJournal(
        {version: digests[0] for (_, version), digests in journal.steps.items()},
        {version: batch.layout for version, batch in journal.history.batches.items()},
    )


async def _read_journal(folder: Path) -> JournalRecord:
    async with open_store(folder) as store:
        return await read_journal(folder, store)


def _recording_of(folder: Path, journal: JournalRecord) -> Recording:
    if journal.unreadable:
        raise RunError(f"{folder}: message {journal.unreadable[0]} of the journal is unreadable")
    history = journal.history
    if not history.batches:
        raise ConfigError(f"the run in {folder} has trained no step: there is nothing to replay")
    versions = sorted(history.batches)
    if versions != list(range(versions[-1] + 1)):
        raise RunError(
            f"{folder}: the journal does not have all batches from version 0 to {versions[-1]}; a part of "
            "the run's store is lost (see summary.json)"
        )
    batches = {version: history.batches[version] for version in versions}
    digests = {
        version + 1: found[0]
        for version, batch in batches.items()
        if (found := journal.steps.get((batch.incarnation, version + 1)))
    }
    incarnations = [batch.incarnation for batch in batches.values()]
    breaks = [version for version in versions[1:] if incarnations[version] != incarnations[version - 1]]
    return Recording(batches, digests, history.values, journal.draws, breaks)


# ------------------------------------------------------------------------------ the data of groups


class KeptGroups:
    """The groups of a run, from its kept samples, and from its log where those lack them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._images = SampleImages(folder)

    def missing(self, batches: Sequence[RecordedBatch]) -> list[int]:
        """Return the versions of those batches whose data the run has not kept."""
        rows = rows_of(batches)
        there = _ids_in_samples(self._folder)
        lost = {attempt for attempt, refs in rows.items() if any(ref.id not in there for ref in refs)}
        if lost:
            lost -= anyio.run(self._in_log, {attempt: rows[attempt] for attempt in lost})
        return [batch.version for batch in batches if lost & rows_of([batch]).keys()]

    async def groups(self, rows: Mapping[Attempt, Sequence[RowRef]]) -> AsyncIterator[RecordedGroup]:
        """See `stretto.process.replay.GroupSource`."""
        left = dict(rows)
        without_images: list[RecordedGroup] = []
        kept = groups_in_samples(self._folder, rows)
        while (group := await anyio.to_thread.run_sync(next, kept, None)) is not None:
            if left.pop((group.ticket, group.attempt), None) is None:
                continue
            images = self._kept_images(group)
            if images.keys() == _added(group):
                yield replace(group, images=images)
            else:
                without_images.append(group)
        if left or without_images:
            async with open_store(self._folder) as store:
                for group in without_images:
                    yield await self._with_images(group, store)
                async for group in _groups_in_log(store, left):
                    if left.pop((group.ticket, group.attempt), None) is not None:
                        yield await self._with_images(group, store)
        if left:
            ticket, attempt = min(left)
            raise RunError(
                f"{self._folder}: the samples of ticket {ticket}, attempt {attempt} are not there any more, "
                "or they differ from their digest"
            )

    def _kept_images(self, group: RecordedGroup) -> dict[str, bytes]:
        files = {name: self._images.read(name) for name in sorted(_added(group))}
        return {name: file for name, file in files.items() if file is not None}

    async def _with_images(self, group: RecordedGroup, store: StoredRun) -> RecordedGroup:
        """Return a group with the images that its workflow added: from kept samples, else from the log."""
        images = self._kept_images(group)
        for name in sorted(_added(group) - images.keys()):
            stored = await store.newest(store.names.log_stream, store.names.image(name), StoredImage)
            if stored is None or ImageFile(stored.file).digest != name:
                raise RunError(
                    f"{self._folder}: image {name} of ticket {group.ticket}, attempt {group.attempt} is "
                    "neither in the kept samples nor in the log"
                )
            images[name] = stored.file
        return replace(group, images=images)

    async def _in_log(self, rows: Mapping[Attempt, Sequence[RowRef]]) -> set[Attempt]:
        async with open_store(self._folder) as store:
            return {(group.ticket, group.attempt) async for group in _groups_in_log(store, rows)}


def _added(group: RecordedGroup) -> set[str]:
    """Return the names of the images that a group's workflow added."""
    return {name for each in group.trajectories for name in each.added_images}


def _ids_in_samples(folder: Path) -> set[str]:
    ids: set[str] = set()
    for table in _tables(folder, "samples", ("id", "purpose")):
        pairs = zip(table["id"].to_pylist(), table["purpose"].to_pylist(), strict=True)
        ids.update(id for id, purpose in pairs if purpose == "train")
    return ids


def groups_in_samples(folder: Path, rows: Mapping[Attempt, Sequence[RowRef]]) -> Iterator[RecordedGroup]:
    """Yield those groups that are complete in the kept samples and have their digest."""
    found: dict[Attempt, list[dict[str, Any]]] = {}
    for table in _tables(folder, "samples", schema_of("samples").names):
        for row in _rows(table):
            attempt = row["ticket"], row["attempt"]
            if row["purpose"] != "train" or attempt not in rows:
                continue
            group = found.setdefault(attempt, [])
            group.append(row)
            if len(group) == len(rows[attempt]):
                del found[attempt]
                if digest_of(map(KeptSample.of_row, group)) == row["digest"]:
                    yield _group_of(attempt, group)


def _group_of(attempt: Attempt, rows: Sequence[Mapping[str, Any]]) -> RecordedGroup:
    first = rows[0]
    return RecordedGroup(
        *attempt,
        row=first["row"],
        worker=first["worker"],
        seconds=first["seconds"],
        generate_s=first["generate_s"],
        score_s=first["score_s"],
        trajectories=tuple(
            WireTrajectory(
                id=row["id"],
                tokens=Array.of(row["tokens"], np.int32),
                loss_mask=Array.of(row["loss_mask"], np.bool_),
                logprobs=Array.of(row["logprobs"], np.float32),
                versions=Array.of(row["versions"], np.int32),
                reward=row["reward"],
                metrics=msgspec.json.decode(row["metrics"], type=dict[str, float]),
                finish=row["finish"],
                engine=row["engine"],
                sample=row["sample"],
                images=_images_of(row["images"]),
                kept_counts=_array_of(row["kept_counts"], np.uint16),
                kept_ids=_array_of(row["kept_ids"], np.int32),
            )
            for row in rows
        ),
        images={},
    )


def _array_of(values: Sequence[int] | None, dtype: type[np.generic]) -> Array | None:
    return None if values is None else Array.of(values, dtype)


def _images_of(text: str | None) -> tuple[str | int, ...] | None:
    """Return `WireTrajectory.images` from the column of that name."""
    return None if text is None else msgspec.json.decode(text, type=tuple[Digest | NonNegativeInt, ...])


async def _groups_in_log(
    store: StoredRun, rows: Mapping[Attempt, Sequence[RowRef]]
) -> AsyncIterator[RecordedGroup]:
    names = store.names
    kinds = {names.trajectories: TrajectoryBundle, names.groups: GroupDone | GroupFailed}
    wanted = {ref.sequence for refs in rows.values() for ref in refs}
    bundles: dict[int, TrajectoryBundle] = {}
    async for message in store.messages(names.log_stream, kinds):
        match message.content:
            case TrajectoryBundle() as bundle if message.sequence in wanted:
                bundles[message.sequence] = bundle
            case GroupDone("train", ticket, attempt) as done if (ticket, attempt) in rows:
                refs = rows[ticket, attempt]
                if all(ref.sequence in bundles for ref in refs):
                    yield RecordedGroup(
                        ticket,
                        attempt,
                        bundles[refs[0].sequence].row,
                        done.worker,
                        done.seconds,
                        done.generate_s,
                        done.score_s,
                        tuple(bundles[ref.sequence].trajectories[ref.index] for ref in refs),
                        images={},
                    )
                for ref in refs:
                    bundles.pop(ref.sequence, None)
            case _:
                pass


# ------------------------------------------------------------------------------ importance weights


@dataclass
class WeightSums:
    """Sums over the importance weights (current / behaviour) of the tokens that one step trained."""

    tokens: int = 0
    total: float = 0.0
    squares: float = 0.0
    kl: float = 0.0
    """Sum of the k3 estimates of KL(behaviour || current), in nats."""
    outside: int = 0
    """Number of weights outside 0.8 to 1.2."""
    sequences: list[float] = field(default_factory=list[float])
    """For each sequence the logarithm of the product of its weights."""

    def add(self, weights: NDArray[np.float32]) -> None:
        """Add the weights of one trajectory."""
        values = np.maximum(weights.astype(np.float64), _LEAST_WEIGHT)
        logs = np.log(values)
        self.tokens += len(values)
        self.total += float(values.sum())
        self.squares += float((values**2).sum())
        self.kl += float((values - 1 - logs).sum())
        self.outside += int(((values < 0.8) | (values > 1.2)).sum())
        self.sequences.append(float(logs.sum()))


def read_weights(folder: Path) -> dict[int, WeightSums]:
    """Return the importance weights of a run's steps, by the number of the step, as far as they are kept."""
    steps: dict[int, WeightSums] = {}
    known: set[tuple[int, str]] = set()

    def add(step: int, id: str, weights: NDArray[np.float32]) -> None:
        if (step, id) not in known and len(weights):
            known.add((step, id))
            steps.setdefault(step, WeightSums()).add(weights)

    for table in _tables(folder, "trained", ("id", "step", "importance_weights")):
        for row in _rows(table):
            add(row["step"], row["id"], row["importance_weights"])
    for version, row in anyio.run(_trained_in_log, folder):
        add(version + 1, row.id, row.importance_weights.numpy().ravel())
    return steps


async def _trained_in_log(folder: Path) -> list[tuple[int, TrainedRow]]:
    async with open_store(folder) as store:
        kinds = {store.names.trained: TrainedRows}
        return [
            (message.content.version, row)
            async for message in store.messages(store.names.log_stream, kinds)
            if isinstance(message.content, TrainedRows)
            for row in message.content.rows
        ]


# ------------------------------------------------------------------------------ files of samples


def _tables(folder: Path, kind: SegmentKind, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of all segments of a kind, some at a time."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    for name in segments_in(folder / FOLDER, kind):
        try:
            with pq.ParquetFile(folder / FOLDER / name.file) as file:
                for batch in file.iter_batches(_ROWS_AT_ONCE, columns=list(columns)):
                    yield with_columns(kind, pa.Table.from_batches([batch]), columns)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{folder / FOLDER / name.file} cannot be read: {error}") from error


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, with lists as arrays."""
    import pyarrow as pa

    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if pa.types.is_list(column.type):
            column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
            values = column.values.to_numpy(zero_copy_only=False)
            offsets, known = column.offsets.to_numpy().tolist(), column.is_valid().to_pylist()
            columns[name] = [
                values[start:stop] if is_known else None
                for start, stop, is_known in zip(offsets[:-1], offsets[1:], known, strict=True)
            ]
        else:
            columns[name] = column.to_pylist()
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))
