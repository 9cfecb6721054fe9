"""Which engines are lent to an evaluation, and for how long."""

import math

import pytest

from stretto.kernel.schedule.lending import Demand, Lending

NONE, BESIDE, TWO = Demand(), Demand(10, (10,)), Demand(10, (10, 20))
RESTING, UNTRAINED = Demand(10, (10,), resting=True), Demand(0, (0,), untrained=True)


STORIES: dict[str, list[tuple[Demand, str, str | None, str]]] = {
    "nothing without an evaluation": [(NONE, "ab", None, "")],
    "all while training rests": [(RESTING, "ab", None, "ab")],
    "of several one, and half of them while another evaluation waits":
        [(BESIDE, "abcde", None, "a"), (TWO, "abcde", None, "ab"), (TWO, "ab", None, "a")],
    "the same one until it is lost":
        [(BESIDE, "bc", None, "b"), (BESIDE, "abc", None, "b"), (BESIDE, "ac", None, "a")],
    # While the evaluator starts again, the evaluation waits.
    **{f"beside training only the evaluator, with {len(w)} others":
        [(TWO, w, "e", "e"), (RESTING, w, "e", f"{w}e"), (BESIDE, w, "", ""), (NONE, w, "e", "")]
       for w in ("a", "ab")},
    "a single one not before the first step":
        [(UNTRAINED, "a", None, ""),
         (Demand(0, (0,), resting=True, untrained=True), "a", None, "a"),  # it has nothing to do
         (UNTRAINED, "a", None, ""),
         (Demand(0, (0,)), "a", None, "a")],
    "before the first step if another one trains": [(UNTRAINED, "ab", None, "a")],
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_engines_are_lent(name: str) -> None:
    lending = Lending(30)
    for now, (demand, workers, evaluators, lent) in enumerate(STORIES[name]):
        own = None if evaluators is None else frozenset(evaluators)
        assert lending.choose(demand, dict.fromkeys(workers), now, own) == math.inf
        assert lending.lent == frozenset(lent)


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
