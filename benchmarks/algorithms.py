"""Does every algorithm learn the quickstart's task in 150 steps? Those that sample run with staleness.

    python benchmarks/algorithms.py [NAME ...]

The figures are the held-out accuracy of greedy answers before and after; for `reward_model`, the share of
pairs that it orders correctly, at its first step and over its last ten. The teacher of `distill` is the final
model of `grpo`. The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from whole_runs import QUICKSTART, summary_of

STEPS = 150
PAIRS = "dataset={use: jsonl, path: examples/quickstart/pairs.jsonl}"
SLOWER = "training.lr=1e-4"
# Options that an algorithm needs on this task besides its defaults.
OPTIONS: dict[str, list[str]] = {
    "cispo": [],
    "dapo": [],
    "grpo": [],
    "distill": ["models.teacher.path={folder}/grpo/checkpoints/step-000150/model"],
    "gspo": [],
    "m2po": [],
    "ppo": [
        "algorithm.group_size=8",
        SLOWER,
        "groups={critics: {use: torch, lr: 1e-3}}",
        "models.critic.group=critics",
    ],
    "reinforce_pp": ["algorithm.baseline=true"],
    "rloo": [],
    "sapo": [],
    "sft": ["algorithm.completion_column=answer", SLOWER, "queue.batch_size=64"],
    "dpo": [PAIRS, "algorithm.variant=ipo", "algorithm.beta=0.3", SLOWER, "queue.batch_size=64"],
    "reward_model": [PAIRS, "queue.batch_size=64", "training.lr=1e-3", "evaluation=null"],
}


def main() -> None:
    wanted = sys.argv[1:] or list(OPTIONS)
    if "distill" in wanted and "grpo" not in wanted:
        wanted.insert(0, "grpo")  # its teacher
    found: dict[str, dict[str, float]] = {}
    print(f"{'algorithm':14} {'before':>7} {'after':>7} {'wall s':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted:
            own = [option.replace("{folder}", folder) for option in OPTIONS[name]]
            every = [] if "evaluation=null" in own else ["evaluation.every=0"]
            out = Path(folder, name)
            summary = summary_of(QUICKSTART, out, f"algorithm.use={name}", f"steps={STEPS}", *every, *own)
            before, after = accuracy_of(summary, out)
            print(f"{name:14} {before:>7.3f} {after:>7.3f} {summary['train_wall_s']:>7.1f}", flush=True)
            found[name] = {"before": round(before, 3), "after": round(after, 3)}
    print(json.dumps({"accuracy": found, "steps": STEPS}))


def accuracy_of(summary: dict[str, Any], out: Path) -> tuple[float, float]:
    """Return the accuracy before and after."""
    if summary["evaluation"]:
        return summary["evaluation"][0]["accuracy"], summary["evaluation"][-1]["accuracy"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
    steps = [line["accuracy"] for line in lines if "accuracy" in line]
    return steps[0], sum(steps[-10:]) / 10


if __name__ == "__main__":
    main()
