"""How much training and generation overlap, with mock engines that each take 1 s per batch, for 12 steps.

    python benchmarks/overlap.py

One after the other they take 24 s; with full overlap 13 s: the first generation, then twelve steps. The wall
time is measured from the first ticket to the last step of a real run through the command line. The last line
is one JSON object.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from whole_runs import summary_of

STEPS, BATCH, GROUP, LENGTH = 12, 8, 4, 32


def run_file(folder: Path) -> Path:
    rows = "".join(json.dumps({"prompt": f"{n}", "answer": "x"}) + "\n" for n in range(100))
    (folder / "rows.jsonl").write_text(rows)
    file = folder / "run.yaml"
    samples = BATCH * GROUP
    file.write_text(
        f"""\
name: overlap
algorithm: {{use: grpo, group_size: {GROUP}}}
training: {{use: mock, seconds_per_step: 1.0}}
# As many slots as a batch has samples, and all of a batch's tokens in one second.
inference: {{use: mock, slots: {samples}, tokens_per_s: {samples * LENGTH}, mean_tokens: {LENGTH}}}
reward: exact
dataset: {{use: jsonl, path: {folder}/rows.jsonl}}
queue: {{batch_size: {BATCH}}}
steps: {STEPS}
"""
    )
    return file


def main() -> None:
    wall: dict[str, float] = {}
    overlap: dict[str, float] = {}
    print(f"{'max_staleness':>13} {'wall s':>8} {'generate s':>11} {'train s':>8} {'overlap':>8}")
    with tempfile.TemporaryDirectory() as folder:
        file = run_file(Path(folder))
        for bound in (0, 1):
            out = Path(folder, f"out-{bound}")
            summary = summary_of(file, out, f"queue.max_staleness={bound}")
            busy = summary["busy_s"]
            wall[str(bound)], overlap[str(bound)] = summary["train_wall_s"], summary["overlap"]
            print(
                f"{bound:>13} {summary['train_wall_s']:>8.2f} {busy['generate']:>11.2f} "
                f"{busy['train']:>8.2f} {summary['overlap']:>8.2f}"
            )
    print(json.dumps({"wall_s": wall, "overlap": overlap}))


if __name__ == "__main__":
    main()
