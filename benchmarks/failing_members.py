"""What samples that fail cost, and what they do to the data.

    python benchmarks/failing_members.py [ROWS]

Runs `stretto run` with mock engines over all rows once, in groups of 8: without failures, with a reward that
raises for 5 % of its calls, with one that raises the more often the longer the answer is (0 to 20 %), both
drawn anew in each call, and with one that always raises for the same answers, the more often the longer they
are: with `workflow.failure_reward: missing`, and with the default. For each: the share of the begun samples
that are not trained, rows that were trained once and rows that were given up, and the Kolmogorov-Smirnov
distance between the lengths of the trained answers and those of the run without failures. Then by how many
tokens the mean length of the trained answers differs from that of all, and what `failures` in `summary.json`
says of it. The last line is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

BATCH = 50
_BY_LENGTH = "0.2 * min(1.0, len(completion) / 400)"
_ALWAYS = f"float(zlib.crc32((completion + str(n)).encode()) / 2**32 < {_BY_LENGTH})"
REWARDS = {
    "none": ("0.0", "null"),
    "5 % of calls": ("0.05", "null"),
    "by length": (_BY_LENGTH, "null"),
    "same answers": (_ALWAYS, "missing"),
    "same, penalized": (_ALWAYS, "null"),
}
"""How likely the scoring of an answer fails, and the reward of an answer that is itself at fault."""
RUN = """\
name: failing-members
algorithm: {{use: grpo, group_size: 8}}
training: {{use: mock, seconds_per_step: 0.01}}
inference: {{use: mock, tokens_per_s: 1000000, slots: 1000, mean_tokens: 100, sigma: 0.7}}
sampling: {{max_tokens: 400}}
verifier: {{children: 2}}
workflow: {{use: single_turn, failure_reward: {failure_reward}}}
reward: {{use: function, function: {folder}/reward.py:score}}
dataset: {{use: jsonl, path: {folder}/rows.jsonl}}
queue: {{batch_size: {batch}, max_staleness: 2}}
samples: {{keep: all}}
steps: {steps}
"""


def run(folder: Path, rows: int, chance: str, failure_reward: str) -> Path:
    """Run over all rows once, and return the run's folder."""
    lines = (json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1), "n": n}) + "\n" for n in range(rows))
    (folder / "rows.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(
        textwrap.dedent(
            f"""\
            import random, zlib

            def score(prompt, completion, n):
                if random.random() < {chance}:
                    raise RuntimeError("flaky")
                return float(len(completion) % 2)
            """
        )
    )
    filled = RUN.format(folder=folder, batch=BATCH, steps=rows // BATCH, failure_reward=failure_reward)
    (folder / "run.yaml").write_text(filled)
    out = folder / "run"
    command = [sys.executable, "-m", "stretto", "run", str(folder / "run.yaml"), f"out={out}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return out


def trained(run: Path) -> tuple[NDArray[np.int64], int]:
    """Return the lengths of the trained answers, and the number of rows that were trained just once."""
    lengths: list[int] = []
    groups: dict[int, set[int]] = {}
    for file in (run / "samples").glob("train-*.parquet"):
        table = pq.read_table(file, columns=["sampled", "row", "ticket", "outcome"]).to_pylist()
        for row in table:
            if row["outcome"] == "trained":
                lengths.append(row["sampled"])
                groups.setdefault(row["row"], set()).add(row["ticket"])
    return np.sort(np.array(lengths)), sum(len(tickets) == 1 for tickets in groups.values())


def distance(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """Return the Kolmogorov-Smirnov distance of two sorted samples."""
    values = np.union1d(first, second)
    shares = (np.searchsorted(each, values, side="right") / len(each) for each in (first, second))
    return float(np.abs(np.subtract(*shares)).max())


def main() -> None:
    """Run all, and print the table."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    lengths: dict[str, NDArray[np.int64]] = {}
    results: dict[str, dict[str, Any]] = {}
    print(
        f"{'failures':<16}{'not trained':>12}{'rows once':>11}{'given up':>10}{'KS':>8}{'shift':>9}"
        f"{'reported':>10}{'penalized':>11}"
    )
    for name, (chance, failure_reward) in REWARDS.items():
        with tempfile.TemporaryDirectory() as folder:
            out = run(Path(folder), rows, chance, failure_reward)
            summary = json.loads((out / "summary.json").read_text())
            lengths[name], once = trained(out)
        members = summary["members"]
        results[name] = {
            "not_trained": 1 - members["trained"] / members["sampled"],
            "rows_once": once,
            "given_up": len(summary["given_up"]),
            "ks": distance(lengths["none"], lengths[name]),
            "shift": float(lengths[name].mean() - lengths["none"].mean()),
            "reported": summary["failures"]["answer_tokens"]["shift"],
            "penalized": summary["failures"]["penalized"],
        }
        row = results[name]
        print(
            f"{name:<16}{row['not_trained']:>12.4f}{once:>11}{row['given_up']:>10}{row['ks']:>8.4f}"
            f"{row['shift']:>9.3f}{row['reported']:>10.3f}{row['penalized']:>11}"
        )
    print(json.dumps({"rows": rows, **results}))


if __name__ == "__main__":
    main()
