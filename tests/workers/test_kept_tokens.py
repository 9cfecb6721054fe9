"""The tokens that a sampler kept, on their way from an engine's chunks to a batch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.array import Array, KeptTokens
from stretto.engine import Chunk, GenerateRequest, Sampling
from stretto.errors import EngineError
from stretto.rl.batch import Batch, Drawn
from stretto.workers.inference import _batch, _from  # pyright: ignore[reportPrivateUsage]
from stretto.workers.sampling.generation import (
    VersionFloor,
    _Generation,  # pyright: ignore[reportPrivateUsage]
    _records,  # pyright: ignore[reportPrivateUsage]
)
from stretto.workers.sampling.trajectory_log import expect_kept_tokens
from stretto.workflow import Answer, Score, Trajectory

SETS = st.lists(st.lists(st.integers(0, 99), max_size=4, unique=True).map(sorted), max_size=12)


def kept_of(sets: list[list[int]]) -> KeptTokens:
    ids = [each for part in sets for each in part]
    return KeptTokens(np.array([*map(len, sets)], np.uint16), np.array(ids, np.int32))


def sets_of(kept: KeptTokens) -> list[list[int]]:
    return [each.tolist() for each in np.split(kept.ids, np.cumsum(kept.counts, dtype=np.int64)[:-1])][
        : len(kept)
    ]


@given(sets=SETS, cut=st.data())
def test_parts_are_those_of_lists(sets: list[list[int]], cut: st.DataObject) -> None:
    kept = kept_of(sets)
    start = cut.draw(st.integers(0, len(sets)))
    stop = cut.draw(st.integers(start, len(sets)))
    assert sets_of(kept.part(start, stop)) == sets[start:stop]
    assert sets_of(KeptTokens.concat([kept.part(0, start), kept.part(start)])) == sets
    places = sorted(cut.draw(st.sets(st.integers(0, len(sets) - 1)))) if sets else []
    assert sets_of(kept.at(np.array(places, np.int64))) == [sets[place] for place in places]


def chunk(position: int, sets: list[list[int]] | None, count: int) -> Chunk:
    return Chunk(
        request="r",
        sample=0,
        position=position,
        tokens=np.arange(position, position + count, dtype=np.int32),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        kept=None if sets is None else kept_of(sets),
    )


@given(
    sets=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True), min_size=2),
    data=st.data(),
)
def test_repeated_or_split_chunks_join_to_the_answer(sets: list[list[int]], data: st.DataObject) -> None:
    sets = [sorted(each) for each in sets]
    request = GenerateRequest("r", Array.of([1], np.int32), (0,), Sampling(), 0, wants_kept=True)
    generation = _Generation(request, VersionFloor(0, lambda version: None), None, None)
    at = 0
    while at < len(sets):
        have = data.draw(st.integers(0, at))  # the engine sends what the client has already
        stop = data.draw(st.integers(at + 1, len(sets)))
        other = chunk(0, None, 1)
        other.request = "someone else's, without kept tokens"
        sent = _from(chunk(0, sets[:stop], stop), have)
        assert sent is not None
        batch = _batch("inference-0", [other, sent])
        kept, records = KeptTokens.read(batch.kept_counts, batch.kept_ids), _records(batch)
        assert kept is not None
        assert generation.add(batch.heads[1], records[12:], kept.part(1))
        at = stop
    whole = generation.samples[0].kept()
    assert whole is not None
    assert sets_of(whole) == sets
    generation.forget_unfinished()
    assert len(generation.samples[0].kept() or ()) == 0


def test_an_answer_of_which_a_part_came_without_kept_tokens_has_none() -> None:
    request = GenerateRequest("r", Array.of([1], np.int32), (0,), Sampling(), 0, wants_kept=True)
    generation = _Generation(request, VersionFloor(0, lambda version: None), None, None)
    for each in (chunk(0, [[1], [2]], 2), chunk(2, None, 1)):
        batch = _batch("inference-0", [each])
        generation.add(batch.heads[0], _records(batch), KeptTokens.read(batch.kept_counts, batch.kept_ids))
    assert generation.samples[0].kept() is None


def test_a_trajectory_has_the_kept_tokens_of_its_answer_alone() -> None:
    zeros = np.zeros(2, np.float32)
    answer = Answer(
        *(np.array([5, 6], np.int32), zeros, zeros.astype(np.int32), "stop", "", "inference-0"),
        kept=kept_of([[5, 9], [6]]),
    )
    trajectory = Trajectory.of(np.array([1, 2, 3], np.int32), answer, Score(1.0))
    assert trajectory.kept is not None
    assert sets_of(trajectory.kept) == [[], [], [], [5, 9], [6]]
    expect_kept_tokens([trajectory])


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (None, "has no kept tokens"),
        ([[], [5], [9]], "a sampled token is not one of its kept tokens"),
        ([[], [5], []], "not each sampled token"),
        ([[7], [5], [6]], "not each sampled token"),
        ([[], [5]], "2 of 3 tokens"),
    ],
)
def test_kept_tokens_that_do_not_fit_are_refused(sets: list[list[int]] | None, message: str) -> None:
    ids = np.array([1, 5, 6], np.int32)
    columns = ids, np.array([False, True, True]), np.zeros(3, np.float32), ids
    kept = None if sets is None else kept_of(sets)
    trajectory = Trajectory(*columns, Score(1.0), "stop", "inference-0", kept=kept)
    with pytest.raises(EngineError, match=message):
        expect_kept_tokens([trajectory])


def test_a_batch_takes_them_along() -> None:
    sets = [[[], [1, 2], [3]], [[], [4]], [[], [5], [6, 7], [8]]]
    lengths = [*map(len, sets)]
    drawn = Drawn({3: 1.0}, [kept_of(each) for each in sets])
    columns = {"tokens": torch.arange(sum(lengths))}
    batch = Batch(lengths, columns, {"group": torch.tensor([0, 0, 1])}, drawn=drawn)

    def found(batch: Batch) -> list[list[list[int]]]:
        assert batch.drawn is not None
        assert batch.drawn.kept is not None
        assert batch.drawn.logit_bias == {3: 1.0}
        return [sets_of(each) for each in batch.drawn.kept]

    assert found(batch.select([2, 0])) == [sets[2], sets[0]]
    assert [found(part) for part in batch.split([1, 2])] == [sets[:1], sets[1:]]
    assert found(Batch.concat(batch.split([2, 1]))) == sets
    assert found(batch.to("cpu").with_columns({"more": torch.zeros(3)})) == sets
    assert [found(part) for part in batch.micro_batches(5)] == [sets[:2], sets[2:]]
    kept = drawn.kept_at(torch.tensor([1, 4, 7]))
    assert kept is not None
    assert sets_of(kept) == [[1, 2], [4], [6, 7]]
    with pytest.raises(ValueError, match="kept tokens do not fit"):
        Batch(lengths[::-1], columns, {}, drawn=drawn)


def test_the_largest_number_of_kept_tokens_is_a_top_k() -> None:
    assert Sampling(top_p=0.9).in_training().top_k == 1024
    assert Sampling(top_p=0.9, max_kept=50).in_training().top_k == 50
    assert Sampling(top_k=20).in_training().top_k == 20
    assert Sampling(top_k=2000).in_training().top_k == 1024
    assert Sampling(logit_bias={1: 2.0}).in_training().top_k == 0
