"""What a rollout worker knows of the oldest token of a ticket, however the chunks arrive."""

from __future__ import annotations

import numpy as np

from stretto.array import Array
from stretto.engine import GenerateRequest, Sampling
from stretto.roles.generations import Floor, _Generation  # pyright: ignore[reportPrivateUsage]


def generation(floor: Floor, samples: int) -> _Generation:
    prompt, seeds = Array.of([1, 2, 3], np.int32), tuple(range(samples))
    request = GenerateRequest("0/0/1", prompt, seeds, Sampling(), min_version=floor.version)
    asked = _Generation(request, floor)
    asked.engine = "inference-0"
    return asked


def arrive(generation: _Generation, sample: int, *versions: int, engine: str = "inference-0") -> None:
    """The next tokens of a sample."""
    columns = (np.zeros(len(versions), np.int32), np.zeros(len(versions), np.float32), np.array(versions))
    target = generation.samples[sample]
    assert generation.add(engine, target, target.length, columns, "", "")


def test_the_oldest_token_is_known_when_every_sample_has_begun() -> None:
    told: list[int] = []
    floor = Floor(12, told.append)
    group = generation(floor, 3)
    arrive(group, 0, 14, 14)
    arrive(group, 1, 14)
    assert (floor.version, told) == (12, [])
    arrive(group, 2, 13, 14)  # begun before a swap, told after it
    assert (floor.version, told) == (13, [13])


def test_an_engine_that_is_behind_the_one_before_it_counts() -> None:
    told: list[int] = []
    group = generation(Floor(12, told.append), 2)
    arrive(group, 0, 14)
    arrive(group, 0, 13)  # from another engine, which had not swapped yet
    arrive(group, 1, 14)
    assert told == [13]


def test_turns_and_requests_side_by_side_are_one_ticket() -> None:
    told: list[int] = []
    floor = Floor(12, told.append)
    first, second = generation(floor, 1), generation(floor, 1)
    arrive(first, 0, 15)
    assert told == []
    arrive(second, 0, 13)
    assert (floor.version, told) == (13, [13])
    arrive(generation(floor, 1), 0, 16)  # a later turn cannot make the ticket any younger
    assert (floor.version, told) == (13, [13])


def test_what_a_former_engine_still_sends_does_not_count() -> None:
    group = generation(Floor(0, lambda version: None), 1)
    arrive(group, 0, 1, 1)
    group.engine = "inference-1"
    arrive(group, 0, 1, engine="inference-0")
    assert group.samples[0].length == 2
    arrive(group, 0, 2, engine="inference-1")
    assert group.samples[0].versions().tolist() == [1, 1, 2]


def test_a_repetition_from_the_seed_takes_nothing_over() -> None:
    group = generation(Floor(0, lambda version: None), 2)
    arrive(group, 0, 1, 1)
    arrive(group, 1, 1)
    group.samples[1].finish = "stop"
    group.forget_unfinished()
    assert [sample.length for sample in group.samples] == [0, 1]
