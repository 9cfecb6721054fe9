"""Every policy-gradient algorithm on the quickstart's task, 150 steps at `max_staleness: 2`: does it learn?

    python benchmarks/algorithms.py [NAME ...]

Held-out accuracy of sampled answers before and after. Last line: one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from whole_runs import QUICKSTART, summary_of

STEPS = 150
# What an algorithm needs beside its defaults on this task.
OPTIONS: dict[str, list[str]] = {
    "cispo": [],
    "dapo": [],
    "grpo": [],
    "gspo": [],
    "m2po": [],
    "reinforce_pp": ["algorithm.baseline=true"],
    "rloo": [],
    "sapo": [],
}


def main() -> None:
    found: dict[str, dict[str, float]] = {}
    print(f"{'algorithm':14} {'before':>7} {'after':>7} {'wall s':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or OPTIONS:
            options = (f"algorithm.use={name}", f"steps={STEPS}", "evaluation.every=0", *OPTIONS[name])
            summary = summary_of(QUICKSTART, Path(folder, name), *options)
            before, after = (summary["evaluation"][place]["accuracy"] for place in (0, -1))
            wall = summary["train_wall_s"]
            print(f"{name:14} {before:>7.3f} {after:>7.3f} {wall:>7.1f}", flush=True)
            found[name] = {"before": round(before, 3), "after": round(after, 3)}
    print(json.dumps({"accuracy": found, "steps": STEPS}))


if __name__ == "__main__":
    main()
