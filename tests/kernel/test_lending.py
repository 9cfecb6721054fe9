"""Which engines are lent to an evaluation, and for how long."""

from __future__ import annotations

import math

from stretto.kernel.schedule.lending import Demand, Lending

BESIDE = Demand(10, (10,))


def training(*workers: str) -> dict[str, int | None]:
    return dict.fromkeys(workers)


def test_nothing_is_lent_without_an_evaluation() -> None:
    lending = Lending(30)
    assert lending.choose(Demand(), training("a", "b"), 0) == math.inf
    assert lending.lent == frozenset()


def test_all_are_lent_while_training_rests() -> None:
    lending = Lending(30)
    assert lending.choose(Demand(0, (0,), resting=True), training("a", "b"), 0) == math.inf
    assert lending.lent == {"a", "b"}


def test_of_several_one_is_lent_and_half_of_them_while_another_evaluation_waits() -> None:
    lending, workers = Lending(30), training("a", "b", "c", "d", "e")
    assert lending.choose(BESIDE, workers, 0) == math.inf
    assert lending.lent == {"a"}
    lending.choose(Demand(10, (10, 20)), workers, 1)
    assert lending.lent == {"a", "b"}
    lending.choose(Demand(10, (10, 20)), training("a", "b"), 2)
    assert lending.lent == {"a"}


def test_the_one_that_is_lent_stays_so_until_it_is_lost() -> None:
    lending = Lending(30)
    lending.choose(BESIDE, training("b", "c"), 0)
    lending.choose(BESIDE, training("a", "b", "c"), 1)  # `a` joins
    assert lending.lent == {"b"}
    lending.choose(BESIDE, training("a", "c"), 2)
    assert lending.lent == {"a"}


def test_beside_training_only_the_engine_for_evaluations_is_lent() -> None:
    lending, own = Lending(30), frozenset({"e"})
    for workers in (training("a"), training("a", "b")):
        assert lending.choose(Demand(10, (10, 20)), workers, 0, own) == math.inf
        assert lending.lent == own
        lending.choose(Demand(10, (10,), resting=True), workers, 1, own)
        assert lending.lent == workers.keys() | own
        lending.choose(BESIDE, workers, 2, frozenset())  # it is starting again, and the evaluation waits
        assert lending.lent == frozenset()
        lending.choose(Demand(), workers, 3, own)
        assert lending.lent == frozenset()


def test_a_single_engine_takes_turns_and_begins_with_the_evaluation() -> None:
    lending = Lending(30)
    lent: list[tuple[float, bool]] = []
    now, serves = 100.0, None
    for _ in range(4):
        assert lending.choose(BESIDE, {"a": serves}, now) == math.inf  # no turn passes while weights load
        now, serves = now + 5, 10 if lending.lent else None
        again = lending.choose(BESIDE, {"a": serves}, now)
        lent.append((now, lending.lent == frozenset("a")))
        assert lending.choose(BESIDE, {"a": serves}, now + 1) == again  # as is said in between
        assert (lending.lent == {"a"}) == lent[-1][1]
        now = again
    assert lent == [(105, True), (140, False), (175, True), (240, False)]  # longer each time


def test_a_single_engine_serves_training_until_the_first_step() -> None:
    lending = Lending(30)
    assert lending.choose(Demand(0, (0,), untrained=True), {"a": None}, 0) == math.inf
    assert lending.lent == frozenset()
    lending.choose(Demand(0, (0,), resting=True, untrained=True), {"a": None}, 1)  # it has nothing to do
    assert lending.lent == {"a"}
    lending.choose(Demand(0, (0,), untrained=True), {"a": None}, 2)
    assert lending.lent == frozenset()
    lending.choose(Demand(0, (0,)), {"a": None}, 3)
    assert lending.lent == {"a"}
    lending = Lending(30)
    lending.choose(Demand(0, (0,), untrained=True), training("a", "b"), 0)  # another one serves training
    assert lending.lent == {"a"}


def test_a_swap_may_take_longer_than_a_turn() -> None:
    lending = Lending(1)
    lending.choose(BESIDE, {"a": None}, 0)
    lending.choose(BESIDE, {"a": None}, 60)  # a minute later the weights still load
    assert lending.lent == {"a"}
    assert lending.choose(BESIDE, {"a": 10}, 70) == 71


def test_the_next_evaluation_begins_with_a_turn_of_its_own() -> None:
    lending = Lending(30)
    lending.choose(BESIDE, {"a": 10}, 0)
    lending.choose(BESIDE, {"a": 10}, 31)
    assert lending.lent == frozenset()
    lending.choose(Demand(), {"a": None}, 32)
    assert lending.choose(Demand(20, (20,)), {"a": 20}, 33) == 63
    assert lending.lent == {"a"}
