"""Packed batches: splitting, joining and selecting lose nothing and mix nothing up."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.rl.batch import Batch


def batch_of(lengths: list[int]) -> Batch:
    """Token t of sequence s is 100 s + t; the sequence column is s."""
    tokens = [100 * index + place for index, length in enumerate(lengths) for place in range(length)]
    return Batch(lengths, {"tokens": torch.tensor(tokens)}, {"name": torch.arange(len(lengths))})


def rows(batch: Batch) -> list[tuple[int, list[int]]]:
    """(name, tokens) of every sequence, read back."""
    parts = torch.split(batch["tokens"], batch.lengths)
    return [(int(name), part.tolist()) for name, part in zip(batch["name"], parts, strict=True)]


lengths_of_batches = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(lengths=lengths_of_batches, budget=st.integers(1, 30))
def test_micro_batches_keep_order_and_budget(lengths: list[int], budget: int) -> None:
    whole = batch_of(lengths)
    parts = whole.micro_batches(budget)
    assert rows(Batch.concat(parts)) == rows(whole)
    assert all(part.num_tokens <= budget or len(part) == 1 for part in parts)
    # Greedy: no part could have taken the next one's first sequence.
    for part, after in pairwise(parts):
        assert part.num_tokens + after.lengths[0] > budget


def test_micro_batches_can_keep_groups_together() -> None:
    whole = batch_of([3, 4, 2, 9, 1]).with_columns({"group": torch.tensor([0, 0, 1, 2, 2])})
    assert [part.lengths for part in whole.micro_batches(8, whole_groups=True)] == [[3, 4], [2], [9, 1]]
    assert [part.lengths for part in whole.micro_batches(9, whole_groups=True)] == [[3, 4, 2], [9, 1]]


@given(lengths=lengths_of_batches, seed=st.integers(0, 99))
def test_select_takes_whole_sequences_in_the_order_asked(lengths: list[int], seed: int) -> None:
    whole = batch_of(lengths)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    assert rows(whole.select(order)) == [rows(whole)[index] for index in order]


def test_positions_and_sequence_index_by_hand() -> None:
    batch = batch_of([2, 1, 3])
    assert batch.positions().tolist() == [0, 1, 0, 0, 1, 2]
    assert batch.sequence_index().tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.starts() == [0, 2, 3]
    assert batch.num_tokens == 6


def test_columns_find_their_kind_by_their_size() -> None:
    batch = batch_of([2, 1]).with_columns({"a": torch.zeros(3), "b": torch.zeros(2)})
    assert "a" in batch.tokens
    assert "b" in batch.sequences
    with pytest.raises(ValueError, match="'c' has 5 entries"):
        batch.with_columns({"c": torch.zeros(5)})


def test_an_unknown_column_names_those_there_are() -> None:
    with pytest.raises(KeyError, match="no column 'rewards'; it has tokens, name"):
        batch_of([1])["rewards"]
