"""How the local launcher places workers on GPUs."""

from __future__ import annotations

import pytest

from stretto.errors import LaunchError
from stretto.launcher import Job, Resources, visible_gpus
from stretto_local import place


def job(worker: str, gpus: int, share: float = 1.0) -> Job:
    resources = Resources(gpus=gpus, share=share)
    return Job(worker=worker, role="trainer", command=(), env={}, resources=resources, log="")


def test_gpus_are_shared_only_where_the_shares_allow_it() -> None:
    two = [job("trainer", 1, 0.6), job("inference", 1, 0.4)]
    assert place(two, ["0"]) == {"trainer": ["0"], "inference": ["0"]}
    assert place(two, ["0", "1"]) == {"trainer": ["0"], "inference": ["1"]}  # apart where there is room
    whole = [job("a", 1, 0.5), job("b", 1, 0.5), job("c", 1)]
    placed = place(whole, ["0", "1"])
    assert placed["a"] == placed["b"] != placed["c"]
    assert place([job("cpu", 0)], []) == {"cpu": []}
    with pytest.raises(LaunchError, match=r"inference needs 1 GPU \(`gpus`\) with 50 % of the memory"):
        place([job("trainer", 1, 0.6), job("inference", 1, 0.5)], ["0"])


def test_visible_gpus_are_those_of_the_environment() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 5"}) == ["2", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
