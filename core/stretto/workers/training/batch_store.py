"""The rows of the current batch in one trainer: read, computed here, or requested from other trainers."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from stretto.algorithm import Call
from stretto.array import Array
from stretto.assembly.dataflow import SOURCE_OPS
from stretto.assembly.placement import Placement
from stretto.bus.messages.tickets import StoredImage, TrajectoryBundle, WireTrajectory
from stretto.bus.messages.training import AskColumn, Column, RowRef
from stretto.errors import BusError, ConfigError, Refused, together
from stretto.models.files import fetch_config, positions_of, vocabulary_of
from stretto.models.images import ImageFile, decode, images_of
from stretto.models.tokenizer import load_tokenizer
from stretto.models.vision import Vision, is_vision_language
from stretto.rl.supervised import check_ids, cut_to_fit
from stretto.tokenizer import Tokenizer
from stretto.workers.context import WorkerContext

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from stretto.rl.batch import Batch, Drawn

_READS_AT_ONCE = 32
_ANSWER_S = 600.0  # for rows of another rank; a rank that dies ends the run long before

_Images = tuple[str | int, ...]
"""The images of a trajectory, as in `WireTrajectory`."""
_Row = Mapping[str, NDArray[Any] | float | bool]
"""The columns of one row: an array of one value for each token, or one value for the sequence."""
_DTYPES: Mapping[str, type[np.generic]] = {
    "tokens": np.int64,
    "loss_mask": np.bool_,
    "behaviour_logprobs": np.float32,
    "versions": np.int64,
    "rewards": np.float64,
    "truncated": np.bool_,
    "group": np.int64,
    "sample": np.int64,
}
"""The columns of the source: the keys of `stretto.algorithm.GENERATED` and `SCORED`, and the sample."""


@dataclass(frozen=True)
class _Media:
    inputs: Mapping[str, Tensor]
    tokens: int


class BatchStore:
    """The part of the batch that this rank holds; a row's number is its position in the batch. Columns
    that no call writes come from the log or the dataset. A call's column stays at the rank that computed it;
    every rank knows this rank from the placement. With another `path` the rows are those of the held-out
    dataset."""

    def __init__(
        self,
        context: WorkerContext,
        placement: Placement,
        nonces: Mapping[str, str],
        path: Literal["dataset", "evaluation.dataset"] = "dataset",
    ) -> None:
        self._context = context
        self._path = path
        self._verb = "column" if path == "dataset" else "held_out_column"
        self._placement = placement
        self._nonces = nonces
        self._source: Call = placement.graph.source
        self._bundles: dict[int, TrajectoryBundle] = {}
        self._refs: tuple[RowRef, ...] = ()
        self._version = -1
        self.lengths: list[int] = []
        """Number of tokens of every row of the batch."""
        self._source_columns: dict[int, _Row] = {}
        """Row -> the row's columns of the source."""
        self._encoded: dict[int, _Row] = {}
        """Those of held-out rows, once they are encoded; empty for rows of steps."""
        self._joined: tuple[list[int], Batch] | None = None
        """The newest rows that `batch` has joined: the calls of a step often want the same rows."""
        self._call_columns: dict[str, dict[int, Tensor]] = {}
        """Key -> row -> the row's part of the column."""
        self._vision: Vision | None = None
        self._media: dict[tuple[int, _Images | None], _Media] = {}
        """(dataset row, images) -> model inputs; a group shares them unless its workflow added images."""

    async def open(self) -> None:
        """Serve requests of other ranks. Open the dataset if the trainer reads rows or images from it."""
        context, model = self._context, self._context.component_context.model
        rows = context.composed.config.dataset
        if model is not None and is_vision_language(await anyio.to_thread.run_sync(fetch_config, model)):
            self._vision = await anyio.to_thread.run_sync(Vision, model, rows)
        if not self._placement.graph.samples or self._vision is not None:
            self._tokenizer: Tokenizer = (
                self._vision.tokenizer if self._vision else load_tokenizer(model, rows)
            )
            self._positions = await anyio.to_thread.run_sync(positions_of, model)
            self._vocabulary = await anyio.to_thread.run_sync(vocabulary_of, model)
            self._dataset = await context.dataset(self._path)
        await context.bus.serve(context.subject(self._verb), AskColumn, self._answer, forget=True)

    def first_rows(self) -> tuple[RowRef, ...]:
        """Return the places of the sequences of the first `evaluation.rows` rows."""
        evaluation = self._context.composed.config.evaluation
        assert evaluation is not None
        return tuple(
            RowRef(f"held-out/{row}/{index}", row, index, row, 0)
            for row in range(evaluation.first_rows(len(self._dataset)))
            for index in range(self._source.samples)
        )

    # ------------------------------------------------------------------------------- the life of a batch

    async def begin(self, version: int, refs: tuple[RowRef, ...]) -> None:
        """Begin the batch of a version with these rows. Do nothing if it has begun already."""
        if self._version == version:
            return
        self._version, self._refs = version, refs
        self._drop_columns()
        if not self._placement.graph.samples:  # the lengths of a dataset's rows are unknown until encoded
            await anyio.to_thread.run_sync(self._encode_all)
        self.lengths = [
            ref.length or np.size(self._source_columns[row]["tokens"]) for row, ref in enumerate(self._refs)
        ]

    def end(self) -> None:
        for ref in self._refs:
            self._bundles.pop(ref.sequence, None)
        self._version, self._refs, self.lengths = -1, (), []
        self._drop_columns()

    def _drop_columns(self) -> None:
        self._source_columns, self._call_columns, self._media, self._joined = {}, {}, {}, None

    async def prefetch(self, refs: Sequence[RowRef], *, complete: bool) -> None:
        """Read announced rows ahead of time. If `complete`, drop all others except the current batch."""
        if not self._placement.graph.samples:
            return
        if complete:
            needed = {ref.sequence for ref in (*refs, *self._refs)}
            for sequence in self._bundles.keys() - needed:  # announced earlier, but never trained
                del self._bundles[sequence]
        await self._fetch(refs)

    @property
    def has_images(self) -> bool:
        return self._vision is not None

    @property
    def ids(self) -> list[str]:
        """Id of every row of the batch."""
        return [ref.id for ref in self._refs]

    @property
    def groups(self) -> list[int]:
        return [ref.group for ref in self._refs]

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens of the whole batch. Only for rows of the dataset, which every rank has."""
        return sum(int(np.sum(row["loss_mask"])) for row in self._source_columns.values())

    # ------------------------------------------------------------------------------------ columns

    async def batch(
        self, rows: Sequence[int], keys: Sequence[str], *, media: bool, drawn: bool = False
    ) -> Batch:
        """Return these rows in order, with the source's columns and those of calls in `keys`. `media` adds
        model inputs of images; `drawn`, for the sampling model, adds what each token was drawn from."""
        from stretto.rl.batch import Batch

        await self._read_rows(rows)
        writers = self._placement.graph.writers
        call_keys = [key for key in keys if writers[key].op not in SOURCE_OPS]
        for key in call_keys:
            await self._request_missing(key, rows)
        images = None
        if media and self._vision is not None:
            added = await self._fetch_images(rows)
            images = await anyio.to_thread.run_sync(self._media_of, self._vision, rows, added)
        source = self._join_source(rows)
        tokens, sequences = _join({key: [self._call_columns[key][row] for row in rows] for key in call_keys})
        return Batch(
            source.lengths,
            source.tokens | tokens,
            source.sequences | sequences,
            images,
            self._drawn(rows) if drawn else None,
        )

    def _drawn(self, rows: Sequence[int]) -> Drawn | None:
        """Return what tokens were drawn from; None if from the plain softmax(logits / temperature)."""
        from stretto.rl.batch import Drawn

        sampling = self._context.composed.config.sampling
        if not sampling.reshapes or not self._placement.graph.samples:
            return None
        refs = [self._refs[row] for row in rows]
        kept_tokens = [self._bundles[ref.sequence].trajectories[ref.index].kept for ref in refs]
        known_tokens = [tokens for tokens in kept_tokens if tokens is not None]
        if sampling.truncates and len(known_tokens) < len(kept_tokens):
            raise ConfigError(
                "a trajectory of the batch does not say from which tokens it was drawn: the "
                "run began with another `sampling`; resume it with that, or with --expire-batch"
            )
        return Drawn(sampling.logit_bias, known_tokens if sampling.truncates else None)

    def put(self, key: str, rows: Sequence[int], column: Tensor) -> None:
        """Store a call's column for these rows, concatenated: one value per token, or one per row."""
        per_token = len(column) == sum(self.lengths[row] for row in rows)
        self._call_columns.setdefault(key, {}).update(self._by_row(rows, column, per_token=per_token))

    def _by_row(self, rows: Sequence[int], column: Tensor, *, per_token: bool) -> dict[int, Tensor]:
        sizes = [self.lengths[row] for row in rows] if per_token else [1] * len(rows)
        parts = column.split(sizes)
        return dict(zip(rows, parts if per_token else [part[0] for part in parts], strict=True))

    async def _request_missing(self, key: str, rows: Sequence[int]) -> None:
        missing = [row for row in rows if row not in self._call_columns.setdefault(key, {})]
        if not missing:
            return
        owners = self._placement.owners(key, self.lengths, self.groups)
        by_owner: dict[str, list[int]] = {}
        for row in missing:
            by_owner.setdefault(owners[row], []).append(row)
        async with anyio.create_task_group() as tasks:
            for owner, owner_rows in by_owner.items():
                tasks.start_soon(self._ask, owner, key, owner_rows)

    async def _ask(self, owner: str, key: str, rows: list[int]) -> None:
        import torch

        subject = self._context.names.worker("trainer", owner, self._nonces[owner], self._verb)
        asked = AskColumn(self._version, key, tuple(rows))
        column = await self._context.bus.request(subject, asked, Column, deadline_s=_ANSWER_S)
        values = torch.from_numpy(column.values.numpy().copy())
        self._call_columns[key].update(self._by_row(rows, values, per_token=column.per_token))

    async def _answer(self, message: AskColumn) -> Column:
        import torch

        rows = self._call_columns.get(message.key, {})
        if message.version != self._version or not all(row in rows for row in message.rows):
            raise Refused(self._context.worker, f"does not have all requested rows of {message.key!r}")
        parts = [rows[row] for row in message.rows]
        per_token = parts[0].dim() > 0
        values = torch.cat(parts) if per_token else torch.stack(parts)
        return Column(Array.of(values.numpy(), values.numpy().dtype), per_token)

    # -------------------------------------------------------------------------------- from the source

    async def _read_rows(self, rows: Sequence[int]) -> None:
        missing = [row for row in rows if row not in self._source_columns]
        await self._fetch([self._refs[row] for row in missing])
        for row in missing:
            ref = self._refs[row]
            trajectory = self._bundles[ref.sequence].trajectories[ref.index]
            assert ref.id == trajectory.id, "the log and the ledger name different trajectories"
            self._source_columns[row] = {**_columns_of(trajectory), "group": ref.group}

    def _join_source(self, rows: Sequence[int]) -> Batch:
        import torch

        from stretto.rl.batch import Batch

        if self._joined is None or self._joined[0] != list(rows):
            columns = [self._source_columns[row] for row in rows]
            tokens: dict[str, Tensor] = {}
            sequences: dict[str, Tensor] = {}
            for key, first in columns[0].items():
                values = [row[key] for row in columns]
                if isinstance(first, np.ndarray):
                    joined = np.concatenate(values, dtype=_DTYPES[key], casting="unsafe")
                    tokens[key] = torch.from_numpy(joined)
                else:
                    sequences[key] = torch.from_numpy(np.array(values, _DTYPES[key]))
            self._joined = list(rows), Batch([self.lengths[row] for row in rows], tokens, sequences)
        return self._joined[1]

    def _media_of(
        self, vision: Vision, rows: Sequence[int], added: Mapping[str, bytes]
    ) -> list[Mapping[str, Tensor]]:
        """Return model inputs for the rows' images. `added`: digest -> file of images not in the dataset."""
        media: list[Mapping[str, Tensor]] = []
        for row in rows:
            key = place, images = self._images_of(row)
            if key not in self._media:
                with self._name_row(place):
                    self._media[key] = self._read_media(vision, place, images, added)
            tokens = vision.count(np.asarray(self._source_columns[row]["tokens"]))
            if tokens != self._media[key].tokens:
                raise ConfigError(
                    f"{self._refs[row].id} has {tokens} image tokens, and its images make "
                    f"{self._media[key].tokens}; was an image of the row changed?"
                )
            media.append(self._media[key].inputs)
        return media

    def _read_media(
        self, vision: Vision, place: int, images: _Images | None, added: Mapping[str, bytes]
    ) -> _Media:
        import torch

        pixels: list[Image] = []
        if images is None or not all(isinstance(each, str) for each in images):
            pixels = [image.pixels for image in images_of(self._dataset[place])]
        if images is not None:
            if missing := [each for each in images if isinstance(each, int) and each >= len(pixels)]:
                raise ConfigError(f"a sample names its image {missing[0]}, and the row has {len(pixels)}")
            pixels = [decode(added[each]) if isinstance(each, str) else pixels[each] for each in images]
        if not pixels:
            return _Media({}, 0)
        seen = vision.alone(*pixels)
        inputs = {name: torch.from_numpy(array) for name, array in seen.media.items()}
        return _Media(inputs, vision.count(seen.ids))

    def _images_of(self, row: int) -> tuple[int, _Images | None]:
        ref = self._refs[row]
        if not self._placement.graph.samples:
            return ref.sequence, None
        bundle = self._bundles[ref.sequence]
        return bundle.row, bundle.trajectories[ref.index].images

    async def _fetch_images(self, rows: Sequence[int]) -> dict[str, bytes]:
        """Read from the log the images that workflows added to these rows, unless their media are cached."""
        keys = {self._images_of(row) for row in rows} - self._media.keys()
        digests = {each for _, images in keys for each in images or () if isinstance(each, str)}

        async def read(digest: str) -> bytes:
            names = self._context.names
            subject = names.image(digest)
            image = await self._context.bus.store.read_newest(names.log_stream, subject, StoredImage)
            if ImageFile(image.file).digest != digest:
                raise BusError(f"{subject} of {names.log_stream} is another image than its name says")
            return image.file

        return dict(zip(digests, await together(read, digests, _READS_AT_ONCE), strict=True))

    async def _fetch(self, refs: Sequence[RowRef]) -> None:
        missing = {ref.sequence for ref in refs} - self._bundles.keys()
        names, store = self._context.names, self._context.bus.store
        self._bundles |= await store.read_some(
            names.log_stream, names.trajectories, missing, TrajectoryBundle
        )

    def _encode_all(self) -> None:
        assert self._source.encode is not None
        if self._encoded:  # held-out rows are the same each time
            self._source_columns = dict(self._encoded)
            return
        for number, ref in enumerate(self._refs):
            with self._name_row(ref.sequence):
                row = self._dataset[ref.sequence]
                tokenizer = self._tokenizer if self._vision is None else self._vision.of(row)
                encoded = self._source.encode(row, ref.index, tokenizer)
                check_ids(encoded, row, self._vocabulary)
                tokens, mask = cut_to_fit(encoded, self._context.composed.config.dataset, self._positions)
            columns: _Row = {"tokens": np.array(tokens), "loss_mask": np.array(mask), "group": ref.group}
            self._source_columns[number] = columns
        if self._path != "dataset":
            self._encoded = dict(self._source_columns)

    @contextmanager
    def _name_row(self, place: int) -> Generator[None]:
        try:
            yield
        except ConfigError as error:
            advice = "correct the row, then: stretto resume RUN --accept-dataset"
            dataset = "the dataset" if self._path == "dataset" else "the held-out dataset"
            raise ConfigError(f"row {place} of {dataset}: {error}; {advice}", path=self._path) from error


def _columns_of(trajectory: WireTrajectory) -> _Row:
    return {
        "tokens": trajectory.tokens.numpy(),
        "loss_mask": trajectory.loss_mask.numpy(),
        "behaviour_logprobs": trajectory.logprobs.numpy(),
        "versions": trajectory.versions.numpy(),
        "rewards": trajectory.reward,
        "truncated": trajectory.finish == "length",
        "sample": trajectory.sample,
    }


def _join(columns: Mapping[str, list[Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    import torch

    tokens: dict[str, Tensor] = {}
    sequences: dict[str, Tensor] = {}
    for key, parts in columns.items():
        if parts[0].dim():
            tokens[key] = torch.cat(parts)
        else:
            sequences[key] = torch.stack(parts)
    return tokens, sequences
