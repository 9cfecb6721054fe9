"""Which workers a rollout worker may call: few, stable, and nobody is forgotten."""

import random
import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.kernel.fleet.candidates import Candidates

LEAST = 8

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "drop"]), st.integers(0, 14)),
        st.tuples(st.sampled_from(["engine", "lent", "verifier", "gone"]), st.integers(0, 30)),
    ),
    max_size=120,
)


def apply(candidates: Candidates, event: str, number: int) -> None:
    match event:
        case "add":
            candidates.add_rollout(f"rollout-{number}")
        case "drop":
            candidates.remove_rollout(f"rollout-{number}")
        case "engine" | "lent":
            candidates.put(f"inference-{number}", ("inference", 3 if event == "lent" else None), LEAST)
        case "verifier":
            candidates.put(f"verifier-{number}", "verifier", LEAST)
        case _:
            candidates.remove(f"{'inference' if number % 2 else 'verifier'}-{number}")


@settings(max_examples=150)
@given(EVENTS)
def test_everyone_is_known_and_equal_events_give_equal_candidates(events: list[tuple[str, int]]) -> None:
    candidates = Candidates()
    known = dict[str, list[str]]()
    rollouts, groups = set[str](), dict[str, object]()
    for event, number in events:
        apply(candidates, event, number)
        gone = ""
        match event:
            case "add" | "drop":
                (rollouts.add if event == "add" else rollouts.discard)(f"rollout-{number}")
            case "gone":
                gone = f"{'inference' if number % 2 else 'verifier'}-{number}"
                groups.pop(gone, None)
            case _:
                groups[f"{'verifier' if event == 'verifier' else 'inference'}-{number}"] = event
        changed = set(candidates.take_changed())
        assert changed <= rollouts
        for rollout in rollouts - changed:
            assert candidates.of(rollout) == known[rollout], "a change was not reported"
        former, known = known, {rollout: candidates.of(rollout) for rollout in rollouts}
        if gone:
            others = {rollout for rollout in rollouts if gone not in former[rollout]}
            assert all(known[rollout] == former[rollout] for rollout in others), "not theirs to replace"
    assert set(candidates.rollouts) == rollouts
    sizes = Counter(groups.values())
    for rollout in rollouts:
        mine = Counter(groups[worker] for worker in known[rollout])
        assert sum(mine.values()) == len(set(known[rollout]))
        assert all(mine[group] >= min(size, LEAST) for group, size in sizes.items())
    for worker in groups:
        told = {rollout for rollout in rollouts if worker in known[rollout]}
        assert told == candidates.rollouts_of(worker)
        assert len(told) >= min(len(rollouts), 1)
    again = Candidates()
    for event, number in events:
        apply(again, event, number)
    assert {rollout: again.of(rollout) for rollout in rollouts} == known


def many(rollouts: int, engines: int, order: str) -> Candidates:
    candidates = Candidates()
    events = [
        *(("add", number) for number in range(rollouts)),
        *(("engine", number) for number in range(engines)),
    ]
    if order == "engines first":
        events.reverse()
    elif order == "mixed":
        random.Random(0).shuffle(events)
    for event, number in events:
        apply(candidates, event, number)
    candidates.take_changed()
    return candidates


ORDERS = pytest.mark.parametrize("order", ["rollouts first", "engines first", "mixed"])


@ORDERS
@pytest.mark.parametrize(("rollouts", "engines"), [(300, 900), (30, 900)])
def test_few_candidates_however_many_workers(order: str, rollouts: int, engines: int) -> None:
    """A rollout worker knows `LEAST`, or its part of the workers if that has more."""
    candidates = many(rollouts, engines, order)
    counts = [len(candidates.of(rollout)) for rollout in candidates.rollouts]
    part = engines / rollouts
    assert statistics.mean(counts) <= max(LEAST, part) + 0.1
    assert max(counts) < 2 * max(LEAST, part)


@ORDERS
def test_a_worker_that_joins_or_leaves_changes_the_candidates_of_few(order: str) -> None:
    candidates = many(300, 900, order)
    for number in range(20):
        candidates.remove(f"inference-{number}")
        assert 1 <= len(candidates.take_changed()) < 30
        apply(candidates, "engine", 1000 + number)
        assert 1 <= len(candidates.take_changed()) < 30


@ORDERS
def test_whoever_joined_late_is_known_by_as_many_as_the_others(order: str) -> None:
    candidates = many(200, 400, order)
    for number in range(100):
        candidates.remove(f"inference-{3 * number}")
        apply(candidates, "engine", 1000 + number)
    known = Counter(worker for rollout in candidates.rollouts for worker in candidates.of(rollout))
    late = [known[f"inference-{1000 + number}"] for number in range(100)]
    early = [known[f"inference-{3 * number + 1}"] for number in range(100)]
    assert statistics.mean(late) == pytest.approx(200 * LEAST / 400, rel=0.15)
    assert statistics.mean(early) == pytest.approx(200 * LEAST / 400, rel=0.15)


@ORDERS
def test_two_random_candidates_balance_the_load_as_two_random_workers_do(order: str) -> None:
    """Power of two choices, in the long run: calls come and go at every rollout worker."""
    engines, rollouts, rounds = 200, 100, 30
    candidates = many(rollouts, engines, order)
    every = [f"inference-{number}" for number in range(engines)]

    def spread(choices: dict[str, list[str]]) -> float:
        pick = random.Random(0)
        load = Counter[str]()
        calls: list[str] = []
        highest: list[float] = []
        for _ in range(rounds):
            for options in choices.values():
                for _ in range(8):
                    pair = pick.sample(options, 2)
                    engine = min(pair, key=lambda worker: load[worker])
                    load[engine] += 1
                    calls.append(engine)
            while len(calls) > 8 * rollouts:
                place = pick.randrange(len(calls))
                calls[place], calls[-1] = calls[-1], calls[place]
                load[calls.pop()] -= 1
            highest.append(max(load.values()))
        return statistics.mean(highest[rounds // 2 :])

    few = spread({rollout: candidates.of(rollout) for rollout in candidates.rollouts})
    all_of_them = spread(dict.fromkeys(candidates.rollouts, every))
    mean = 8 * rollouts / engines
    assert few <= all_of_them + mean
