"""Whole runs keep their samples: every trajectory once, also when the writer and the kernel are killed."""

import re
import signal
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from commands import stretto
from fixture_types import Start
from plugin_files import write_reward
from stretto.records.samples.store import SampleFilter, SampleStore


@pytest.mark.slow
def test_each_trajectory_is_kept_once_though_writer_and_kernel_die(start: Start, tmp_path: Path) -> None:
    evaluation = f"evaluation.dataset={{use: jsonl, path: {tmp_path}/rows.jsonl}}"
    values = ("steps=14", "checkpoint.every=4", "checkpoint.keep=1", evaluation, "evaluation.rows=3")
    run = start(*values, "samples.keep=all")
    run.until_step(2)
    run.until(lambda: list((run.folder / "samples").glob("train-*")))
    run.process_with("stretto.records.samples").send_signal(signal.SIGKILL)
    run.until_step(6)
    run.kill()
    run = start(resume=run)
    run.assert_completed(14)
    run.assert_audit_is_clean()
    store = SampleStore(run.folder)
    rows = store.find(limit=None, tokens=True)
    assert max(Counter(row["id"] for row in rows).values()) == 1
    trained = [row for row in rows if row["outcome"] == "trained"]
    assert Counter(row["step"] for row in trained) == dict.fromkeys(range(1, 15), 16)
    assert all(len(row["tokens"]) == row["length"] for row in rows)
    assert {row["step"] for row in rows if row["outcome"] == "evaluated"} == {0, 14}
    checks = {check.name: check for check in run.audit().checks}
    assert checks["trained samples"].unchecked == ""
    done = stretto("samples", run.folder, "--ticket", trained[-1]["ticket"], "--limit", 1)
    assert re.search(r"^attempt \d+ of row \d+, taken by .*; trained in step 14$", done.stdout, re.M)


@pytest.mark.slow
def test_a_run_that_keeps_no_samples_has_no_writer(start: Start) -> None:
    run = start("steps=2", "samples.keep=none")
    run.until_step(1)
    assert run.process_with("stretto.records.samples") is None
    run.assert_completed(2)
    assert not (run.folder / "samples").exists()


@pytest.mark.slow
def test_failed_and_filtered_tickets_are_kept(start: Start, tmp_path: Path) -> None:
    body = """
        def score(completion, n):
            if n % 7 == 3: raise ValueError('no reward for this')
            return float(len(completion) % 2)
    """
    run = start("steps=5", *write_reward(tmp_path, body), "samples.keep=all")
    run.assert_completed(5)
    store = SampleStore(run.folder)
    failed = store.find(SampleFilter(outcome="failed"), limit=None)
    assert failed
    assert all("no reward for this" in row["reason"] for row in failed)
    assert all(row["reward"] is None and row["text"] for row in failed), "what was sampled is kept"


@pytest.mark.slow
def test_kept_samples_give_the_figures_of_metrics_jsonl(start: Start, tmp_path: Path) -> None:
    """Their digest, which the audit compares, says that they are what the rollout workers finished."""
    body = """
        def score(prompt, completion, answer):
            return {"reward": (len(completion) % 5) / 4, "even": float(len(completion) % 2 == 0)}
    """
    evaluation = f"evaluation.dataset={{use: jsonl, path: {tmp_path}/rows.jsonl}}"
    values = ("steps=12", evaluation, "evaluation.rows=10", "evaluation.every=4")
    run = start(*values, *write_reward(tmp_path, body), "samples.keep=all")
    run.assert_completed(12)
    run.assert_audit_is_clean()
    kept = SampleStore(run.folder).find(limit=None)
    for line in run.metrics():
        batch = [row for row in kept if (row["outcome"], row["step"]) == ("trained", line["step"])]
        assert len(batch) == 16
        assert fmean(row["reward"] for row in batch) == pytest.approx(line["reward"], abs=1e-6)
        assert fmean(row["sampled"] for row in batch) == pytest.approx(line["length"], abs=1e-6)
        assert max(row["staleness"] for row in batch) == line["staleness_max"]
        even = fmean(row["metrics"]["even"] for row in batch)
        assert even == pytest.approx(line["reward/even"], abs=1e-6)
    for line in run.evaluations():
        answers = [row for row in kept if (row["purpose"], row["step"]) == ("eval", line["step"])]
        assert len(answers) == line["evaluation/samples"]
        reward = fmean(row["reward"] for row in answers)
        assert reward == pytest.approx(line["evaluation/reward"], abs=1e-6)
