"""The texts of the canary, and what an engine's worker makes of their logprobs."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from stretto.array import Array
from stretto.assembly.compose import compose_mapping
from stretto.rl.batch import Batch
from stretto.rl.drift import Drift
from stretto.weights import Canary
from stretto.workers.inference import drift_of_canary
from stretto.workers.training.canary import Probe, probe_of

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


class Forward:
    """An engine for which a token's logprob is minus its place in its sequence."""

    def forward(self, batch: Batch, *, temperature: float) -> torch.Tensor:
        assert temperature == 1
        return -batch.positions().float()


@pytest.mark.parametrize(
    ("canary", "inference", "lengths"),
    [
        ({}, {"context_length": 96}, [32, 32, 32, 32, 64]),
        ({"tokens": 8, "sequences": 1}, {"context_length": 50}, [8, 49]),
        ({"tokens": 8, "sequences": 1, "depth": 20}, {}, [8, 20]),
        ({"tokens": 8, "sequences": 1, "depth": 0}, {}, [8]),
        ({"tokens": 64, "sequences": 1}, {}, [64]),  # no shorter text beside it
    ],
)
def test_one_text_is_as_long_as_an_answer(
    canary: dict[str, Any], inference: dict[str, Any], lengths: list[int]
) -> None:
    document = {
        "name": "canary",
        "steps": 1,
        "model": str(QUICKSTART / "model"),
        "algorithm": "grpo",
        "reward": "exact",
        "dataset": {"use": "jsonl", "path": str(QUICKSTART / "train.jsonl")},
        "sampling": {"max_tokens": 64},
        "inference": {"use": "torch", "canary": canary, **inference},
    }
    probe = probe_of(compose_mapping(document).config)
    assert isinstance(probe, Probe)
    scored = probe.score(cast("Any", Forward()))
    assert [len(text) for text in scored.texts] == lengths
    assert [part.numpy().tolist() for part in scored.logprobs] == [[*range(-1, -n, -1)] for n in lengths]


def test_a_fault_behind_many_tokens_is_not_averaged_away() -> None:
    long, short = np.full(64, -1, np.float32), np.full(16, -1, np.float32)
    texts = tuple(Array.of(np.zeros(len(part) + 1, np.int32)) for part in (short, long))
    canary = Canary(texts, (Array.of(short), Array.of(long)))
    assert drift_of_canary(canary, [short, long]) == Drift(0, 0)
    far = np.where(np.arange(64) < 48, long, long - 0.5)
    assert drift_of_canary(canary, [short, far]) == Drift(0.5, 0.5)
    near = np.where(np.arange(16) < 8, short, short - 1)  # 8 of the 32 tokens of the first quarter
    assert drift_of_canary(canary, [near, long]) == Drift(0.25, 1)
