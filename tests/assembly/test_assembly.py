"""What follows from a run file before the run begins."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.assembly.worker_numbers import EVALUATOR

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


def assembled(*overrides: str) -> Assembly:
    paths = (
        f"model={QUICKSTART}/model",
        f"dataset.path={QUICKSTART}/train.jsonl",
        f"evaluation.dataset.path={QUICKSTART}/heldout.jsonl",
    )
    return Assembly(compose(QUICKSTART / "run.yaml", [*paths, *overrides]))


@pytest.mark.parametrize(
    "overrides",
    [
        *("inference.replicas=2", "inference.gpus=1", "inference=mock training=mock"),
        *("launcher=slurm", "evaluation.own_engine=false", "steps=0"),
    ],
)
def test_evaluations_share_the_engines(overrides: str) -> None:
    assembly = assembled(*overrides.split())
    assert EVALUATOR not in [worker.id for worker in assembly.workers]
    assert assembly.evaluation_pace(1024) == 0


def test_evaluations_have_their_own_engine_where_memory_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly = assembled()
    assert [worker.id for worker in assembly.workers if worker.role == "inference"] == [
        *("inference-0", EVALUATOR)
    ]
    document = assembly.composed.document["evaluation"]
    assert document["own_engine"] is True  # a resume of the run has it, wherever it is
    assert yaml.safe_load(yaml.safe_dump(document))["own_engine"] is True
    # 0.2 M parameters, eight times in float32, and as much again
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=12e6))
    assert not assembled().has_evaluator
    assert assembled("evaluation.own_engine=true").has_evaluator


def test_the_rows_of_an_evaluation_begin_in_time_for_the_next_one() -> None:
    """0.4 for each group, or 1,024 in four fifths of 10 steps of 32 groups."""
    assert assembled("evaluation.every=0").evaluation_pace(1024) == 0.4
    assert assembled("evaluation.every=200").evaluation_pace(1024) == 0.4
    assert assembled("evaluation.every=10").evaluation_pace(1024) == 4.0
