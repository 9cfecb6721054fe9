"""Runs whose processes are killed, interrupted or scaled, in the simulation.

`tests/runs` has each promise once with real processes.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from simulated_runs import simulate
from stretto.testing.simulation import Fault

AFTER_STEP = "a step is in the journal"


def fault(kind: str, who: str = "", *, step: int = 0, at: float = 0.001, **fields: float) -> Fault:
    """A fault after a step is in the journal, or at a time."""
    point = AFTER_STEP if step else ""
    return Fault(kind=kind, who=who, point=point, nth=max(1, step), at=at, **fields)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def mock_state(folder: Path, version: int) -> dict[str, int]:
    """State of the trainer in a checkpoint."""
    return json.loads((folder / "checkpoints" / f"step-{version:06d}" / "mock.json").read_text())


# ------------------------------------------------------------------------------- things that die


def test_killed_workers_are_started_again_and_nothing_is_lost(folder: Path) -> None:
    roles = ("rollout", "verifier", "inference")
    run = simulate(folder, *(fault("kill", role, step=2 * n) for n, role in enumerate(roles, 1)))

    summary = run.assert_completed(10)

    assert summary["restarts"] == 3
    assert summary["ledger"]["trained"] == 40
    ready = Counter(worker for worker, state in run.changes() if state == "ready")
    assert (ready["rollout-0"], ready["verifier-0"]) == (2, 2)
    assert sorted((ready["inference-0"], ready["inference-1"])) == [1, 2]


def test_a_worker_that_cannot_live_ends_the_run_with_its_last_words(folder: Path, tmp_path: Path) -> None:
    # Fine when the run is composed, and never again.
    body = "def score(prompt, completion):\n    return 1\nopen(__file__ + '.once', 'x')\n"
    (tmp_path / "broken.py").write_text(body)
    (tmp_path / "broken.py.once").touch()
    reward = {"use": "function", "function": f"{tmp_path}/broken.py:score"}

    run = simulate(folder, reward=reward, launcher={"max_restarts": 1})

    assert run.outcome.status == "failed"
    assert "verifier-0 ended 2 times" in run.outcome.reason
    assert (
        len(
            run.said(
                "worker failed error=PluginError: reward 'function' of stretto 0.1.0 raised FileExistsError"
            )
        )
        == 2
    )
    assert run.outcome.violations == []


def test_a_run_that_has_lost_its_trainer_can_be_resumed(folder: Path) -> None:
    run = simulate(folder, fault("kill", "trainer", step=5), checkpoint={"every": 2})

    summary = run.assert_completed(10)

    [resumed] = run.said("RESUME")
    assert "trainer-0 was lost at version 5 (killed by signal 9); `stretto resume" in resumed
    assert run.said("step repeated")[0].endswith("version=5")
    assert summary["ledger"]["trained"] == 40


def test_a_worker_that_stood_still_is_not_lost(folder: Path) -> None:
    run = simulate(
        folder, fault("stop", "trainer", step=2, seconds=8.0), fault("stop", "rollout", step=4, seconds=8.0)
    )

    assert run.assert_completed(10)["restarts"] == 0


# ---------------------------------------------------------------------------- interrupt and resume


def test_an_interrupt_drains_and_the_run_goes_on_from_its_checkpoint(folder: Path) -> None:
    run = simulate(folder, fault("int", "kernel", step=4), checkpoint={"every": 0})

    summary = run.assert_completed(10)

    assert [line for line in run.said("RESUME") if "SIGINT" in line]
    assert not run.said("step repeated")
    assert summary["ledger"]["trained"] == 40
    assert mock_state(folder, 10)["steps"] == 10


def test_a_second_interrupt_ends_at_once(folder: Path) -> None:
    slow = {"seconds_per_step": 30.0}
    interrupts = (fault("int", "kernel", step=1), fault("int", "kernel", step=1, at=1.0))
    run = simulate(folder, *interrupts, training=slow, steps=2, queue={"max_staleness": 0})

    run.assert_completed(2)

    first, *_ = run.said("RESUME")
    assert float(first.split()[0]) < 45


def test_a_killed_kernels_run_repeats_the_journal_and_trains_every_ticket_once(folder: Path) -> None:
    run = simulate(
        folder, fault("kill", "kernel", step=8), checkpoint={"every": 3}, queue={"max_staleness": 1}
    )

    ledger = run.assert_completed(10)["ledger"]

    assert run.said("step repeated")
    assert (ledger["trained"], ledger["expired"], ledger["failed"]) == (40, 0, 0)
    assert mock_state(folder, 10)["steps"] == 10


def test_a_run_without_a_checkpoint_is_repeated_from_its_beginning(folder: Path) -> None:
    evaluation = {"every": 3, "rows": 4, "sampling": {"temperature": 0}}
    run = simulate(folder, fault("kill", "kernel", step=5), checkpoint={"every": 0}, evaluation=evaluation)

    summary = run.assert_completed(10)

    assert len(run.said("step repeated")) >= 4
    assert [point["version"] for point in summary["evaluation"]] == [0, 3, 6, 9, 10]


def test_an_interrupt_in_the_last_evaluation_leaves_a_run_that_can_be_finished(folder: Path) -> None:
    evaluation = {"every": 0, "rows": 40, "samples": 8, "sampling": {"temperature": 0}}
    run = simulate(folder, fault("int", "kernel", step=2, at=0.1), steps=2, evaluation=evaluation)

    summary = run.assert_completed(2)

    assert len(run.said("RESUME")) == 1
    assert [point["version"] for point in summary["evaluation"]] == [0, 2]


def test_resuming_passes_over_a_damaged_checkpoint(folder: Path) -> None:
    def damage(run: Path) -> None:
        newest = max((run / "checkpoints").glob("step-*"))
        (newest / "mock.json").write_text('{"steps": 9999}')
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 7')

    run = simulate(
        folder, fault("kill", "kernel", step=7), between=damage, checkpoint={"every": 2, "keep": 3}
    )

    assert run.outcome.status == "completed"
    assert run.outcome.violations == [
        "audit, digests: checkpoint step-000006: mock.json differs from its hash"
    ]
    assert run.summary()["lost"] == {"steps": 0, "groups": 0, "messages": 0}
    for message in ("checkpoint is damaged", "last line is broken"):
        assert run.said(message)


def test_a_run_on_a_full_disk_ends_and_can_be_resumed(folder: Path) -> None:
    run = simulate(folder, fault("full disk", step=5, seconds=3.0), checkpoint={"every": 3})

    run.assert_completed(10)

    [resumed] = run.said("RESUME")
    assert "No space left on device" in resumed
    assert "make room, then: stretto resume FOLDER/run" in resumed


def test_a_run_whose_last_checkpoint_cannot_be_written_has_failed_and_goes_on_when_it_can(
    folder: Path,
) -> None:
    run = simulate(folder, fault("full disk", step=10, seconds=8.0), checkpoint={"every": 0})

    run.assert_completed(10)

    [resumed] = run.said("RESUME")
    assert "the checkpoint of version 10 was not written: trainer-0 refused: " in resumed
    assert "No space left on device" in resumed
    assert len(run.said("checkpoint failed")) > 1


def test_an_outage_beyond_its_limit_ends_the_run_and_names_the_bus(folder: Path) -> None:
    run = simulate(
        folder, fault("outage", step=4, seconds=8.0), bus={"outage_s": 4.0}, checkpoint={"every": 2}
    )

    assert run.outcome.status == "failed"
    assert "no connection to nats-server at nats://simulated:4222 for 4 s" in run.outcome.reason


# ------------------------------------------------------------------------------- numbers of workers


def test_a_run_gets_more_workers_and_fewer(folder: Path) -> None:
    # The number is 1 + 3 * pick, rounded down.
    grow = [fault("scale", role, step=1, pick=0.5) for role in ("rollout", "verifier")]
    shrink = [fault("scale", role, step=5, pick=0.0) for role in ("rollout", "verifier")]
    run = simulate(folder, *grow, *shrink)

    summary = run.assert_completed(10)

    assert summary["restarts"] == 0
    assert {("rollout-1", "ready"), ("verifier-1", "ready")} <= set(run.changes())
    assert {("rollout-1", "left"), ("verifier-1", "left")} <= set(run.changes())
    assert summary["ledger"]["failed"] == summary["ledger"]["expired"] == 0
