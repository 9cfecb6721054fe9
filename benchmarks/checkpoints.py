"""What checkpoints cost: a run that writes one at every 10th step, against one that writes none on the way.

    python benchmarks/checkpoints.py [--rounds 3] [--only quickstart|large]

Two runs through the command line: the quickstart, and a model of 100 million random parameters (1.2 GB with
its optimizer) that trains on the answers of a mock engine. The run folders are on a disk, if temporary files
are there. Rounds alternate, and medians are compared. Steps per second count from the first ticket to the
last step. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from whole_runs import QUICKSTART, summary_of

EVERY = 10
STEPS = {"quickstart": 60, "large": 25}
MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def large_run_file(folder: Path) -> Path:
    """Write the model and the run file."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    print(f"large: {sum(each.numel() for each in model.parameters()) / 1e6:.0f} million parameters")
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(QUICKSTART.parent / "model").save_pretrained(folder / "model")
    rows = "".join(json.dumps({"prompt": f"{n}+1=", "answer": "x"}) + "\n" for n in range(100))
    (folder / "rows.jsonl").write_text(rows)
    file = folder / "run.yaml"
    file.write_text(
        f"""\
name: large
model: {folder}/model
algorithm: {{use: grpo, group_size: 4}}
training: {{use: torch, threads: 1, lr: 1.0e-6}}
inference: {{use: mock, slots: 64, tokens_per_s: 100000, mean_tokens: 24}}
reward: exact
dataset: {{use: jsonl, path: {folder}/rows.jsonl}}
queue: {{batch_size: 4}}
"""
    )
    return file


def steps_per_s(file: Path, out: Path, name: str, seed: int, every: int) -> float:
    """Run a file once."""
    steps = STEPS[name]
    settings = [f"seed={seed}", f"steps={steps}", "evaluation=null", f"checkpoint.every={every}"]
    return steps / summary_of(file, out, *settings)["train_wall_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(STEPS))
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    print(f"{'run':>10} {'seed':>4} {'every':>5} {'steps/s':>8}")
    for name in [options.only] if options.only else STEPS:
        speeds: dict[int, list[float]] = {EVERY: [], 0: []}
        with tempfile.TemporaryDirectory() as folder:
            file = QUICKSTART if name == "quickstart" else large_run_file(Path(folder))
            for seed in range(1, options.rounds + 1):
                for every in (EVERY, 0) if seed % 2 else (0, EVERY):
                    speed = steps_per_s(file, Path(folder, f"out-{seed}-{every}"), name, seed, every)
                    speeds[every].append(speed)
                    print(f"{name:>10} {seed:>4} {every:>5} {speed:>8.3f}")
        with_them, without = (statistics.median(speeds[every]) for every in (EVERY, 0))
        results[name] = {"steps_per_s": with_them, "without": without, "share": 1 - with_them / without}
        print(f"{name:>10}: checkpoints cost {100 * results[name]['share']:.1f} % of the time")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
