"""Bytes of images on the bus for each group, and images per second of the whole chain.

    python benchmarks/images.py

Runs `examples/vision/run.yaml` with one and with two engines. Every image is read, decoded and tokenized by a
rollout worker, sent to an engine, sampled from 8 times and trained on. Bytes are those of the files that
engines received; `in_each_request` is what they would be if each sample's request carried its image. The last
line is one JSON object.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from whole_runs import summary_of

VISION = Path(__file__).parent.parent / "examples" / "vision"
STEPS = 30
WARM = 5
"""Steps before the measured ones."""


def main() -> None:
    figures: dict[str, dict[str, float]] = {}
    print(f"{'engines':>7} {'bytes a group':>13} {'in each request':>15} {'images/s':>9} {'tokens/s':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for engines in (1, 2):
            own = figures[str(engines)] = measure(Path(folder, str(engines)), engines)
            print(
                f"{engines:>7} {own['bytes_per_group']:>13.0f} {own['in_each_request']:>15.0f} "
                f"{own['images_per_s']:>9.1f} {own['tokens_per_s']:>9.0f}",
                flush=True,
            )
    print(json.dumps({name: {k: round(v, 1) for k, v in own.items()} for name, own in figures.items()}))


def measure(out: Path, engines: int) -> dict[str, float]:
    """Return the figures of a run with this number of engines."""
    summary = summary_of(
        VISION / "run.yaml", out, "evaluation=null", f"steps={STEPS}", f"inference.replicas={engines}"
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][WARM:]
    seconds = lines[-1]["time_s"] - lines[0]["time_s"]
    batch = summary["ledger"]["trained"] / STEPS
    received = sum(event["bytes"] for event in events(out, "images came"))
    return {
        "bytes_per_group": received / summary["ledger"]["trained"],
        "in_each_request": 8 * mean_bytes(),
        "images_per_s": batch * (len(lines) - 1) / seconds,
        "tokens_per_s": sum(line["tokens"] for line in lines[1:]) / seconds,
    }


def events(out: Path, name: str) -> list[dict[str, Any]]:
    """Return what the engines' workers logged under a name."""
    logs = sorted((out / "logs").glob("inference-*.jsonl"))
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


def mean_bytes() -> float:
    """Return the mean size of an image's file, one for each row."""
    rows = [json.loads(line) for line in (VISION / "train.jsonl").read_text().splitlines()[:200]]
    files = [(VISION / path).stat().st_size for row in rows for path in row["images"]]
    return sum(files) / len(files)


if __name__ == "__main__":
    main()
