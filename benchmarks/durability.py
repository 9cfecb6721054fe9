"""The cost of durability: the quickstart with its folder on a disk, against its folder in memory.

    python benchmarks/durability.py

Journal, log and tickets are JetStream streams with file storage, in `bus/store` of a run's folder. In the
runs "memory" the run's whole folder is in /dev/shm, so that the same files never reach a disk; nothing else
differs. So the ratio includes what checkpoints, metrics and logs cost. Rounds alternate, and medians are
compared. Steps per second count from the first ticket to the last step, without evaluations. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from whole_runs import QUICKSTART, summary_of

ROUNDS = 3


def measure(out: Path, seed: int, steps: int) -> tuple[float, float]:
    """Run the quickstart in the folder `out`. Return steps per second, and the final size of the store in
    MB."""
    summary = summary_of(QUICKSTART, out, f"seed={seed}", f"steps={steps}", "evaluation=null")
    sizes = [file.stat().st_size for file in (out / "bus" / "store").rglob("*") if file.is_file()]
    return steps / summary["train_wall_s"], sum(sizes) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of a run")
    parser.add_argument("--folder", type=Path, help="a folder on the disk; default where temporary files are")
    options = parser.parse_args()
    speeds: dict[str, list[float]] = {"disk": [], "memory": []}
    print(f"{'seed':>4} {'folder':>7} {'steps/s':>8} {'store MB':>9}")
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        folders = {"disk": Path(disk), "memory": Path(memory)}
        for seed in range(1, ROUNDS + 1):
            for where in sorted(folders, reverse=seed % 2 == 0):
                speed, size = measure(folders[where] / str(seed), seed, options.steps)
                speeds[where].append(speed)
                print(f"{seed:>4} {where:>7} {speed:>8.3f} {size:>9.1f}", flush=True)
    median = {where: statistics.median(measured) for where, measured in speeds.items()}
    print(
        json.dumps(
            {
                "steps_per_s": {where: round(speed, 3) for where, speed in median.items()},
                "ratio": round(median["disk"] / median["memory"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
