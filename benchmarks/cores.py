"""`threads: auto` against one thread for each engine, on a model whose training the engine waits for.

    python benchmarks/cores.py

The model has 6 M parameters and the quickstart's tokenizer; its weights are random, so only its speed is
measured. Rounds alternate. Compared are the trained tokens per second of the last 20 steps, in the median,
because `auto` measures over the steps before. The last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from whole_runs import QUICKSTART, summary_of

ROUNDS = 3
STEPS = 48
MEASURED = 20


def main() -> None:
    speeds: dict[str, list[float]] = {"1": [], "auto": []}
    print(f"{'round':>5} {'threads':>8} {'tokens/s':>9} {'cores used':>10}  numbers")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder, "model"))
        for number in range(1, ROUNDS + 1):
            for threads in speeds:
                out = Path(folder, f"{threads}-{number}")
                options = (f"training.threads={threads}", f"inference.threads={threads}", f"steps={STEPS}")
                summary_of(
                    QUICKSTART, out, f"model={model}", "evaluation=null", "queue.batch_size=16", *options
                )
                lines = steps_of(out)
                speed = statistics.median(line["step_tokens_per_s"] for line in lines)
                used = statistics.mean(line["cores_used"] for line in lines)
                speeds[threads].append(speed)
                print(f"{number:>5} {threads:>8} {speed:>9.0f} {used:>10.2f}  {numbers_of(out)}", flush=True)
    median = {threads: statistics.median(each) for threads, each in speeds.items()}
    ratios = [auto / one for one, auto in zip(speeds["1"], speeds["auto"], strict=True)]
    print(
        json.dumps(
            {
                "tokens_per_s": {threads: round(speed) for threads, speed in median.items()},
                "ratio": round(median["auto"] / median["1"], 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
            }
        )
    )


def make_model(folder: Path) -> Path:
    """Write a model with random weights, and return its folder."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART.parent / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def steps_of(out: Path) -> list[dict[str, Any]]:
    """Return the lines of the last steps, without the two that generate nothing any more."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return lines[-MEASURED - 2 : -2]


def numbers_of(out: Path) -> str:
    file = out / "division.json"
    return json.dumps(json.loads(file.read_text())["numbers"]) if file.exists() else ""


if __name__ == "__main__":
    main()
