"""A real run that has ended: its kept samples say the same as its figures.

That they are what the rollout workers finished says their digest, which the audit of every run compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from stretto.records.samples.store import SampleStore

STEPS = 12
REWARD = """
def score(prompt, completion, answer):
    return {"reward": (len(completion) % 5) / 4, "even": float(len(completion) % 2 == 0)}
"""


@pytest.mark.slow
def test_kept_samples_give_the_figures_of_metrics_jsonl(start: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"{n}+2=", "answer": str(n + 2)} for n in range(10)]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = start(
        f"steps={STEPS}",
        f"reward={{use: function, function: '{tmp_path}/rewards.py:score'}}",
        f"evaluation.dataset={{use: jsonl, path: {tmp_path}/heldout.jsonl}}",
        "evaluation.every=4",
        "samples.keep=all",
    )
    run.assert_completed(STEPS)
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
