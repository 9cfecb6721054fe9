"""The rows of the batch under way, in one trainer: read, computed here, or asked of who has them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np

from stretto.algorithm import Call
from stretto.array import Array
from stretto.assembly.dataflow import SOURCE_OPS
from stretto.assembly.placement import Placement
from stretto.bus.messages import AskColumn, Column, RowRef, TrajectoryBundle, WireTrajectory
from stretto.dataset import Dataset
from stretto.errors import ConfigError, Refused
from stretto.models.files import fetched_config
from stretto.models.tokenizer import Tokenizer, load_tokenizer
from stretto.models.vision import Vision, is_vision_language
from stretto.workers.context import WorkerContext

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.rl.batch import Batch

__all__ = ["BatchStore"]

_READS_AT_ONCE = 32
_ANSWER_S = 600.0
"""Deadline for rows from another rank; a rank that dies ends the run long before."""


class BatchStore:
    """What this rank holds of the batch. Rows are named by their place in it.

    Columns that no call of the step wrote come from the log, or are made of the dataset's rows. Columns that
    a call wrote lie with the rank that computed them, which everybody can work out.
    """

    def __init__(self, context: WorkerContext, placement: Placement) -> None:
        self._context = context
        self._placement = placement
        self._source: Call = placement.graph.source
        self._bundles: dict[int, TrajectoryBundle] = {}
        self._refs: tuple[RowRef, ...] = ()
        self._version = -1
        self._lengths: list[int] = []
        self._read: dict[int, Mapping[str, Tensor]] = {}
        """Row -> its columns from the source."""
        self._written: dict[str, dict[int, Tensor]] = {}
        """Key -> row -> its part of the column."""
        self._vision: Vision | None = None
        self._media: dict[int, Mapping[str, Tensor]] = {}
        """Row of the dataset -> what the model reads of its images; the sequences of a group share it."""

    async def open(self) -> None:
        """Be ready for requests of other ranks; where rows or their images are of the dataset, open that."""
        context, model = self._context, self._context.component_context.model
        if model is not None and is_vision_language(await anyio.to_thread.run_sync(fetched_config, model)):
            self._vision = await anyio.to_thread.run_sync(Vision, model)
        if not self._placement.graph.samples or self._vision is not None:
            self._tokenizer: Tokenizer = self._vision.tokenizer if self._vision else load_tokenizer(model)
            self._dataset: Dataset = await anyio.to_thread.run_sync(context.make, "dataset")
            if self._dataset.fingerprint != context.fingerprints["dataset"]:
                raise ConfigError("dataset: its rows here are not those that the kernel has", path="dataset")
        await context.bus.serve(context.subject("column"), AskColumn, self._answer, forget=True)

    # ------------------------------------------------------------------------------- the life of a batch

    async def begin(self, version: int, refs: tuple[RowRef, ...]) -> None:
        """These rows are the batch; nothing changes if they are already."""
        if self._version == version:
            return
        self._version, self._refs = version, refs
        self._read, self._written, self._media = {}, {}, {}
        if not self._placement.graph.samples:  # their lengths are known only now
            await anyio.to_thread.run_sync(self._encode_all)
        self._lengths = [ref.length or len(self._read[row]["tokens"]) for row, ref in enumerate(self._refs)]

    def end(self) -> None:
        """The step is complete."""
        for ref in self._refs:
            self._bundles.pop(ref.sequence, None)
        self._version, self._refs, self._lengths = -1, (), []
        self._read, self._written, self._media = {}, {}, {}

    async def prefetch(self, refs: Sequence[RowRef]) -> None:
        """Read rows of this batch and the next ahead of time."""
        if not self._placement.graph.samples:
            return
        wanted = {ref.sequence for ref in (*refs, *self._refs)}
        for sequence in self._bundles.keys() - wanted:  # announced once, and never trained
            del self._bundles[sequence]
        await self._fetch(refs)

    @property
    def has_images(self) -> bool:
        """Whether the model reads images."""
        return self._vision is not None

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of every row of the batch."""
        return self._lengths

    @property
    def groups(self) -> list[int]:
        """Group of every row of the batch."""
        return [ref.group for ref in self._refs]

    @property
    def trained_tokens(self) -> int:
        """Tokens of the loss mask of the whole batch, where rows are of the dataset: every rank has them."""
        return sum(int(row["loss_mask"].sum()) for row in self._read.values())

    # ------------------------------------------------------------------------------------ columns

    async def batch(self, rows: Sequence[int], keys: Sequence[str], *, media: bool) -> Batch:
        """Rows in this order with all columns of the source, and of those that calls wrote, `keys`.

        Args:
            media: with what the model reads of the rows' images too.
        """
        from stretto.rl.batch import Batch

        await self._read_rows(rows)
        writers = self._placement.graph.writers
        written = [key for key in keys if writers[key].op not in SOURCE_OPS]
        for key in written:
            await self._ask_for(key, rows)
        columns = {key: [self._read[row][key] for row in rows] for key in self._read[rows[0]]}
        columns |= {key: [self._written[key][row] for row in rows] for key in written}
        lengths = [self._lengths[row] for row in rows]
        tokens, sequences = _joined(columns)
        seen = None
        if media and self._vision is not None:
            seen = await anyio.to_thread.run_sync(self._media_of, self._vision, rows)
        return Batch(lengths, tokens, sequences, seen)

    def put(self, key: str, rows: Sequence[int], column: Tensor) -> None:
        """Keep what a call wrote for these rows, end to end: a value for each token, or one for each row."""
        per_token = len(column) == sum(self._lengths[row] for row in rows)
        self._written.setdefault(key, {}).update(self._by_row(rows, column, per_token=per_token))

    def _by_row(self, rows: Sequence[int], column: Tensor, *, per_token: bool) -> dict[int, Tensor]:
        sizes = [self._lengths[row] for row in rows] if per_token else [1] * len(rows)
        parts = column.split(sizes)
        return dict(zip(rows, parts if per_token else [part[0] for part in parts], strict=True))

    async def _ask_for(self, key: str, rows: Sequence[int]) -> None:
        """Ask the owners for the rows of a written column that are not here."""
        missing = [row for row in rows if row not in self._written.setdefault(key, {})]
        if not missing:
            return
        owners = self._placement.owners(key, self._lengths)
        by_owner: dict[str, list[int]] = {}
        for row in missing:
            by_owner.setdefault(owners[row], []).append(row)
        async with anyio.create_task_group() as tasks:
            for owner, theirs in by_owner.items():
                tasks.start_soon(self._ask, owner, key, theirs)

    async def _ask(self, owner: str, key: str, rows: list[int]) -> None:
        import torch

        context = self._context
        column = await context.bus.request(
            context.names.worker("trainer", owner, "column"),
            AskColumn(self._version, key, tuple(rows)),
            Column,
            who=owner,
            deadline_s=_ANSWER_S,
        )
        values = torch.from_numpy(column.values.numpy().copy())
        self._written[key].update(self._by_row(rows, values, per_token=column.per_token))

    async def _answer(self, message: AskColumn) -> Column:
        """Give rows of a column that this rank computed."""
        import torch

        held = self._written.get(message.key, {})
        if message.version != self._version or not all(row in held for row in message.rows):
            raise Refused(self._context.worker, f"has not all rows of {message.key!r} that are asked for")
        parts = [held[row] for row in message.rows]
        per_token = parts[0].dim() > 0
        values = torch.cat(parts) if per_token else torch.stack(parts)
        return Column(Array.of(values.numpy(), values.numpy().dtype), per_token)

    # -------------------------------------------------------------------------------- from the source

    async def _read_rows(self, rows: Sequence[int]) -> None:
        """Have the source's columns of these rows."""
        missing = [row for row in rows if row not in self._read]
        await self._fetch([self._refs[row] for row in missing])
        for row in missing:
            ref = self._refs[row]
            trajectory = self._bundles[ref.sequence].trajectories[ref.index]
            assert ref.id == trajectory.id, "the log does not hold what the ledger says"
            self._read[row] = _of_trajectory(trajectory, ref.group)

    def _media_of(self, vision: Vision, rows: Sequence[int]) -> list[Mapping[str, Tensor]]:
        """What the model reads of the images of these rows."""
        import torch

        places = [self._row_of_dataset(row) for row in rows]
        for place in {*places} - self._media.keys():
            with _of_row(place):
                found = vision.media(self._dataset[place])
            self._media[place] = {name: torch.from_numpy(array) for name, array in found.items()}
        return [self._media[place] for place in places]

    def _row_of_dataset(self, row: int) -> int:
        ref = self._refs[row]
        return self._bundles[ref.sequence].row if self._placement.graph.samples else ref.sequence

    async def _fetch(self, refs: Sequence[RowRef]) -> None:
        """Read what is not there yet from the log."""
        missing = {ref.sequence for ref in refs} - self._bundles.keys()
        limit = anyio.CapacityLimiter(_READS_AT_ONCE)

        async def read(sequence: int) -> None:
            async with limit:
                stream = self._context.names.log_stream
                self._bundles[sequence] = await self._context.bus.read(stream, sequence, TrajectoryBundle)

        async with anyio.create_task_group() as tasks:
            for sequence in missing:
                tasks.start_soon(read, sequence)

    def _encode_all(self) -> None:
        for row, ref in enumerate(self._refs):
            self._read[row] = self._encoded(ref)

    def _encoded(self, ref: RowRef) -> Mapping[str, Tensor]:
        import torch

        assert self._source.encode is not None
        with _of_row(ref.sequence):
            row = self._dataset[ref.sequence]
            tokenizer = self._tokenizer if self._vision is None else self._vision.of(row)
            tokens, mask = self._source.encode(row, ref.index, tokenizer)
        return {
            "tokens": torch.tensor(tokens, dtype=torch.long),
            "loss_mask": torch.tensor(mask, dtype=torch.bool),
            "group": torch.tensor(ref.group),
        }


@contextmanager
def _of_row(place: int) -> Generator[None]:
    """Say of an error which row of the dataset it is about."""
    try:
        yield
    except ConfigError as error:
        message = f"row {place} of the dataset: {error}; once it is mended there, the run can be resumed"
        raise ConfigError(message, path="dataset") from error


def _of_trajectory(trajectory: WireTrajectory, group: int) -> Mapping[str, Tensor]:
    """The keys of `stretto.algorithm.GENERATED` and `SCORED`."""
    import torch

    def column(array: Array, dtype: Any) -> Tensor:
        return torch.from_numpy(array.numpy().astype(dtype))

    return {
        "tokens": column(trajectory.tokens, np.int64),
        "loss_mask": column(trajectory.loss_mask, np.bool_),
        "behaviour_logprobs": column(trajectory.logprobs, np.float32),
        "versions": column(trajectory.versions, np.int64),
        "rewards": torch.tensor(trajectory.reward, dtype=torch.float32),
        "truncated": torch.tensor(trajectory.finish == "length"),
        "group": torch.tensor(group),
        "sample": torch.tensor(trajectory.sample),
    }


def _joined(columns: Mapping[str, list[Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Token columns and sequence columns."""
    import torch

    tokens: dict[str, Tensor] = {}
    sequences: dict[str, Tensor] = {}
    for key, parts in columns.items():
        if parts[0].dim():
            tokens[key] = torch.cat(parts)
        else:
            sequences[key] = torch.stack(parts)
    return tokens, sequences
