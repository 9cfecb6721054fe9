"""Do difficulty pools save samples on a mix of easy, fitting and impossible rows?

    python benchmarks/curriculum.py [--seeds N] [key=value ...]

The rows are sums of two to four terms: 180 easy ones without a carry, which the quickstart's model knows; 40
fitting ones, whose carries it forgets; 180 impossible ones, whose answers no model can know. Each seed trains
two runs on the same rows, which differ in the dataset's pools alone. The figure is the number of samples up
to the first evaluation in which greedy answers are right on `TARGET` of the fitting rows. The benchmark also
prints the figure for held-out rows of the same kind. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stretto.records.metrics import MetricsReader
from whole_runs import summary_of

TARGET = 0.95
EASY, FITTING, IMPOSSIBLE, HELDOUT = 180, 40, 180, 100
BATCH, GROUP = 8, 8
SOURCES = ("fitting", "heldout")
QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
POOLS = "{hard: {max: 0, weight: 0.05}, fitting: {max: 0.9}, easy: {weight: 0.05}}"
RUN = f"""
name: curriculum
model: {QUICKSTART / "model"}
algorithm: {{use: grpo, group_size: {GROUP}}}
training: {{use: torch, lr: 2.0e-4}}
inference: {{use: torch, slots: 64, context_length: 96}}
sampling: {{max_tokens: 16}}
reward: exact
dataset:
  use: mix
  parts:
    easy: {{use: jsonl, path: easy.jsonl}}
    fitting: {{use: jsonl, path: fitting.jsonl}}
    impossible: {{use: jsonl, path: impossible.jsonl}}
evaluation:
  dataset:
    use: mix
    parts:
      fitting: {{use: jsonl, path: fitting.jsonl}}
      heldout: {{use: jsonl, path: heldout.jsonl}}
  every: 6
  sampling: {{temperature: 0}}
queue: {{batch_size: {BATCH}, max_staleness: 2}}
checkpoint: {{every: 0}}
samples: {{keep: none}}
steps: 240
"""


def write_rows(folder: Path, seed: int) -> None:
    """Write the parts and the held-out fitting rows, all of them different."""
    rng = random.Random(f"curriculum {seed}")
    easy, fitting = dict[str, str](), dict[str, str]()
    while len(easy) < EASY or len(fitting) < FITTING + IMPOSSIBLE + HELDOUT:
        terms = [rng.randint(1, 9) for _ in range(rng.randint(2, 4))]
        sums = [sum(terms[:count]) for count in range(2, len(terms) + 1)]
        rows = easy if sums[-1] < 10 else fitting
        rows["+".join(map(str, terms)) + "="] = " ".join(map(str, sums))
    sums_with_carries = list(fitting.items())
    impossible = [(prompt, "?") for prompt, _ in sums_with_carries[FITTING : FITTING + IMPOSSIBLE]]
    write(folder / "easy.jsonl", list(easy.items())[:EASY])
    write(folder / "fitting.jsonl", sums_with_carries[:FITTING])
    write(folder / "impossible.jsonl", impossible)
    write(folder / "heldout.jsonl", sums_with_carries[FITTING + IMPOSSIBLE :][:HELDOUT])


def write(file: Path, rows: Sequence[tuple[str, str]]) -> None:
    lines = (json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows)
    file.write_text("".join(lines))


def samples_to_target(folder: Path, name: str, seed: int, overrides: Sequence[str]) -> dict[str, float]:
    """Train one run, and return its number of samples up to the target, by source of the evaluated rows;
    infinity if it does not reach the target."""
    out = folder / name
    pools = [f"dataset.pools={POOLS}"] if name == "pools" else []
    summary_of(folder / "run.yaml", out, f"seed={seed}", *pools, *overrides)
    metrics = MetricsReader(out)
    metrics.read()
    samples: dict[str, float] = {}
    for source in SOURCES:
        accuracies = {line["step"]: line[f"evaluation/accuracy/{source}"] for line in metrics.evaluations}
        reached = [step for step, accuracy in accuracies.items() if accuracy >= TARGET]
        samples[source] = min(reached, default=math.inf) * BATCH * GROUP
        curve = " ".join(f"{accuracies[step]:.2f}" for step in sorted(accuracies))
        print(f"{name:>8} {seed:>5} {source:>8} {samples[source]:>7g}: {curve}", flush=True)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of pairs of runs")
    parser.add_argument("overrides", nargs="*", help="key=value of the run file")
    options = parser.parse_intermixed_args()
    runs: dict[str, list[dict[str, float]]] = {"uniform": [], "pools": []}
    print(f"{'rows':>8} {'seed':>5} {'on':>8} {'samples':>7}: accuracy of each evaluation")
    for seed in range(1, options.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            write_rows(Path(folder), seed)
            Path(folder, "run.yaml").write_text(RUN)
            for name, found in runs.items():
                found.append(samples_to_target(Path(folder), name, seed, options.overrides))
    medians = {
        source: {name: statistics.median(each[source] for each in found) for name, found in runs.items()}
        for source in SOURCES
    }
    for source, each in medians.items():
        print(f"{source}: uniform {each['uniform']:g}, pools {each['pools']:g}")
    ratios = {source: each["pools"] / each["uniform"] for source, each in medians.items()}
    print(
        json.dumps({"ratio": {name: round(each, 3) for name, each in ratios.items() if math.isfinite(each)}})
    )


if __name__ == "__main__":
    main()
