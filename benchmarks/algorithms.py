"""Every policy-gradient algorithm on the quickstart's task, 150 steps at `max_staleness: 2`: does it learn?

    python benchmarks/algorithms.py [NAME ...]

Held-out accuracy of sampled answers before and after. Last line: one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = Path(__file__).parent.parent / "examples" / "quickstart" / "run.yaml"
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


def accuracy_of(name: str, out: Path) -> tuple[float, float, float]:
    """Before, after, and the wall time."""
    overrides = [
        f"algorithm.use={name}",
        f"steps={STEPS}",
        "evaluation.every=0",
        f"out={out}",
        *OPTIONS[name],
    ]
    command = [sys.executable, "-m", "stretto", "run", str(RUN), *overrides]
    subprocess.run(command, check=True, capture_output=True)
    summary = json.loads((out / "summary.json").read_text())
    first, *_, last = (point["accuracy"] for point in summary["evaluation"])
    return first, last, summary["train_wall_s"]


def main() -> None:
    found: dict[str, dict[str, float]] = {}
    print(f"{'algorithm':14} {'before':>7} {'after':>7} {'wall s':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or OPTIONS:
            before, after, wall = accuracy_of(name, Path(folder, name))
            print(f"{name:14} {before:>7.3f} {after:>7.3f} {wall:>7.1f}", flush=True)
            found[name] = {"before": round(before, 3), "after": round(after, 3)}
    print(json.dumps({"accuracy": found, "steps": STEPS}))


if __name__ == "__main__":
    main()
