"""The quickstart, asynchronous against synchronous, at equal samples: same model, steps and seed.

    python benchmarks/quickstart.py

Wall time is measured from the first ticket to the last step. Both runs evaluate only at the beginning and at
the end. Rounds alternate and medians are compared. The last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from whole_runs import QUICKSTART, summary_of

ROUNDS = 3


def main() -> None:
    walls: dict[int, list[float]] = {0: [], 2: []}
    accuracies: dict[int, list[float]] = {0: [], 2: []}
    print(f"{'seed':>4} {'max_staleness':>13} {'wall s':>8} {'overlap':>8} {'accuracy':>16}")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, ROUNDS + 1):
            for bound in (0, 2):
                out = Path(folder, f"{bound}-{seed}")
                options = (f"seed={seed}", f"queue.max_staleness={bound}", "evaluation.every=0")
                summary = summary_of(QUICKSTART, out, *options)
                first, last = (summary["evaluation"][place]["accuracy"] for place in (0, -1))
                walls[bound].append(summary["train_wall_s"])
                accuracies[bound].append(last)
                print(
                    f"{seed:>4} {bound:>13} {summary['train_wall_s']:>8.1f} {summary['overlap']:>8.2f} "
                    f"{first:>7.3f} -> {last:.3f}",
                    flush=True,
                )
    median = {bound: statistics.median(times) for bound, times in walls.items()}
    print(
        json.dumps(
            {
                "wall_s": {str(bound): round(time, 2) for bound, time in median.items()},
                "ratio": round(median[2] / median[0], 3),
                "accuracy": {str(bound): values for bound, values in accuracies.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
