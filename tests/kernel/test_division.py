"""The division of cores: a run of known speed, on virtual cores, is divided as is best for it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.kernel.division import CoreDivision, StepLoad

TRAIN, RANKS, ENGINE = "training.threads", "training.processes", "inference.threads"


@dataclass
class Machine:
    """A run whose parts get faster with threads and ranks as given: speed-up by a power of the number."""

    cores: float
    train_s: float
    generate_s: float
    of_threads: float = 0.8
    of_ranks: float = 0.9
    of_engine: float = 0.8
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's time."""
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def step(self, numbers: Mapping[str, int]) -> StepLoad:
        threads, ranks, engine = (numbers.get(key, 1) for key in (TRAIN, RANKS, ENGINE))
        train_s = self.train_s / (threads**self.of_threads * ranks**self.of_ranks)
        generate_s = self.generate_s / engine**self.of_engine
        step_s = max(train_s, generate_s)
        work = train_s * threads * ranks + generate_s * engine
        step_s *= max(1.0, work / (self.cores * step_s))  # more threads than cores: all wait
        used = min(1.0, work / (self.cores * step_s))
        step_s *= math.exp(self.random.normal(0, self.noise))
        return StepLoad(1000, step_s, min(train_s, step_s), min(generate_s, step_s), used)


def divided(machine: Machine, *keys: str, most: int = 32) -> tuple[CoreDivision, int]:
    """The division of a run that has settled, and the number of steps that this took."""
    division = CoreDivision(keys, {}, machine.cores, most)
    steps = 0
    while not division.settled:
        division.step(machine.step(division.numbers))
        steps += 1
        assert steps < 500
    return division, steps


def test_a_part_that_the_others_wait_for_gets_the_idle_cores() -> None:
    division, steps = divided(Machine(8, train_s=1.0, generate_s=0.1), TRAIN, ENGINE)
    assert division.numbers == {TRAIN: 8, ENGINE: 1}
    assert steps <= 60
    division, _ = divided(Machine(8, train_s=0.1, generate_s=1.0), TRAIN, ENGINE)
    assert division.numbers == {TRAIN: 1, ENGINE: 8}


def test_two_cores_whose_second_one_is_idle_go_to_training() -> None:
    division, _ = divided(Machine(2, train_s=1.0, generate_s=0.12), TRAIN, ENGINE)
    assert division.numbers == {TRAIN: 2, ENGINE: 1}


def test_threads_that_make_steps_slower_are_given_back() -> None:
    machine = Machine(8, train_s=1.0, generate_s=0.3, of_threads=-0.5)
    division, steps = divided(machine, TRAIN, ENGINE)
    assert division.numbers == {TRAIN: 1, ENGINE: 1}
    assert steps <= 20  # a hopeless trial ends early


def test_where_no_core_is_idle_nothing_is_tried() -> None:
    division, steps = divided(Machine(2, train_s=1.0, generate_s=0.95), TRAIN, ENGINE)
    assert (division.numbers, steps) == ({TRAIN: 1, ENGINE: 1}, 8)


def test_a_run_without_auto_is_settled_from_the_start() -> None:
    division = CoreDivision([], {}, 8, 32)
    assert division.settled
    assert not division.step(StepLoad(1, 1.0, 1.0, 0.0, 0.1))


@pytest.mark.parametrize(("of_threads", "best"), [(0.5, {TRAIN: 1, RANKS: 8}), (0.97, {TRAIN: 8, RANKS: 1})])
def test_ranks_replace_threads_where_they_are_faster(of_threads: float, best: dict[str, int]) -> None:
    machine = Machine(8, train_s=1.0, generate_s=0.05, of_threads=of_threads, of_ranks=0.9)
    division, _ = divided(machine, TRAIN, RANKS)
    assert division.numbers == best


def test_a_batch_has_a_group_for_each_rank() -> None:
    division, _ = divided(Machine(16, train_s=1.0, generate_s=0.0), RANKS, most=5)
    assert division.numbers == {RANKS: 4}


def test_noise_of_a_tenth_decides_wrongly_in_few_runs() -> None:
    """The second thread gains a fifth, or costs a tenth; the standard deviation of a step is a tenth."""
    taken = {
        power: sum(
            divided(Machine(2, 1.0, 0.12, power, noise=0.1, random=np.random.default_rng(seed)), TRAIN)[
                0
            ].numbers[TRAIN]
            == 2
            for seed in range(100)
        )
        for power in (math.log2(1.2), math.log2(0.9))
    }
    assert taken[math.log2(1.2)] >= 95
    assert taken[math.log2(0.9)] <= 5


@given(
    cores=st.integers(1, 64),
    generate_s=st.floats(0.0, 3.0),
    of_threads=st.floats(-1.0, 1.0),
    of_ranks=st.floats(-1.0, 1.0),
    of_engine=st.floats(-1.0, 1.0),
)
def test_a_division_settles_soon_and_is_never_slower_than_1(
    cores: int, generate_s: float, of_threads: float, of_ranks: float, of_engine: float
) -> None:
    machine = Machine(cores, 1.0, generate_s, of_threads, of_ranks, of_engine)
    division, steps = divided(machine, TRAIN, RANKS, ENGINE)
    assert machine.step(division.numbers).speed >= machine.step({}).speed
    assert steps <= 400


def test_a_resumed_run_begins_with_the_best_numbers_so_far(tmp_path: Path) -> None:
    file, machine = tmp_path / "division.json", Machine(8, train_s=1.0, generate_s=0.05, of_threads=0.6)
    division = CoreDivision([TRAIN], {}, 8, 32, file)
    while division.numbers == {TRAIN: 1}:
        division.step(machine.step(division.numbers))
    assert CoreDivision([TRAIN], {}, 8, 32, file).numbers == {TRAIN: 1}  # 2 is only a trial
    while not division.settled:
        division.step(machine.step(division.numbers))
    again = CoreDivision([TRAIN], {}, 8, 32, file)
    assert (again.numbers, again.settled) == ({TRAIN: 8}, True)
    more = CoreDivision([TRAIN, ENGINE], {}, 8, 32, file)  # another key became `auto`
    assert (more.numbers, more.settled) == ({TRAIN: 8, ENGINE: 1}, False)
    assert json.loads(file.read_text()) == {"numbers": {TRAIN: 8}, "settled": True}
