"""Which rank works on which rows, and where what it wrote is to be found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.algorithm import AlgorithmConfig, Loss, Model, forward, function, generate, score, train
from stretto.assembly.dataflow import graph_of
from stretto.assembly.placement import Placement, group_of_worker, split_groups, split_rows
from stretto.config import Groups, ModelConfig, RunConfig
from stretto.dataset import DatasetConfig
from stretto.engine import TrainingConfig

LENGTHS = st.lists(st.integers(1, 600), min_size=1, max_size=60)
ROWS = st.lists(st.tuples(st.integers(1, 600), st.integers(0, 9)), min_size=1, max_size=60)
"""The length of each row, and the number of its unit or group."""


@given(LENGTHS, st.integers(1, 8))
def test_shares_are_whole_and_balanced(lengths: list[int], parts: int) -> None:
    shares = split_rows(lengths, parts)
    assert len(shares) == parts
    assert sorted(index for indices in shares for index in indices) == list(range(len(lengths)))
    assert all(indices == sorted(indices) for indices in shares)
    loads = [sum(lengths[index] for index in indices) for indices in shares]
    assert max(loads) - min(loads) <= max(lengths)
    if len(lengths) >= parts:
        assert all(shares)
    assert split_rows(lengths, parts) == shares


@given(ROWS, st.integers(2, 5))
def test_units_are_not_split(rows: list[tuple[int, int]], parts: int) -> None:
    shares = split_rows([length for length, _ in rows], parts, [unit for _, unit in rows])
    units = [{rows[index][1] for index in indices} for indices in shares]
    assert sum(map(len, units)) == len(set.union(*units))
    assert sorted(index for indices in shares for index in indices) == list(range(len(rows)))


class Wide(TrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two ranks work together on each part."""

    @property
    def data_parallel(self) -> int:
        return self.processes // 2


class Two(Groups, frozen=True, kw_only=True, forbid_unknown_fields=True):
    critics: Wide = Wide(processes=4)


@pytest.fixture
def placed() -> Placement:
    loss = Loss(lambda outputs, batch: (outputs, {}), "token")
    models = {"actor": Model(), "critic": Model(head="value")}
    calls = [
        generate("actor", samples=2),
        score(),
        forward("critic", writes="values"),
        forward("actor", writes="proximal_logprobs"),
        function(lambda batch: {}, reads=("values",), writes=("advantages",), name="advantages"),
        train("actor", loss, reads=("advantages", "proximal_logprobs")),
        train("critic", loss, reads=("advantages",)),
    ]
    run = RunConfig(
        name="t",
        steps=1,
        algorithm=AlgorithmConfig(use="t"),
        dataset=DatasetConfig(use="t"),
        training=TrainingConfig(processes=3),
        groups=Two(),
        models={"critic": ModelConfig(group="critics")},
    )
    return Placement(run, graph_of(calls, models))


def test_rows_are_with_the_rank_that_computed_them(placed: Placement) -> None:
    lengths = [50, 10, 10, 30, 20]
    assert split_rows(lengths, 2) == [[0, 1], [2, 3, 4]]
    zero, two = "trainer-critics-0", "trainer-critics-2"
    alone = [0, 1, 2, 3, 4]  # each row is a group
    assert placed.owners("values", lengths, alone) == [zero, zero, two, two, two]
    assert placed.owners("values", lengths, [0, 1, 1, 0, 1]) == [zero, zero, two, two, two]  # else 80 and 40
    assert placed.owners("values", lengths, [0, 1, 1, 1, 1]) == [two, zero, zero, zero, zero]
    assert placed.owners("advantages", lengths, alone) == ["trainer-0"] * 5
    assert set(placed.owners("proximal_logprobs", lengths, alone)) == {"trainer-0", "trainer-1", "trainer-2"}


@given(ROWS, st.integers(1, 5))
def test_groups_are_split_only_if_whole_ones_would_be_uneven(rows: list[tuple[int, int]], parts: int) -> None:
    weights, groups = [weight for weight, _ in rows], [group for _, group in rows]
    shares = split_groups(weights, parts, groups)
    assert sorted(index for indices in shares for index in indices) == list(range(len(rows)))
    whole = split_rows(weights, parts, groups)
    heaviest = max(sum(weights[index] for index in indices) for indices in whole)
    even = heaviest * parts <= 1.25 * sum(weights) and all(whole)
    assert shares == (whole if even else split_rows(weights, parts))


def test_ranks_of_one_part_follow_each_other(placed: Placement) -> None:
    critics = placed.groups["critics"]
    assert [critics.part_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [group_of_worker(worker) for worker in critics.workers] == [("critics", rank) for rank in range(4)]
    assert group_of_worker("trainer-2") == ("training", 2)
    assert placed.lead.name == "training"
