"""Folders of runs as a kernel leaves them, without a kernel: `keep_run(folder, seed=1)`."""

import json
import math
from pathlib import Path
from statistics import pstdev
from typing import Any

from kept_samples import Kept
from kernel_events import done, issued, served, step_measured, write_events
from stretto.bus.messages.events import CallEnded, Cause, KernelBegan
from stretto.records.events.reader import TimedEvent

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\x1b]0;x\x07"
"""What a model, a reward or a run file may say."""
START = 1_700_000_000.0


def keep_run(
    folder: Path,
    *,
    seed: int = 1,
    lr: float = 1e-4,
    steps: int = 40,
    name: str = "kept",
    shift: float = 0.0,
    rewards: bool = False,
) -> Path:
    """Write a finished run of `steps` steps with an evaluation every 10 steps of 8 rows with 2 answers each.

    Args:
        shift: added to the rewards; `shift` = 0.5 makes half of the rows better.
        rewards: its evaluations have no accuracy, only a reward.
    """
    (folder / "bus").mkdir(parents=True)
    document = {"name": name, "seed": seed, "steps": steps, "out": str(folder)}
    document |= {"training": {"use": "torch", "lr": lr}, "queue": {"batch_size": 4}, "note": HOSTILE}
    (folder / "config.yaml").write_text(json.dumps(document))
    (folder / "fingerprints.json").write_text('{"dataset": "a", "evaluation.dataset": "b"}')
    kept = Kept(folder)
    evaluations = [_evaluate(kept, version, shift) for version in range(0, steps + 1, 10)]
    if rewards:
        evaluations = [{**each, "evaluation/accuracy": None} for each in evaluations]
    kept.flush()
    with (folder / "metrics.jsonl").open("w") as file:
        for line in [evaluations[0], *_lines(steps, seed, shift, evaluations)]:
            file.write(json.dumps(line) + "\n")
    _keep_events(folder, steps)
    summary: dict[str, Any] = {
        "status": "completed",
        "wall_s": steps * 2.0 + 1,
        "staleness": {"0": 10, "1": 30, "2": 60},
        "ledger": _ledger(steps),
        "reasons": {f"failed: reward raised {HOSTILE}": 2},
        "problems": [f"tracker raised {HOSTILE}"],
        "advice": [{"rule": "plateau", "since": 3, "said": 5, "until": None, "message": f"raise {HOSTILE}"}],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _lines(steps: int, seed: int, shift: float, evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        noise = 0.05 * math.sin(step * 7 + seed)
        lines.append(
            {"step": step, "time": START + 2.0 * step, "time_s": step * 2.0, "step_s": 2.0, "train_s": 1.0}
            | {"reward": round(1 - math.exp(-step / steps) + shift + noise, 6), "loss": -0.1 + noise}
            | {"entropy": 2 - step / steps, "grad_norm": 1 + noise, "length": 12.0, "staleness": 1.5}
            | {"step_tokens_per_s": 500, "skipped": 0.0, "ledger": _ledger(step), "advice": []}
        )
        lines += [each for each in evaluations[1:] if each["step"] == step]
    return lines


def _ledger(step: int) -> dict[str, int]:
    accounts = {"trained": 4 * step, "filtered": 0, "expired": 0, "failed": 2, "in_flight": 0}
    return {"issued": 4 * step + 2, **accounts}


def _evaluate(kept: Kept, version: int, shift: float) -> dict[str, Any]:
    """Keep an evaluation's answers, and return its line. Row r passes from version 5r on; with a shift, the
    even rows pass always."""
    passed = [float(5 * row <= version or (shift > 0 and row % 2 == 0)) for row in range(8)]
    for row, reward in enumerate(passed):
        kept.group(
            version + row, purpose="eval", text=f"{row} {HOSTILE}", row=row, version=version, reward=reward
        )
    accuracy = sum(passed) / len(passed)
    return {
        "step": version,
        "time_s": version * 2.0,
        "evaluation/accuracy": accuracy,
        "evaluation/reward": accuracy,
        "evaluation/reward_std": pstdev(passed),
        "evaluation/samples": 16,
        "evaluation/failed": 0,
    }


def _keep_events(folder: Path, steps: int) -> None:
    events: list[TimedEvent] = [(START, KernelBegan(1, 0, 0.0))]
    for step in range(1, steps + 1):
        now = START + 2 * step
        events += [
            (now - 1.9, issued(step)),
            (now - 1, done(step, worker=f"rollout-{HOSTILE}", seconds=1.5, score_s=0.2)),
            (now - 0.1, CallEnded(now - 0.9, "training", "train(actor)", step - 1, 0.7)),
            (now, step_measured(step, now - 1, (step,), ((Cause("late_ticket", 3), 1.0),))),
            (now + 0.1, served(now, "inference-0", step, 0.01)),
        ]
    write_events(folder, events)
