"""Tokens a second of the torch inference engine against `model.generate` of transformers.

    python benchmarks/decode.py

Both get the same work on the same random model of 0.2 M parameters: prompts of 10 to 60 tokens and
answers of long-tailed lengths (lognormal, mean 40, sigma 1, at most 400), drawn at temperature 1, one
compute thread each, as many rows at once as the engine has slots. Nothing ends an answer but its length.
`generate` takes the prompts in batches, each of which runs to its longest answer; only the tokens that
were asked for count. Rounds alternate and the medians are compared, so that whatever else the machine
does meets all alike. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from stretto.array import Array
from stretto.component import Context
from stretto.engine import Chunk, GenerateRequest, Sampling
from stretto.weights import WeightsNote
from stretto_torch import TorchInferenceConfig
from stretto_torch.inference import TorchInferenceEngine

VOCABULARY = 101


@dataclass(frozen=True)
class Work:
    """Prompts, and how many tokens are wanted after each."""

    prompts: Sequence[NDArray[np.int32]]
    lengths: Sequence[int]

    @property
    def tokens(self) -> int:
        """Tokens wanted in all."""
        return sum(self.lengths)


def make_work(count: int) -> Work:
    random = np.random.default_rng(0)
    # exp(mu + sigma^2 / 2) is the mean of a lognormal distribution.
    lengths = random.lognormal(np.log(40) - 0.5, 1.0, count).astype(int).clip(1, 400)
    prompts = [random.integers(1, VOCABULARY, random.integers(10, 61), np.int32) for _ in range(count)]
    return Work(prompts, lengths.tolist())


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


# ---------------------------------------------------------------------------------- transformers


@torch.inference_mode()
def generate(model: Any, work: Work, batch: int) -> None:
    """All answers, batch by batch."""
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


class Weights:
    """The model's own weights as version 0; a `WeightUpdate`."""

    note = WeightsNote(0, "memory", "")
    folder = None

    def __init__(self, model: Any) -> None:
        self._tensors = {name: parameter.data for name, parameter in model.named_parameters()}

    def tensors(self) -> Mapping[str, Tensor]:
        """By name."""
        return self._tensors

    def close(self) -> None:
        """Nothing to close."""


class Engine:
    """A started engine, and the answers it is giving."""

    def __init__(self, folder: Path, config: TorchInferenceConfig) -> None:
        context = Context(run="benchmark", name="benchmark", seed=0, model=str(folder))
        self._engine = TorchInferenceEngine(config, context)
        self._rounds = 0
        self._unfinished = 0
        self._tokens = 0
        self._finished = anyio.Event()

    async def start(self, model: Any, tasks: TaskGroup) -> None:
        """Load and serve the model."""
        await self._engine.start(self._count, tasks)
        await self._engine.swap(Weights(model))

    async def stop(self) -> None:
        """Free everything."""
        await self._engine.stop()

    async def generate(self, work: Work) -> None:
        """All answers, asked for at once."""
        self._rounds += 1
        self._unfinished, self._tokens, self._finished = len(work.prompts), 0, anyio.Event()
        for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
            sampling = Sampling(max_tokens=length)
            request = GenerateRequest(f"{self._rounds}/{i}", Array.of(prompt), (i,), sampling, 0)
            self._engine.generate(request)
        await self._finished.wait()
        assert self._tokens == work.tokens, "tokens were lost"

    def _count(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            assert chunk.finish != "error", chunk.error
            self._tokens += len(chunk.tokens)
            self._unfinished -= bool(chunk.finish)
        if not self._unfinished:
            self._finished.set()


# ---------------------------------------------------------------------------------------- rounds

# An engine is several times faster: repeated, it runs about as long in each round.
REPEATS = 4


async def measure(folder: Path, work: Work, slots: int, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of each, every time it ran."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    engines = {
        "torch": Engine(folder, TorchInferenceConfig(slots=slots)),
        "torch, deterministic": Engine(folder, TorchInferenceConfig(slots=slots, deterministic=True)),
    }
    rates: dict[str, list[float]] = {name: [] for name in ("transformers", *engines)}
    async with anyio.create_task_group() as tasks:
        for engine in engines.values():
            await engine.start(model, tasks)
            await engine.generate(make_work(slots))
        generate(model, make_work(slots), slots)

        for _ in range(rounds):
            started = perf_counter()
            generate(model, work, slots)
            rates["transformers"].append(work.tokens / (perf_counter() - started))
            for name, engine in engines.items():
                for _ in range(REPEATS):
                    started = perf_counter()
                    await engine.generate(work)
                    rates[name].append(work.tokens / (perf_counter() - started))
        for engine in engines.values():
            await engine.stop()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description="tokens a second: the torch engine against model.generate")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each, in turn")
    parser.add_argument("--slots", type=int, default=32, help="slots, and prompts in a batch of generate")
    parser.add_argument("--requests", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

    work = make_work(arguments.requests)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        rates = anyio.run(measure, Path(folder), work, arguments.slots, arguments.rounds)
    median = {name: statistics.median(each) for name, each in rates.items()}

    print(f"{len(work.prompts)} requests, {work.tokens} tokens, {arguments.slots} slots, 1 thread")
    print(f"{'':22} {'tokens/s':>9} {'worst':>9} {'best':>9} {'times generate':>15}")
    for name, each in rates.items():
        ratio = median[name] / median["transformers"]
        print(f"{name:22} {median[name]:9.0f} {min(each):9.0f} {max(each):9.0f} {ratio:15.2f}")
    result = {
        "ratio": {"transformers": round(median["torch"] / median["transformers"], 3)},
        "tokens_per_s": {name: round(rate) for name, rate in median.items()},
        "rounds": arguments.rounds,
        "slots": arguments.slots,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
