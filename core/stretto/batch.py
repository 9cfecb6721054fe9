"""(torch) Packed batches of variable-length sequences, and how they are split and joined.

A batch holds S sequences end to end: token columns are flat, (T,) with T the sum of the lengths;
sequence columns are (S,). There is no padding anywhere, so no mask for it either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["Batch"]


class Batch:
    """S sequences with their columns. Operations return new batches; columns are never written to.

    Args:
        lengths: tokens of each sequence, all at least 1.
        tokens: token columns, (T,) each.
        sequences: sequence columns, (S,) each.

    Raises:
        ValueError: if a column's size does not fit the lengths.
    """

    def __init__(
        self, lengths: Sequence[int], tokens: Mapping[str, Tensor], sequences: Mapping[str, Tensor]
    ) -> None:
        self.lengths = list(lengths)
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
        """Number of sequences, S."""
        return len(self.lengths)

    def __contains__(self, name: str) -> bool:
        return name in self.tokens or name in self.sequences

    def __getitem__(self, name: str) -> Tensor:
        """A column by name, of either kind."""
        if name in self.tokens:
            return self.tokens[name]
        if name in self.sequences:
            return self.sequences[name]
        known = ", ".join([*self.tokens, *self.sequences])
        raise KeyError(f"the batch has no column {name!r}; it has {known}")

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return sum(self.lengths)

    def with_columns(self, columns: Mapping[str, Tensor]) -> Batch:
        """The batch with more columns: (T,) ones become token columns, (S,) ones sequence columns.

        Raises:
            ValueError: for a column of neither size.
        """
        tokens, sequences = dict(self.tokens), dict(self.sequences)
        for name, column in columns.items():
            if name in tokens or (len(column) == self.num_tokens and name not in sequences):
                tokens[name] = column
            else:
                sequences[name] = column
        return Batch(self.lengths, tokens, sequences)

    def select(self, indices: Sequence[int]) -> Batch:
        """The sequences at `indices`, in that order."""
        starts = self.starts()
        pieces = [torch.arange(starts[i], starts[i] + self.lengths[i]) for i in indices]
        flat = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.long)
        rows = torch.tensor(list(indices), dtype=torch.long)
        return Batch(
            [self.lengths[i] for i in indices],
            {name: column[flat.to(column.device)] for name, column in self.tokens.items()},
            {name: column[rows.to(column.device)] for name, column in self.sequences.items()},
        )

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Consecutive batches of so many sequences each; the sizes add up to S."""
        if sum(sizes) != len(self):
            raise ValueError(f"sizes {list(sizes)} do not add up to {len(self)} sequences")
        batches: list[Batch] = []
        first = start = 0
        for size in sizes:
            lengths = self.lengths[first : first + size]
            end = start + sum(lengths)
            batches.append(
                Batch(
                    lengths,
                    {name: column[start:end] for name, column in self.tokens.items()},
                    {name: column[first : first + size] for name, column in self.sequences.items()},
                )
            )
            first, start = first + size, end
        return batches

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The sequences of all batches, in order. All have the same columns."""
        first = batches[0]
        return Batch(
            [length for batch in batches for length in batch.lengths],
            {name: torch.cat([batch.tokens[name] for batch in batches]) for name in first.tokens},
            {name: torch.cat([batch.sequences[name] for batch in batches]) for name in first.sequences},
        )

    def micro_batches(self, max_tokens: int) -> list[Batch]:
        """Consecutive batches of at most `max_tokens` tokens each; a longer sequence stands alone."""
        sizes: list[int] = []
        room = 0
        for length in self.lengths:
            if not sizes or length > room:
                sizes.append(0)
                room = max_tokens
            sizes[-1] += 1
            room -= length
        return self.split(sizes)

    def to(self, device: torch.device | str) -> Batch:
        """The batch with its columns on a device."""
        return Batch(
            self.lengths,
            {name: column.to(device) for name, column in self.tokens.items()},
            {name: column.to(device) for name, column in self.sequences.items()},
        )

    def starts(self) -> list[int]:
        """Index in the token columns at which each sequence begins."""
        starts, at = [0] * len(self), 0
        for index, length in enumerate(self.lengths):
            starts[index], at = at, at + length
        return starts

    def sequence_index(self) -> Tensor:
        """(T,) int64: the sequence that each token belongs to."""
        lengths = torch.tensor(self.lengths, dtype=torch.long)
        return torch.repeat_interleave(torch.arange(len(self)), lengths)

    def positions(self) -> Tensor:
        """(T,) int64: each token's position in its sequence."""
        lengths = torch.tensor(self.lengths, dtype=torch.long)
        starts = torch.tensor(self.starts(), dtype=torch.long)
        return torch.arange(self.num_tokens) - torch.repeat_interleave(starts, lengths)
