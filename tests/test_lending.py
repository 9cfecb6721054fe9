"""Which engines are lent to an evaluation, and for how long."""

from __future__ import annotations

import math

from stretto.kernel.lending import Lending, Wish

BESIDE = Wish(10, (10,))


def test_nothing_is_lent_without_an_evaluation() -> None:
    lending = Lending(30)
    assert lending.choose(Wish(), ["a", "b"], 0) == math.inf
    assert lending.lent == frozenset()


def test_all_are_lent_while_training_rests() -> None:
    lending = Lending(30)
    assert lending.choose(Wish(0, (0,), resting=True), ["a", "b"], 0) == math.inf
    assert lending.lent == {"a", "b"}


def test_of_several_one_is_lent_and_half_of_them_while_another_evaluation_waits() -> None:
    lending, workers = Lending(30), ["a", "b", "c", "d", "e"]
    assert lending.choose(BESIDE, workers, 0) == math.inf
    assert lending.lent == {"a"}
    lending.choose(Wish(10, (10, 20)), workers, 1)
    assert lending.lent == {"a", "b"}
    lending.choose(Wish(10, (10, 20)), ["a", "b"], 2)
    assert lending.lent == {"a"}


def test_the_one_that_is_lent_stays_so_until_it_is_lost() -> None:
    lending = Lending(30)
    lending.choose(BESIDE, ["b", "c"], 0)
    lending.choose(BESIDE, ["a", "b", "c"], 1)  # `a` joins
    assert lending.lent == {"b"}
    lending.choose(BESIDE, ["a", "c"], 2)
    assert lending.lent == {"a"}


def test_a_single_engine_takes_turns_and_begins_with_the_evaluation() -> None:
    lending = Lending(30)
    lent: list[tuple[float, bool]] = []
    now = 100.0
    for _ in range(4):
        again = lending.choose(BESIDE, ["a"], now)
        lent.append((now, lending.lent == frozenset("a")))
        assert lending.choose(BESIDE, ["a"], now + 1) == again  # looked at in between: nothing changes
        assert (lending.lent == {"a"}) == lent[-1][1]
        now = again
    assert lent == [(100, True), (130, False), (160, True), (190, False)]


def test_the_next_evaluation_begins_with_a_turn_of_its_own() -> None:
    lending = Lending(30)
    lending.choose(BESIDE, ["a"], 0)
    lending.choose(BESIDE, ["a"], 31)
    assert lending.lent == frozenset()
    lending.choose(Wish(), ["a"], 32)
    assert lending.choose(Wish(20, (20,)), ["a"], 33) == 63
    assert lending.lent == {"a"}
