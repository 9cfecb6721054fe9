"""Training, sampling and a new version's pause on a GPU that trainer and engine share, in bfloat16.

    python benchmarks/gpu.py [--size 0.5B] [--slots 128] [--tokens 256] [--steps 8] [key=value ...]

The model is a Qwen2 of random weights, whose tokenizer has one word for each token, so nothing is downloaded.
The reward is the share of even words. One run with both on the GPU gives the figures of steps; an engine
alone gives those of decoding. Without a GPU both compute on the CPU, which only shows that the benchmark
works: `--size tiny`. Arguments override the run file. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import numpy as np
import structlog
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from decode import Engine, Work
from stretto.component import Context
from stretto.models.version_files import FolderPublisher, open_version
from stretto_torch import TorchInferenceConfig
from stretto_torch.inference import TorchInferenceEngine
from whole_runs import summary_of

PROMPT, GROUP, GROUPS = 64, 8, 16
ROOM = 64
"""Tokens of a slot beside prompt and answer, for the canary."""
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "0.5B": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5B": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
REWARD = """\
def even(completions, **kwargs):
    answers = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
    return [sum(word % 2 == 0 for word in answer) / max(1, len(answer)) for answer in answers]
"""


def make_model(size: str, folder: Path) -> None:
    """Write a model in bfloat16 with its tokenizer."""
    vocabulary = SIZES[size]["vocab_size"]
    words = {"<pad>": 0, "<end>": 1} | {f"w{token}": token for token in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen2Config(max_position_embeddings=4096, tie_word_embeddings=True, **special, **SIZES[size])
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen2ForCausalLM(config)
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)


def run_file(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write the run file, its rows and its reward."""
    rng, vocabulary = random.Random(0), SIZES[arguments.size]["vocab_size"]
    rows = [
        {"prompt": " ".join(f"w{rng.randrange(2, vocabulary)}" for _ in range(PROMPT))} for _ in range(512)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    shared = "gpus: 1, share: {}" if torch.cuda.is_available() else "gpus: 0"
    length = PROMPT + arguments.tokens + ROOM
    file = folder / "run.yaml"
    file.write_text(
        f"""\
name: gpu
model: {folder}/model
algorithm: {{use: grpo, group_size: {GROUP}}}
training: {{use: torch, lr: 1.0e-5, dtype: bfloat16, micro_batch_tokens: 16384, {shared.format(0.5)}}}
inference:
  {{use: torch, dtype: bfloat16, slots: {arguments.slots}, context_length: {length}, {shared.format(0.4)}}}
sampling: {{max_tokens: {arguments.tokens}}}
reward: {{use: function, function: "{folder}/reward.py:even"}}
dataset: {{use: jsonl, path: {folder}/rows.jsonl}}
queue: {{batch_size: {GROUPS}, max_staleness: 2}}
steps: {arguments.steps}
"""
    )
    return file


def of_steps(run: Path) -> dict[str, float]:
    """Return the medians of a run's steps, but for its first two."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "ledger" in line][2:]

    def median(name: str) -> float:
        return statistics.median(line[name] for line in steps)

    mismatch = [line for line in lines if "mismatch_max" in line]
    return {
        "step_s": median("step_s"),
        "train_s": median("train_s"),
        "train_tokens_per_s": median("train_tokens_per_s"),
        "swap_pause_s": max(line.get("swap_pause_s", 0.0) for line in steps),
        "mismatch_mean": statistics.mean(line["mismatch_mean"] for line in mismatch),
        "mismatch_max": max(line["mismatch_max"] for line in mismatch),
    }


async def of_decoding(folder: Path, size: str, slots: int, tokens: int) -> dict[str, float]:
    """Return the figures of an engine alone whose slots are full from the first token to the last."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()  # this process has made the model
    length = PROMPT + tokens + ROOM
    config = TorchInferenceConfig(slots=slots, context_length=length, dtype="bfloat16", gpus=int(has_gpu))
    model = folder / "model"
    context = Context(run="b", name="b", seed=0, model=str(model), folder=str(folder), worker="inference-0")
    engine = Engine(TorchInferenceEngine(config, context))
    note = FolderPublisher(folder / "versions", keep=1, shard_gb=1.0).publish(
        0, load_file(model / "model.safetensors").items()
    )
    rng, vocabulary = np.random.default_rng(0), SIZES[size]["vocab_size"]
    prompts = [rng.integers(2, vocabulary, PROMPT, np.int32) for _ in range(slots)]
    seconds = 0.0
    async with anyio.create_task_group() as tasks:
        await engine.start(open_version(note, Path(note.address)), tasks)
        await engine.generate(Work(prompts, [8] * slots))
        began = perf_counter()
        await engine.generate(Work(prompts, [tokens] * slots))
        seconds = perf_counter() - began
        await engine.stop()
        tasks.cancel_scope.cancel()
    memory = torch.cuda.max_memory_allocated() / 2**30 if has_gpu else 0.0
    return {
        "decode_tokens_per_s": slots * tokens / seconds,
        "decode_step_ms": 1000 * seconds / tokens,
        "engine_gb": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="training and sampling on one GPU")
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--steps", type=int, default=8)
    known, overrides = parser.parse_known_args()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{known.size} parameters on {device}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(known.size, folder / "model")
        run = folder / "run"
        summary_of(run_file(folder, known), run, *overrides)
        figures = of_steps(run) | anyio.run(of_decoding, folder, known.size, known.slots, known.tokens)
    for name, value in figures.items():
        print(f"{name:22} {value:12.4g}")
    rounded = {name: round(value, 5) for name, value in figures.items()}
    print(json.dumps({"size": known.size, "device": device, **rounded}))


if __name__ == "__main__":
    main()
