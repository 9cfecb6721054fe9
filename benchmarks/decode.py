"""Tokens per second of the torch inference engine, of `model.generate` of transformers and of a vLLM server.

    python benchmarks/decode.py [--vllm path/to/venv/bin/python] [--sizes 0.2M 10M 100M]

All get the same work on the same random models of 0.2 M and 10 M parameters: prompts of 10 to 60 tokens and
answers of long-tailed lengths (lognormal, mean 40, sigma 1, at most 400), drawn at temperature 1, one
compute thread each, as many rows at once as the engines have slots. An answer ends only at its length.
Engines get requests as from an inference worker: all at once, answered by chunks. `generate` takes the
prompts in batches, each of which runs to its longest answer; only the requested tokens count. It runs only
the small model. Rounds alternate and the medians are compared, so that other load on the machine affects all
equally.

`limit` is the tokens per second of a machine that does nothing but the products with the model's weights, at
the rate of one large product here, or nothing but read the weights once per step, whichever is slower. Both
rates are measured between the rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import numpy as np
import structlog
import torch
from anyio.abc import TaskGroup
from numpy.typing import NDArray
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from stretto.array import Array
from stretto.component import Context
from stretto.engine import Chunk, GenerateRequest, InferenceEngine, Sampling
from stretto.models.version_files import FolderPublisher, open_version
from stretto.weights import WeightUpdate
from stretto_torch import TorchInferenceConfig
from stretto_torch.inference import TorchInferenceEngine
from stretto_vllm import VllmConfig
from stretto_vllm.engine import VllmEngine

VOCABULARY = 101


@dataclass(frozen=True)
class Work:
    """Prompts, and the number of tokens to generate for each."""

    prompts: Sequence[NDArray[np.int32]]
    lengths: Sequence[int]

    @property
    def tokens(self) -> int:
        """Total number of tokens to generate."""
        return sum(self.lengths)


def make_work(count: int) -> Work:
    random = np.random.default_rng(0)
    # exp(mu + sigma^2 / 2) is the mean of a lognormal distribution.
    lengths = random.lognormal(np.log(40) - 0.5, 1.0, count).astype(int).clip(1, 400)
    prompts = [random.integers(1, VOCABULARY, random.integers(10, 61), np.int32) for _ in range(count)]
    return Work(prompts, lengths.tolist())


MODELS: dict[str, dict[str, Any]] = {
    "0.2M": {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "10M": {
        "hidden_size": 320,
        "intermediate_size": 1280,
        "num_hidden_layers": 6,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    },
    "100M": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}


def make_model(size: str, folder: Path) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **MODELS[size],
    )
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    model.save_pretrained(folder)
    return model


# ----------------------------------------------------------------------------------------- limit


@dataclass(frozen=True)
class Machine:
    """What one thread reaches here."""

    flops: float
    """Floating-point operations per second of a large float32 product."""
    bytes_s: float
    """Bytes per second read from memory."""

    def limit(self, model: Any, work: Work, slots: int) -> float:
        """Return the tokens per second that this machine cannot exceed, without attention and sampling."""
        weights = sum(each.numel() for name, each in model.named_parameters() if "embed" not in name)
        head = model.lm_head.weight.numel()
        prompts = sum(map(len, work.prompts))
        operations = 2 * (prompts + work.tokens) * weights + 2 * work.tokens * head
        steps = max(*work.lengths, work.tokens / slots)
        read = 4 * steps * (weights + head)
        return work.tokens / max(operations / self.flops, read / self.bytes_s)


def measure_machine() -> Machine:
    """Measure the best of several large products, and of several passes over much memory."""
    square, much = torch.randn(1024, 1024), torch.randn(2**26)
    product_s = min(_seconds(lambda: square @ square) for _ in range(5))
    pass_s = min(_seconds(lambda: much.sum()) for _ in range(5))
    return Machine(2 * 1024**3 / product_s, much.nbytes / pass_s)


def _seconds(call: Callable[[], Any]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started


# ---------------------------------------------------------------------------------- transformers


@torch.inference_mode()
def generate(model: Any, work: Work, batch: int) -> None:
    """Generate all answers, batch by batch."""
    for first in range(0, len(work.prompts), batch):
        tokens, mask = left_padded(work.prompts[first : first + batch])
        longest = max(work.lengths[first : first + batch])
        answers = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answers.shape[1] == tokens.shape[1] + longest, "something ended an answer early"


def left_padded(prompts: Sequence[NDArray[np.int32]]) -> tuple[Tensor, Tensor]:
    columns = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), columns, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, columns - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, columns - len(prompt) :] = 1
    return tokens, mask


# ---------------------------------------------------------------------------------------- engine


class Engine:
    """An engine, and the answers in progress."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._rounds = 0
        self._unfinished = 0
        self._tokens = 0
        self._finished = anyio.Event()

    async def start(self, weights: WeightUpdate, tasks: TaskGroup) -> None:
        """Load the model and serve these weights."""
        await self._engine.start(self._count, tasks)
        await self._engine.swap(weights)

    async def stop(self) -> None:
        """Stop the engine."""
        await self._engine.stop()

    async def generate(self, work: Work) -> None:
        """Request all answers at once, and wait for them. The prompts are others in each round, so that no
        engine has them in its cache."""
        self._rounds += 1
        self._unfinished, self._tokens, self._finished = len(work.prompts), 0, anyio.Event()
        for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
            sampling = Sampling(max_tokens=length, ignore_eos=True)
            tokens = (prompt + self._rounds) % VOCABULARY
            request = GenerateRequest(f"{self._rounds}/{i}", Array.of(tokens), (i,), sampling, 0)
            self._engine.generate(request)
        await self._finished.wait()
        assert self._tokens == work.tokens, f"{self._tokens} tokens arrived of {work.tokens}"

    def _count(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            assert chunk.finish != "error", chunk.error
            self._tokens += len(chunk.tokens)
            self._unfinished -= bool(chunk.finish)
        if not self._unfinished:
            self._finished.set()


# ---------------------------------------------------------------------------------------- rounds

# An engine is several times faster than `generate`: repeated, it runs about as long in each round.
REPEATS = 4


def engines_of(folder: Path, slots: int, vllm: str | None) -> dict[str, Engine]:
    """Make the engines, by name."""
    context = Context(
        run="benchmark", name="benchmark", seed=0, model=str(folder), folder=str(folder), worker="inference-0"
    )
    torch_configs = {
        "torch": TorchInferenceConfig(slots=slots),
        "torch, deterministic": TorchInferenceConfig(slots=slots, deterministic=True),
    }
    engines = {name: Engine(TorchInferenceEngine(config, context)) for name, config in torch_configs.items()}
    if vllm is not None:
        engines["vllm"] = Engine(VllmEngine(VllmConfig(python=vllm, slots=slots), context))
    return engines


async def measure(
    model: Any, folder: Path, work: Work, slots: int, rounds: int, *, vllm: str | None, whole: bool
) -> dict[str, list[float]]:
    """Return the tokens per second of each engine in each run.

    Args:
        whole: include `generate`.
    """
    engines = engines_of(folder, slots, vllm)
    names = ["transformers"] * whole + list(engines)
    rates: dict[str, list[float]] = {name: [] for name in names}
    versions = FolderPublisher(folder / "versions", keep=1, shard_gb=1.0)
    note = versions.publish(0, ((name, each.data) for name, each in model.named_parameters()))
    async with anyio.create_task_group() as tasks:
        for engine in engines.values():
            await engine.start(open_version(note, Path(note.address)), tasks)
            await engine.generate(make_work(slots))
        if whole:
            generate(model, make_work(slots), slots)

        for _ in range(rounds):
            if whole:
                started = perf_counter()
                generate(model, work, slots)
                rates["transformers"].append(work.tokens / (perf_counter() - started))
            for name, engine in engines.items():
                for _ in range(REPEATS if whole else 1):
                    started = perf_counter()
                    await engine.generate(work)
                    rates[name].append(work.tokens / (perf_counter() - started))
        for engine in engines.values():
            await engine.stop()
        tasks.cancel_scope.cancel()
    return rates


def show(size: str, rates: Mapping[str, list[float]]) -> dict[str, float]:
    """Print a model's table, and return the medians."""
    median = {name: statistics.median(each) for name, each in rates.items()}
    print(f"{size + ' parameters':22} {'tokens/s':>9} {'worst':>9} {'best':>9} {'torch is':>9}")
    for name, each in rates.items():
        times = median["torch"] / median[name]
        print(f"{name:22} {median[name]:9.0f} {min(each):9.0f} {max(each):9.0f} {times:8.2f}x")
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description="tokens per second of the torch engine and others")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each, in turn")
    parser.add_argument("--slots", type=int, default=64, help="slots, and prompts in a batch of generate")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--sizes", nargs="+", choices=MODELS, default=["0.2M", "10M"])
    parser.add_argument("--vllm", help="interpreter with vLLM; without it vLLM is not measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

    work = make_work(arguments.requests)
    print(f"{len(work.prompts)} requests, {work.tokens} tokens, {arguments.slots} slots, 1 thread")
    medians: dict[str, dict[str, float]] = {}
    limits: dict[str, float] = {}
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = make_model(size, folder)
            options = {"vllm": arguments.vllm, "whole": size == "0.2M"}
            run = partial(measure, model, folder, work, arguments.slots, arguments.rounds, **options)
            medians[size] = show(size, anyio.run(run))
            machine = measure_machine()
            limits[size] = machine.limit(model, work, arguments.slots)
            print(
                f"{'limit':22} {limits[size]:9.0f}, of which torch reaches"
                f" {medians[size]['torch'] / limits[size]:.0%} ({machine.flops / 1e9:.0f} GFLOP/s,"
                f" {machine.bytes_s / 1e9:.0f} GB/s)"
            )
    against = {
        size: round(median["torch"] / median["vllm"], 3)
        for size, median in medians.items()
        if "vllm" in median
    }
    generate_ratio = {
        size: round(median["torch"] / median["transformers"], 3)
        for size, median in medians.items()
        if "transformers" in median
    }
    result = {
        "ratio": {"transformers": generate_ratio, "vllm": against},
        "deterministic_cost": {
            size: round(median["torch"] / median["torch, deterministic"], 3)
            for size, median in medians.items()
        },
        "of_limit": {size: round(medians[size]["torch"] / limit, 3) for size, limit in limits.items()},
        "tokens_per_s": {
            size: {name: round(rate) for name, rate in median.items()} for size, median in medians.items()
        },
        "rounds": arguments.rounds,
        "slots": arguments.slots,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
