"""Which machine and which GPUs a worker gets."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import LaunchError
from stretto.launcher import Job, visible_gpus
from stretto.nodes import Node, Spot, place
from worker_jobs import job

HERE = [Node("this machine", 8, ("0", "1"))]


def placed(jobs: list[Job], nodes: list[Node]) -> dict[str, str]:
    return {worker: spot.node for worker, spot in place(jobs, nodes, {}).items()}


def test_gpus_are_shared_only_where_the_shares_allow_it() -> None:
    two = [job("trainer-0", 1, 0.6), job("inference-0", 1, 0.4)]
    one_gpu = [Node("this machine", 8, ("0",))]
    assert {spot.gpus for spot in place(two, one_gpu, {}).values()} == {("0",)}
    apart = place(two, HERE, {})
    assert (apart["trainer-0"].gpus, apart["inference-0"].gpus) == (("0",), ("1",))
    whole = place([job("rollout-0", 1, 0.5), job("rollout-1", 1, 0.5), job("rollout-2", 1)], HERE, {})
    assert whole["rollout-0"] == whole["rollout-1"] != whole["rollout-2"]
    assert place([job("rollout-0")], [Node("this machine")], {}) == {"rollout-0": Spot("this machine", ())}
    with pytest.raises(
        LaunchError, match=r"inference-0 needs 1 GPU \(`gpus`\), 50 % of the memory of each unused"
    ):
        place([job("trainer-0", 1, 0.6), job("inference-0", 1, 0.5)], one_gpu, {})


def test_visible_gpus_are_those_of_the_environment() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 5"}) == ["2", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_ranks_stay_together_and_engines_spread() -> None:
    nodes = [Node("a", 4, ("0", "1")), Node("b", 4, ("0", "1"))]
    jobs = [job(f"{role}-{number}", 1) for role in ("trainer", "inference") for number in range(2)]
    assert placed(jobs, nodes) == {"trainer-0": "a", "trainer-1": "a", "inference-0": "b", "inference-1": "b"}
    idle = [Node("a", 4), Node("b", 4)]
    roles = ("trainer-0", "inference-0", "inference-1", "rollout-0", "rollout-1")
    spread = placed([job(worker) for worker in roles], idle)
    assert spread["inference-0"] == spread["trainer-0"]  # beside the weights
    assert spread["inference-1"] != spread["inference-0"]
    assert spread["rollout-1"] != spread["rollout-0"]


def test_a_tensor_parallel_group_is_on_one_node() -> None:
    nodes = [Node("a", 8, ("0", "1", "2")), Node("b", 8, ("0", "1", "2"))]
    ranks = [job(f"trainer-{rank}", 1, unit=f"training {rank // 2}") for rank in range(4)]
    found = placed(ranks, nodes)
    assert found["trainer-0"] == found["trainer-1"] != found["trainer-2"] == found["trainer-3"]
    with pytest.raises(
        LaunchError, match="on one node with 3 other ranks of its group; 2 nodes have at most 3 GPUs"
    ):
        place([job(f"trainer-{rank}", 1, unit="training 0") for rank in range(4)], nodes, {})


def test_memory_limits_a_node() -> None:
    nodes = [Node("a", 2, memory_gb=10), Node("b", 2, memory_gb=4)]
    jobs = [job(f"rollout-{number}", memory_gb=4) for number in range(3)]
    assert Counter(placed(jobs, nodes).values()) == {"a": 2, "b": 1}
    with pytest.raises(
        LaunchError, match=r"4 GiB of memory \(`memory_gb`\); 2 nodes have at most no GPU and 10 GiB"
    ):
        place([*jobs, job("rollout-3", memory_gb=4)], nodes, {})


def test_running_jobs_keep_their_gpus() -> None:
    one = job("trainer-0", 1)
    spot = Spot("this machine", ("1",))
    assert place([job("inference-0", 1)], HERE, {"trainer-0": (one, spot)})["inference-0"].gpus == ("0",)


@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from((0.25, 0.5, 1.0)), st.integers(1, 4)), max_size=12
    ),
    nodes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_no_gpu_is_used_more_than_once(jobs: list[tuple[int, float, int]], nodes: list[int]) -> None:
    wanted = [job(f"rollout-{index}", *each[:2], threads=each[2]) for index, each in enumerate(jobs)]
    machines = [Node(str(index), 4, tuple(map(str, range(gpus)))) for index, gpus in enumerate(nodes)]
    try:
        spots = place(wanted, machines, {})
    except LaunchError:
        return
    used = Counter[tuple[str, str]]()
    for each in wanted:
        spot = spots[each.worker]
        assert len(set(spot.gpus)) == each.resources.gpus
        for gpu in spot.gpus:
            assert gpu in machines[int(spot.node)].gpus
            used[spot.node, gpu] += each.resources.share  # pyright: ignore[reportArgumentType] - a sum of shares
    assert all(share <= 1 for share in used.values())
