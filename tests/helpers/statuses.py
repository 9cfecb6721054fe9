"""A status of a run in which everything that the live view shows has a figure."""

import time
from typing import Any

import msgspec

from stretto.records.status import (
    AdviceStatus,
    EvaluationProgress,
    EvaluationStatus,
    Stall,
    Status,
    Verdict,
    WorkerStatus,
)


def make_status(**changes: Any) -> Status:
    evaluations = [
        EvaluationStatus(version, score, "accuracy", 40, 0) for version, score in ((0, 0.25), (50, 0.5))
    ]
    status = Status(
        written=time.time(),
        pid=7,
        name="quickstart",
        folder="/runs/one",
        state="running",
        version=60,
        steps=200,
        wall_s=3725.0,
        left_s=600.0,
        now="training",
        verdict=Verdict("learning", "learning: reward +0.250 in 60 steps; bound by generation"),
        newest={"step": 60, "reward": 0.5, "loss": -0.0312, "entropy": 1.25, "grad_norm": 0.5, "step_s": 2.0}
        | {"wait/evaluation_s": 1.2, "wait/groups_s": 0.25, "wait/late_ticket_s": 0.05, "wait/swap_s": 0.0}
        | {"train_s": 0.5, "length": 12.0, "staleness": 1.5, "staleness_max": 2, "train_tokens_per_s": 4000},
        recent={"reward": 0.5, "zero_variance_groups": 0.44, "entropy": 1.25, "grad_norm": 0.5},
        curves={"reward": [0.0, 0.25, 0.5], "loss": [0.1], "entropy": [], "grad_norm": [1.0, 1.0]},
        evaluations=evaluations,
        best=evaluations[1],
        evaluating=EvaluationProgress(100, 10, 40, 150),
        ledger={"issued": 64, "trained": 60, "filtered": 0, "expired": 0, "failed": 1, "in_flight": 3},
        finished=2,
        reasons={"failed: reward raised": 1},
        generate_tokens_per_s=1234.0,
        advice=[AdviceStatus("truncation", 40, "half of the answers end at the limit of tokens")],
        connected=True,
        restarts=1,
        workers=[WorkerStatus("rollout-0", True, 0.2, 0.0), WorkerStatus("trainer-0", True, 0.1, 33.0)],
        starting={"inference-0": "loading"},
        waits=[Stall("rollout-0", "verifier-0", "score", 94.0)],
    )
    return msgspec.structs.replace(status, **changes)
