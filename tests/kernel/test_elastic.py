"""The elastic policy on virtual time, against a simulated run whose stages have limits."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.kernel.fleet.elastic import ElasticPolicy, LoadObservation, NumberChange, RoleLoad
from stretto.launcher import Role

STEADY_S = 900.0


@dataclass
class SimulatedRun:
    """A run in steady state: each stage has a speed for each of its workers, and the slowest stage decides.

    The stages before the slowest are full, those behind it are used in part; training is one stage more.
    """

    speeds: Mapping[Role, float]
    """Groups per second of one worker."""
    train: float
    """Groups per second of training."""
    numbers: dict[Role, int]
    hidden: float = 1e9
    """Groups per second that a cause allows which no figure shows."""
    start_s: float = 2.0
    """Seconds that a new worker needs."""
    noise: float = 0.0
    """Standard deviation of the number of groups that finish in a second, relative to its square root."""
    now: float = 0.0
    groups: float = 0.0
    starting: dict[Role, float] = field(default_factory=dict[Role, float])
    changes: list[tuple[float, NumberChange]] = field(default_factory=list[tuple[float, NumberChange]])
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def capacity(self, role: Role) -> float:
        return self.numbers[role] * self.speeds[role]

    def speed(self) -> float:
        return min(self.train, self.hidden, *map(self.capacity, self.numbers))

    def observation(self) -> LoadObservation:
        speed = self.speed()
        return LoadObservation(
            round(self.groups),
            self.random.random() < speed / self.train,
            {role: self._load(role, speed) for role in self.numbers},
        )

    def _load(self, role: Role, speed: float) -> RoleLoad:
        """Work waits at the slowest stage. What no figure shows is slow in the rollout workers."""
        others = min(self.train, *(self.capacity(each) for each in self.numbers))
        limits = speed == self.capacity(role) < self.train
        if role == "rollout" and self.hidden < others:
            limits, speed = True, self.capacity(role)
        used = speed / self.capacity(role)
        ready = self.starting.get(role, 0.0) <= self.now
        return RoleLoad(self.numbers[role], min(1.0, used), 3.0 if limits else 0.0, ready=ready)

    def follow(self, policy: ElasticPolicy, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            mean = self.speed()
            self.groups += max(0.0, self.random.gauss(mean, self.noise * mean**0.5))
            change = policy.observe(self.now, self.observation())
            if change is not None:
                self.changes.append((self.now, change))
                if change.number > self.numbers[change.role]:
                    self.starting[change.role] = self.now + self.start_s
                self.numbers[change.role] = change.number


def best_speed(run: SimulatedRun, bounds: Mapping[Role, tuple[int, int]]) -> float:
    """The speed with the most workers that the bounds allow: no smaller number is faster."""
    most: dict[Role, int] = {
        role: bounds[role][1] if role in bounds else number for role, number in run.numbers.items()
    }
    return SimulatedRun(run.speeds, run.train, most, run.hidden).speed()


speeds = st.floats(0.5, 8.0)
number = st.integers(1, 6)


@settings(max_examples=40)
@given(
    speeds=st.fixed_dictionaries({"rollout": speeds, "inference": speeds, "verifier": speeds}),
    train=st.floats(1.0, 60.0),
    numbers=st.fixed_dictionaries({"rollout": number, "inference": number, "verifier": number}),
    elastic=st.sets(st.sampled_from(["rollout", "inference", "verifier"]), min_size=1),
    more=st.integers(0, 14),
    hidden=st.one_of(st.just(1e9), st.floats(1.0, 40.0)),
    start_s=st.floats(0.0, 30.0),
    seed=st.integers(0, 1000),
)
def test_the_policy_finds_the_best_number_and_stays_in_its_bounds(
    speeds: dict[Role, float],
    train: float,
    numbers: dict[Role, int],
    elastic: set[Role],
    more: int,
    hidden: float,
    start_s: float,
    seed: int,
) -> None:
    bounds: dict[Role, tuple[int, int]] = {role: (1, numbers[role] + more) for role in elastic}
    run = SimulatedRun(speeds, train, dict(numbers), hidden, start_s, random=random.Random(seed))
    policy = ElasticPolicy(bounds)
    run.follow(policy, STEADY_S)
    assert run.speed() >= 0.8 * best_speed(run, bounds)
    for _, change in run.changes:
        fewest, most = bounds[change.role]
        assert fewest <= change.number <= most
    times = [time for time, _ in run.changes]
    assert all(later - earlier >= 10 for earlier, later in pairwise(times))
    before = len(run.changes)
    run.follow(policy, 600)
    assert len(run.changes) - before <= 8, run.changes[
        before:
    ]  # it tries again now and then, and does not swing


@pytest.mark.parametrize("seed", range(6))
def test_noise_does_not_mislead_the_policy(seed: int) -> None:
    """Groups finish at random times; the rollout workers are the limit up to 12 of them."""
    speeds: dict[Role, float] = {"rollout": 1.0, "inference": 12.0, "verifier": 30.0}
    numbers: dict[Role, int] = {"rollout": 2, "inference": 1, "verifier": 1}
    run = SimulatedRun(speeds, 40.0, numbers, noise=1.0, random=random.Random(seed))
    run.follow(ElasticPolicy({"rollout": (2, 16)}), 300)
    assert run.speed() >= 0.8 * 12.0
    run.train = 3.0  # training becomes the limit: most rollout workers have nothing to do
    run.follow(policy := ElasticPolicy({"rollout": (2, 16)}), 900)
    assert run.numbers["rollout"] <= 8
    assert run.speed() >= 0.9 * 3.0
    run.train = 40.0
    run.follow(policy, 900)
    assert run.speed() >= 0.8 * 12.0


def test_a_number_that_cannot_be_had_is_not_asked_for_again_at_once() -> None:
    speeds: dict[Role, float] = {"rollout": 1.0, "inference": 50.0}
    run = SimulatedRun(speeds, 40.0, {"rollout": 2, "inference": 1})
    policy = ElasticPolicy({"rollout": (1, 16)})
    asked: list[int] = []
    for second in range(300):
        run.groups += run.speed()
        change = policy.observe(float(second), run.observation())
        if change is not None:
            asked.append(change.number)
            policy.refuse(change, float(second))
    assert asked == [4, 3]  # then nothing more is left to try for some time


def test_the_policy_waits_for_workers_that_start() -> None:
    speeds: dict[Role, float] = {"rollout": 1.0, "inference": 50.0}
    run = SimulatedRun(speeds, 40.0, {"rollout": 2, "inference": 1}, start_s=60.0)
    run.follow(ElasticPolicy({"rollout": (1, 16)}), 150)
    (first, _), (second, _), *_ = run.changes
    assert second - first >= 70


def test_a_disturbed_window_decides_nothing() -> None:
    speeds: dict[Role, float] = {"rollout": 1.0, "inference": 50.0}
    run = SimulatedRun(speeds, 40.0, {"rollout": 2, "inference": 1})
    policy = ElasticPolicy({"rollout": (1, 16)})
    for second in range(200):
        run.groups += run.speed()
        assert policy.observe(float(second), run.observation()) is None
        if second % 9 == 0:
            policy.disturb()
