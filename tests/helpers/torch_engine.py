"""Tiny models on disk, and a torch inference engine that serves them as an inference worker would."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch
from anyio.abc import TaskStatus
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from patience import patience
from stretto.array import Array
from stretto.component import Context
from stretto.engine import Chunk, GenerateRequest, Sampling
from stretto.errors import EngineError
from stretto.models.digest import hashes_of
from stretto.testing import Sample
from stretto.testing.tiny_model import make_tiny_tokenizer
from stretto.weights import WeightsNote
from stretto_torch import TorchInferenceConfig
from stretto_torch.inference import TorchInferenceEngine
from tiny_sizes import IDS, tiny_sizes

VOCABULARY = 101
NORM = "model.norm.weight"

# ------------------------------------------------------------------------------------ tiny models

SIZES: dict[str, Any] = {
    **tiny_sizes(64, layers=3, vocab_size=VOCABULARY, max_position_embeddings=512),
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
    **IDS,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2_eos": {"model_type": "qwen2", "eos_token_id": [3, 1]},
    "llama": {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_parameters": LLAMA3_ROPE,
    },
    "llama_dynamic": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "num_key_value_heads": 2},
    "mistral": {"model_type": "mistral", "head_dim": 32, "sliding_window": 16},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 500},
    "gemma2": {"model_type": "gemma2", "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
    # Slow enough to be caught in the middle of an answer.
    "slow": {"model_type": "qwen2", "num_hidden_layers": 16},
    "wide": {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 1024},
    "mamba": {"model_type": "mamba", "state_size": 8},
}


def make_model(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    options = {**SIZES, **MODELS[name]}
    config: Any = AutoConfig.for_model(options.pop("model_type"), **options)
    model: Any = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases too, or an error in them would not show
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = model.config.eos_token_id
    return model.float().eval().requires_grad_(False)


class Folders:
    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def __getitem__(self, name: str) -> Path:
        folder = self._parent / name
        if not folder.exists():
            make_model(name).save_pretrained(folder)
            make_tiny_tokenizer().save_pretrained(folder)
        return folder


def perturbed(model: Any, seed: int, by: float = 0.02) -> Any:
    """The model with other weights, near to its own."""
    other: Any = AutoModelForCausalLM.from_config(model.config).float().eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        parameter += by * torch.randn(parameter.shape, generator=generator)
    return other


# -------------------------------------------------------------------------------- serving a model


@dataclass
class Update:
    weights: Mapping[str, Tensor]
    version: int
    folder: Path | None = None

    @property
    def note(self) -> WeightsNote:
        return WeightsNote(self.version, "memory", "")

    def hashes(self) -> Mapping[str, str]:
        return hashes_of(self.weights)

    def tensors(self) -> Mapping[str, Tensor]:
        return self.weights

    def close(self) -> None:
        pass


def weights_of(model: Any) -> dict[str, Tensor]:
    """What a trainer publishes: no name twice for the same tensor."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


class Served:
    """An engine under test and everything it has emitted."""

    def __init__(self, engine: TorchInferenceEngine) -> None:
        self.engine = engine
        self.results: dict[tuple[str, int], Sample] = {}
        self.failures: list[Exception] = []
        self._news = anyio.Event()

    def emit(self, chunks: list[Chunk]) -> None:
        assert chunks
        for chunk in chunks:
            self.results.setdefault((chunk.request, chunk.sample), Sample()).add(chunk)
        self._news.set()
        self._news = anyio.Event()

    async def until(self, *keys: tuple[str, int], tokens: int | None = None) -> list[Sample]:
        with anyio.fail_after(patience()):
            while not all(self._reached(key, tokens) for key in keys):
                await self._news.wait()
        return [self.results[key] for key in keys]

    def _reached(self, key: tuple[str, int], tokens: int | None) -> bool:
        result = self.results.get(key, Sample())
        return bool(result.finish) or (tokens is not None and len(result.tokens) >= tokens)

    async def answers(self, *requests: GenerateRequest) -> list[list[Sample]]:
        for request in requests:
            self.engine.generate(request)
        return [await self.until(*((r.id, i) for i in range(len(r.seeds)))) for r in requests]

    async def answer(self, request: GenerateRequest) -> Sample:
        return (await self.answers(request))[0][0]


@asynccontextmanager
async def serving(
    folder: Path, version: int | None = 0, slots: int = 8, **config: Any
) -> AsyncGenerator[Served]:
    served = Served(make_engine(folder, slots=slots, **config))
    async with anyio.create_task_group() as tasks:
        try:
            with anyio.fail_after(patience()):
                await tasks.start(start_as_worker, served)
            if version is not None:
                await served.engine.swap(Update(weights_of(load(folder)), version))
            yield served
        finally:
            await served.engine.stop()


def make_engine(folder: Path, **config: Any) -> TorchInferenceEngine:
    context = Context(run="run", name="test", seed=0, model=str(folder))
    return TorchInferenceEngine(TorchInferenceConfig(**config), context)


async def start_as_worker(served: Served, *, task_status: TaskStatus[None]) -> None:
    """Start the engine in a task group of its own, and note what is raised in that."""
    try:
        async with anyio.create_task_group() as tasks:
            await served.engine.start(served.emit, tasks)
            task_status.started()
    except* EngineError as errors:
        served.failures += errors.exceptions


NO_DEADLINE_S = 3600.0


def load(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return model.float().eval().requires_grad_(False)


def request(
    id: str = "r",
    prompt: int | NDArray[Any] = 12,
    n: int = 1,
    *,
    seed: int = 0,
    min_version: int = 0,
    begun: tuple[Array, ...] = (),
    have: tuple[int, ...] = (),
    deadline_s: float = NO_DEADLINE_S,
    max_tokens: int = 20,
    **sampling: Any,
) -> GenerateRequest:
    """A request with a prompt, or one of some length drawn for its id."""
    if isinstance(prompt, int):
        generator = np.random.default_rng(int(sha256(id.encode()).hexdigest()[:8], 16))
        prompt = generator.integers(4, VOCABULARY, prompt)
    return GenerateRequest(
        id=id,
        prompt_ids=Array.of(prompt, np.int32),
        seeds=tuple(range(seed, seed + n)),
        sampling=Sampling(max_tokens=max_tokens, **sampling),
        min_version=min_version,
        begun=begun,
        have=have,
        deadline_s=deadline_s,
    )


def own_logprobs(model: Any, asked: GenerateRequest, tokens: list[int]) -> NDArray[np.float32]:
    """Logprobs of an answer by the plain forward over prompt and answer."""
    prompt = asked.prompt_ids.numpy().tolist()
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    logprobs = (logits / (asked.sampling.temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def assert_own(model: Any, asked: GenerateRequest, samples: list[Sample]) -> None:
    for sample in samples:
        np.testing.assert_allclose(sample.logprobs, own_logprobs(model, asked, sample.tokens), atol=1e-4)
