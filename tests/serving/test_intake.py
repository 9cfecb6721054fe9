"""The intake of inference engines: checks, the waiting line, the version gate, deadlines."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.array import Array
from stretto.engine import GenerateRequest, Sampling
from stretto.errors import RequestError
from stretto.serving.intake import Intake, OpenSample, final_chunks

VOCABULARY = 10


def request(name: str, **options: Any) -> GenerateRequest:
    sampling: dict[str, Any] = {"max_tokens": 8, **options.pop("sampling", {})}
    usual: dict[str, Any] = {"prompt_ids": Array.of([5], np.int32), "seeds": (0,), "min_version": 0}
    return GenerateRequest(id=name, sampling=Sampling(**sampling), **{**usual, **options})


def intake(*names: str, version: int = 0) -> Intake[OpenSample]:
    line = Intake(OpenSample, vocabulary=VOCABULARY, room=64, eos=(1,))
    line.serve(version)
    for name in names:
        line.accept(request(name))
    return line


def started(line: Intake[OpenSample]) -> list[str]:
    names: list[str] = []
    while line.ready:
        names.append(line.pop().request.id)
    return names


# ------------------------------------------------------------------------------------------ the line


def test_a_request_that_is_open_is_not_accepted_twice() -> None:
    line = intake("a")
    assert line.accept(request("a")) == []
    assert line.waiting == 1

    line.close(line.pop())
    assert len(line.accept(request("a"))) == 1


def test_a_sample_that_ended_while_it_waited_is_passed_over() -> None:
    line = intake("a", "b", "c")
    for name in "ab":
        line.close(line.samples(name)[0])

    assert (line.waiting, line.ready) == (1, 1)
    assert started(line) == ["c"]
    assert (line.waiting, line.ready) == (0, 0)


def test_a_sample_that_needs_newer_weights_keeps_its_place_and_blocks_no_other() -> None:
    line = intake(version=-1)
    for name, version in (("a", 1), ("b", 0), ("c", 2), ("d", 1)):
        line.accept(request(name, min_version=version))

    assert started(line) == []
    line.serve(0)
    assert started(line) == ["b"]
    line.serve(2)
    assert (line.waiting, started(line)) == (3, ["a", "c", "d"])


def test_a_ready_sample_waits_again_after_the_weights_went_back() -> None:
    line = intake(version=3)
    line.accept(request("a", min_version=2))
    line.serve(1)
    assert (line.waiting, line.ready) == (1, 0)


def test_a_sample_that_gave_up_its_slot_waits_at_its_old_place() -> None:
    line = intake("a", "b", "c", "d")
    first, second = line.pop(), line.pop()
    line.put_back(second)

    assert (line.waiting, line.first) == (3, second)
    assert first.place < second.place
    assert started(line) == ["b", "c", "d"]


@given(st.lists(st.tuples(st.sampled_from(["take", "start", "back", "end", "serve"]), st.integers(0, 5))))
def test_every_sample_is_in_the_line_started_or_closed(steps: list[tuple[str, int]]) -> None:
    line = intake()
    started: list[OpenSample] = []
    version, closed, taken = 0, 0, 0
    for step, number in steps:
        if step == "take":
            taken += 1
            line.accept(request(f"r{taken}", min_version=number))
        elif step == "start" and line.ready:
            sample = line.pop()
            assert sample.request.min_version <= version
            started.append(sample)
        elif step == "back" and started:
            line.put_back(started.pop())
        elif step == "end" and (samples := list(line)):
            sample = samples[number % len(samples)]
            started = [each for each in started if each is not sample]
            line.close(sample)
            line.close(sample)
            closed += 1
        elif step == "serve":
            version = number
            line.serve(version)
        assert line.waiting + len(started) + closed == taken
        assert len(list(line)) == taken - closed


# -------------------------------------------------------------------------------- progress and endings


def test_samples_that_the_client_has_are_left_out_and_begun_ones_continue() -> None:
    line = intake()
    begun = (Array.of([2, 3], np.int32), Array.of([], np.int32), Array.of([4], np.int32))
    first, third = line.accept(request("a", seeds=(7, 8, 9), begun=begun, have=(1, -1, 3)))

    assert [(s.index, s.seed, s.begun.tolist(), s.sent) for s in (first, third)] == [
        (0, 7, [2, 3], 2),
        (2, 9, [4], 3),
    ]


@pytest.mark.parametrize(
    ("begun", "sampling", "finish"),
    [
        ([2, 1], {}, "stop"),  # the model's own end
        ([2, 1], {"ignore_eos": True}, ""),
        ([2, 6], {"stop_token_ids": (6,)}, "stop"),
        ([2] * 8, {}, "length"),
        ([2], {}, ""),
        ([], {}, ""),
    ],
)
def test_an_answer_that_was_complete_on_arrival_has_its_finish(
    begun: list[int], sampling: dict[str, Any], finish: str
) -> None:
    (sample,) = intake().accept(request("a", begun=(Array.of(begun, np.int32),), sampling=sampling))
    assert sample.finish_on_arrival == finish


def test_late_requests_are_found_once_their_deadline_has_passed() -> None:
    line, now = intake(), time.monotonic()
    line.accept(request("slow", deadline_s=50.0), now)
    line.accept(request("fast", deadline_s=5.0), now)
    line.pop()  # a started sample is late as well

    assert line.next_deadline == now + 5
    assert line.late(now + 4) == []
    (late,) = line.late(now + 6)
    assert (late.id, late.late) == ("fast", "not finished within 5 s")
    assert line.next_deadline == now + 50
    assert [each.id for each in line.late(now + 60)] == ["slow", "fast"]


def test_final_chunks_are_for_the_samples_that_the_client_does_not_have() -> None:
    chunks = final_chunks(request("a", seeds=(1, 2, 3), have=(4, -1, 0)), "error", "why")
    assert [(c.sample, c.position, len(c.tokens), c.finish, c.error) for c in chunks] == [
        (0, 4, 0, "error", "why"),
        (2, 0, 0, "error", "why"),
    ]


# ----------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_ids": Array.of([], np.int32)}, "0 prompt tokens and 1 seeds"),
        ({"seeds": ()}, "1 prompt tokens and 0 seeds"),
        ({"prompt_ids": Array.of([5, 10], np.int32)}, "'prompt_ids' has tokens outside the vocabulary of 10"),
        ({"prompt_ids": Array.of([-1], np.int32)}, "'prompt_ids' has tokens outside the vocabulary of 10"),
        ({"prompt_ids": Array.of([0.5])}, "'prompt_ids' is float64 of shape"),
        ({"prompt_ids": Array.of([[5]], np.int32)}, r"'prompt_ids' is int32 of shape \(1, 1\)"),
        ({"prompt_ids": Array.of([5] * 60, np.int32)}, "need 68; a sample can have 64"),
        ({"begun": (Array.of([99], np.int32),)}, "'begun' has tokens outside the vocabulary of 10"),
        ({"begun": (Array.of([2] * 9, np.int32),)}, "'begun' has 9 tokens, more than max_tokens 8"),
        ({"begun": (Array.of([2], np.int32),) * 2}, "'begun' is for 2 samples, the request has 1"),
        ({"have": (0, 0)}, "'have' is for 2 samples, the request has 1"),
        ({"sampling": {"stop": ("",)}}, "an empty stop string"),
        ({"sampling": {"stop_token_ids": (10,)}}, "'stop_token_ids' has tokens outside the vocabulary"),
        ({"sampling": {"logit_bias": {10: 1.0}}}, "'logit_bias' has tokens outside the vocabulary"),
    ],
)
def test_a_request_that_no_engine_can_serve_is_refused(options: dict[str, Any], message: str) -> None:
    line = intake()
    with pytest.raises(RequestError, match=message):
        line.accept(request("a", **options))
    assert line.waiting == 0
    assert list(line) == []
