"""(torch) Packed batches of variable-length sequences: split and join them.

A batch holds S sequences end to end. Token columns are flat: (T,), where T is the sum of the lengths.
Sequence columns are (S,). There is no padding and no padding mask. A sequence may also have media: the arrays
that a vision-language model reads for its images. They stay with the sequence when a batch is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.array import KeptTokens

__all__ = ["Batch", "Drawn"]


@dataclass(frozen=True)
class Drawn:
    """How the sampler's distribution of the tokens of a batch differed from softmax(logits / temperature)."""

    logit_bias: Mapping[int, float]
    """Value that the sampler added to the logit of each token id, before it divided by the temperature."""
    kept: Sequence[KeptTokens] | None
    """For each sequence, the ids from which its tokens were drawn; None for the whole vocabulary."""

    def select(self, indices: Iterable[int]) -> Drawn:
        """Return the `Drawn` of the sequences at `indices`, in that order."""
        return Drawn(self.logit_bias, self.kept and [self.kept[i] for i in indices])

    @classmethod
    def concat(cls, parts: Sequence[Drawn]) -> Drawn:
        """Return the `Drawn` of the sequences of all parts. All parts must have the same bias."""
        kept = [tokens for part in parts for tokens in part.kept or ()]
        return cls(parts[0].logit_bias, None if parts[0].kept is None else kept)

    def kept_at(self, places: Tensor) -> KeptTokens | None:
        """Return the ids from which the tokens at these ascending indices were drawn; None: from all ids."""
        return None if self.kept is None else KeptTokens.concat(self.kept).at(places.numpy())


class Batch:
    """S sequences with their columns. Operations return new batches and never write to columns.

    Args:
        lengths: number of tokens of each sequence, at least 1.
        tokens: token columns, (T,) each.
        sequences: sequence columns, (S,) each.
        media: for each sequence, arguments of the model by name, of any shape and dtype. The arrays of
            several sequences are joined along the first dimension. The mapping of a sequence without images
            is empty. None means that no sequence has media.
        drawn: how the sampler's distribution differed from softmax(logits / temperature); None if it did not
            differ, or if that does not matter.

    Raises:
        ValueError: if the size of a column, the number of media entries, or the kept tokens do not fit the
            lengths.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        tokens: Mapping[str, Tensor],
        sequences: Mapping[str, Tensor],
        media: Sequence[Mapping[str, Tensor]] | None = None,
        drawn: Drawn | None = None,
    ) -> None:
        self.lengths = list(lengths)
        self.media: list[Mapping[str, Tensor]] = [{} for _ in self.lengths] if media is None else list(media)
        if len(self.media) != len(self.lengths):
            raise ValueError(f"media of {len(self.media)} sequences for {len(self.lengths)} sequences")
        self.drawn = drawn
        if drawn is not None and drawn.kept is not None and [*map(len, drawn.kept)] != self.lengths:
            raise ValueError("the kept tokens do not fit the lengths of the sequences")
        self.tokens = dict(tokens)
        self.sequences = dict(sequences)
        total = sum(self.lengths)
        for name, column in self.tokens.items():
            if len(column) != total:
                raise ValueError(f"token column {name!r} has {len(column)} entries for {total} tokens")
        for name, column in self.sequences.items():
            if len(column) != len(self.lengths):
                raise ValueError(
                    f"sequence column {name!r} has {len(column)} entries for {len(self.lengths)} sequences"
                )

    def __len__(self) -> int:
        """Return the number of sequences, S."""
        return len(self.lengths)

    def __contains__(self, name: str) -> bool:
        return name in self.tokens or name in self.sequences

    def __getitem__(self, name: str) -> Tensor:
        """Return a token or sequence column by name."""
        if name in self.tokens:
            return self.tokens[name]
        if name in self.sequences:
            return self.sequences[name]
        names = ", ".join([*self.tokens, *self.sequences])
        raise KeyError(f"the batch has no column {name!r}; it has {names}")

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return sum(self.lengths)

    def with_columns(self, columns: Mapping[str, Tensor]) -> Batch:
        """Return the batch with more columns. A column of size (T,) becomes a token column, one of size (S,)
        a sequence column. A column whose name exists already replaces that column and keeps its kind. Raise
        ValueError if a column has neither size."""
        tokens, sequences = dict(self.tokens), dict(self.sequences)
        for name, column in columns.items():
            if name in tokens or (len(column) == self.num_tokens and name not in sequences):
                tokens[name] = column
            else:
                sequences[name] = column
        return Batch(self.lengths, tokens, sequences, self.media, self.drawn)

    def select(self, indices: Sequence[int]) -> Batch:
        """Return the sequences at `indices`, in that order."""
        starts = self.starts()
        pieces = [torch.arange(starts[i], starts[i] + self.lengths[i]) for i in indices]
        flat = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.long)
        rows = torch.tensor(list(indices), dtype=torch.long)
        return Batch(
            [self.lengths[i] for i in indices],
            {name: column[flat.to(column.device)] for name, column in self.tokens.items()},
            {name: column[rows.to(column.device)] for name, column in self.sequences.items()},
            [self.media[i] for i in indices],
            self.drawn and self.drawn.select(indices),
        )

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Split into consecutive batches of `sizes` sequences; ValueError if the sizes do not add up to S."""
        if sum(sizes) != len(self):
            raise ValueError(f"sizes {list(sizes)} do not add up to {len(self)} sequences")
        batches: list[Batch] = []
        first = first_token = 0
        for size in sizes:
            lengths = self.lengths[first : first + size]
            end_token = first_token + sum(lengths)
            batches.append(
                Batch(
                    lengths,
                    {name: column[first_token:end_token] for name, column in self.tokens.items()},
                    {name: column[first : first + size] for name, column in self.sequences.items()},
                    self.media[first : first + size],
                    self.drawn and self.drawn.select(range(first, first + size)),
                )
            )
            first, first_token = first + size, end_token
        return batches

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Return the sequences of all batches, in order. All batches must have the same columns."""
        first = batches[0]
        return Batch(
            [length for batch in batches for length in batch.lengths],
            {name: torch.cat([batch.tokens[name] for batch in batches]) for name in first.tokens},
            {name: torch.cat([batch.sequences[name] for batch in batches]) for name in first.sequences},
            [media for batch in batches for media in batch.media],
            first.drawn and Drawn.concat([batch.drawn for batch in batches if batch.drawn is not None]),
        )

    def micro_batches(self, max_tokens: int, *, whole_groups: bool = False) -> list[Batch]:
        """Split into consecutive batches of at most `max_tokens` tokens each. A longer sequence gets its own
        batch. With `whole_groups`, a run of sequences with the same `group` is never split, however long."""
        sizes: list[int] = []
        room = 0
        for count, length in self.groups() if whole_groups else ((1, length) for length in self.lengths):
            if not sizes or length > room:
                sizes.append(0)
                room = max_tokens
            sizes[-1] += count
            room -= length
        return self.split(sizes)

    def groups(self) -> list[tuple[int, int]]:
        """Return (number of sequences, number of tokens) of each run of sequences with the same `group`."""
        runs = torch.unique_consecutive(self["group"], return_counts=True)[1].tolist()
        lengths = iter(self.lengths)
        return [(count, sum(islice(lengths, count))) for count in runs]

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its columns on a device."""
        return Batch(
            self.lengths,
            {name: column.to(device) for name, column in self.tokens.items()},
            {name: column.to(device) for name, column in self.sequences.items()},
            [{name: array.to(device) for name, array in media.items()} for media in self.media],
            self.drawn,
        )

    def join_media(self) -> dict[str, Tensor]:
        """Return the media of all sequences in order, joined into arguments for the model. Arrays that differ
        in size beyond the first dimension are padded with zeros, as the models' processors do."""
        names = dict.fromkeys(name for media in self.media for name in media)
        return {name: _join([media[name] for media in self.media if name in media]) for name in names}

    def starts(self) -> list[int]:
        """Return the index in the token columns at which each sequence starts."""
        return [0, *accumulate(self.lengths)][:-1]

    def sequence_index(self) -> Tensor:
        """Return (T,) int64: the sequence that each token belongs to."""
        lengths = torch.tensor(self.lengths, dtype=torch.long)
        return torch.repeat_interleave(torch.arange(len(self)), lengths)

    def positions(self) -> Tensor:
        """Return (T,) int64: each token's position in its sequence."""
        lengths = torch.tensor(self.lengths, dtype=torch.long)
        starts = torch.tensor(self.starts(), dtype=torch.long)
        return torch.arange(self.num_tokens) - torch.repeat_interleave(starts, lengths)


def _join(arrays: Sequence[Tensor]) -> Tensor:
    """Join arrays along the first dimension; pad the other dimensions with zeros to their largest sizes."""
    full_shape = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)]
    # F.pad counts dimensions from the last one and takes two sizes for each: before and after.
    paddings = [
        [
            size
            for actual, full in zip(array.shape[:0:-1], full_shape[::-1], strict=True)
            for size in (0, full - actual)
        ]
        for array in arrays
    ]
    return torch.cat([F.pad(array, sizes) for array, sizes in zip(arrays, paddings, strict=True)])
