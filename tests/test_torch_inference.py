"""The torch inference engine through its public interface, against transformers' own forward."""

from __future__ import annotations

import string
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from anyio.abc import TaskStatus
from numpy.typing import NDArray
from structlog.testing import capture_logs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from stretto.array import Array
from stretto.component import Context
from stretto.engine import Chunk, Finish, GenerateRequest, Sampling
from stretto.errors import EngineError, WeightsError
from stretto.models.digest import digest_of, tensor_hash
from stretto.weights import WeightsNote
from stretto_torch import TorchInferenceConfig
from stretto_torch.inference import TorchInferenceEngine

SPECIAL = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 101

# ------------------------------------------------------------------------------------ tiny models

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
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


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character, as byte-level BPE without merges."""
    written = {" ": "\u0120", "\n": "\u010a", "\t": "\u0109"}
    characters = sorted(set(string.printable) - set("\r\x0b\x0c"))
    vocabulary = {token: i for i, token in enumerate(SPECIAL + [written.get(c, c) for c in characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")


def make_model(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    options = {**SIZES, **MODELS[name]}
    config: Any = AutoConfig.for_model(options.pop("model_type"), **options)
    model: Any = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases too, or an error in them would not show
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = model.config.eos_token_id
    return model.float().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


class Folders:
    """Model folders by name, made when first asked for."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def __getitem__(self, name: str) -> Path:
        folder = self._parent / name
        if not folder.exists():
            make_model(name).save_pretrained(folder)
            byte_level_tokenizer().save_pretrained(folder)
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
    """A version of the weights in memory."""

    weights: Mapping[str, Tensor]
    version: int
    folder: Path | None = None

    @property
    def note(self) -> WeightsNote:
        return WeightsNote(self.version, "memory", "")

    def hashes(self) -> Mapping[str, str]:
        return {name: tensor_hash(tensor) for name, tensor in self.weights.items()}

    def tensors(self) -> Mapping[str, Tensor]:
        return self.weights

    def close(self) -> None:
        pass


def weights_of(model: Any) -> dict[str, Tensor]:
    """What a trainer publishes: no name twice for the same tensor."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


@dataclass
class Result:
    """One sample, put together from its chunks."""

    start: int = 0
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    finish: Finish = ""
    error: str = ""
    chunks: int = 0

    def add(self, chunk: Chunk) -> None:
        assert not self.finish, "a chunk after the last one"
        if not self.chunks:
            self.start = chunk.position
        assert chunk.position == self.start + len(self.tokens), "a gap, or a token twice"
        assert chunk.tokens.dtype == np.int32
        assert chunk.logprobs.dtype == np.float32
        assert chunk.versions.dtype == np.int32
        assert len(chunk.tokens) == len(chunk.logprobs) == len(chunk.versions)
        self.chunks += 1
        self.tokens += chunk.tokens.tolist()
        self.logprobs += chunk.logprobs.tolist()
        self.versions += chunk.versions.tolist()
        self.finish, self.error = chunk.finish, chunk.error


class Served:
    """An engine under test and everything it has emitted."""

    def __init__(self, engine: TorchInferenceEngine) -> None:
        self.engine = engine
        self.results: dict[tuple[str, int], Result] = {}
        self.messages = 0
        self.failures: list[Exception] = []
        self._news = anyio.Event()

    def emit(self, chunks: list[Chunk]) -> None:
        assert chunks
        self.messages += 1
        for chunk in chunks:
            self.results.setdefault((chunk.request, chunk.sample), Result()).add(chunk)
        self._news.set()
        self._news = anyio.Event()

    async def until(self, *keys: tuple[str, int], tokens: int | None = None) -> list[Result]:
        """Wait until these samples have finished, or have so many tokens."""
        with anyio.fail_after(30):
            while not all(self._reached(key, tokens) for key in keys):
                await self._news.wait()
        return [self.results[key] for key in keys]

    def _reached(self, key: tuple[str, int], tokens: int | None) -> bool:
        result = self.results.get(key, Result())
        return bool(result.finish) or (tokens is not None and len(result.tokens) >= tokens)

    async def answers(self, *requests: GenerateRequest) -> list[list[Result]]:
        """The finished samples of each request."""
        for request in requests:
            self.engine.generate(request)
        return [await self.until(*((r.id, i) for i in range(len(r.seeds)))) for r in requests]

    async def answer(self, request: GenerateRequest) -> Result:
        return (await self.answers(request))[0][0]


@asynccontextmanager
async def serving(
    folder: Path, version: int | None = 0, slots: int = 8, **config: Any
) -> AsyncGenerator[Served]:
    """An engine that serves the folder's weights as `version`, or none yet."""
    served = Served(make_engine(folder, slots=slots, **config))
    async with anyio.create_task_group() as tasks:
        try:
            with anyio.fail_after(30):
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
    deadline_s: float = 3600.0,
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


# --------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        ("qwen2", "hand-written qwen2"),
        ("llama", "hand-written llama"),
        ("qwen3", "hand-written qwen3"),
        ("llama_dynamic", "transformers llama"),
        ("mistral", "transformers mistral"),
        ("gpt2", "transformers gpt2"),
        ("gemma2", "transformers gemma2"),
    ],
)
async def test_logprobs_are_those_of_the_plain_forward(folders: Folders, name: str, decoder: str) -> None:
    # More samples than slots, of very different lengths: refills, moves of rows, and spans all happen.
    requests = [
        request(f"{i}", prompt=1 + 13 * i % 60, n=1 + i % 3, max_tokens=5 + 37 * i % 170, temperature=t)
        for i, t in enumerate([1.0, 0.7, 0.0, 1.3] * 5)
    ]
    with capture_logs() as logs:
        async with serving(folders[name], slots=20) as served:
            results = await served.answers(*requests)

    assert [entry["decoder"] for entry in logs if entry["event"] == "model loaded"] == [decoder]
    model = load(folders[name])
    for asked, samples in zip(requests, results, strict=True):
        for sample in samples:
            assert len(sample.tokens) == asked.sampling.max_tokens
            expected = own_logprobs(model, asked, sample.tokens)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


async def test_bfloat16_serves_a_float32_file_and_stays_near(folders: Folders) -> None:
    requests = [request(f"{i}", prompt=5 + i, max_tokens=150) for i in range(20)]
    async with serving(folders["qwen2"], slots=20, dtype="bfloat16") as served:
        results = await served.answers(*requests)

    model = load(folders["qwen2"])
    off: list[float] = []
    for asked, (sample,) in zip(requests, results, strict=True):
        off += np.abs(own_logprobs(model, asked, sample.tokens) - sample.logprobs).tolist()
    assert 0 < np.mean(off) < 0.05


async def test_products_by_onednn_are_the_same(folders: Folders) -> None:
    asked = request(max_tokens=30)
    async with serving(folders["wide"], linear="onednn") as served:
        sample = await served.answer(asked)

    expected = own_logprobs(load(folders["wide"]), asked, sample.tokens)
    np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


async def test_greedy_answers_are_those_of_generate(folders: Folders) -> None:
    requests = [request(f"{i}", prompt=10 + i, temperature=0.0, max_tokens=40) for i in range(3)]
    async with serving(folders["qwen2"]) as served:
        results = await served.answers(*requests)

    model = load(folders["qwen2"])
    for asked, (sample,) in zip(requests, results, strict=True):
        prompt = torch.tensor([asked.prompt_ids.numpy().tolist()])
        mask = torch.ones_like(prompt)
        expected = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=40)
        assert sample.tokens == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    "shape",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"top_k": 20, "top_p": 0.8, "temperature": 1.5},
        {"min_p": 0.3},
        {"logit_bias": {5: -100.0, 7: 1.5, 50: 0.7}},
        {"min_p": 0.1, "top_p": 0.9, "temperature": 1.3, "logit_bias": {9: 2.0, 60: -1.0}},
    ],
    ids=str,
)
async def test_tokens_are_drawn_with_the_probability_they_say(
    folders: Folders, shape: dict[str, Any]
) -> None:
    count = 3000
    asked = request(n=count, max_tokens=1, **shape)
    async with serving(folders["qwen2"], slots=256) as served:
        samples = (await served.answers(asked))[0]

    logits = load(folders["qwen2"])(torch.tensor([asked.prompt_ids.numpy().tolist()])).logits[0, -1]
    for token, bias in asked.sampling.logit_bias.items():
        logits[token] += bias
    exact = kept_probabilities(logits / asked.sampling.temperature, asked.sampling)
    tokens = np.array([sample.tokens[0] for sample in samples])
    assert exact[tokens].min() > 0, "a token was drawn that is not kept"
    logprobs = [sample.logprobs[0] for sample in samples]
    np.testing.assert_allclose(logprobs, np.log(exact[tokens]), atol=1e-4)
    # Pearson's statistic over the tokens expected at least five times, the others taken together.
    expected = exact * count
    seen = np.bincount(tokens, minlength=VOCABULARY)
    often = expected >= 5
    pairs = [*zip(seen[often], expected[often], strict=True), (seen[~often].sum(), expected[~often].sum())]
    statistic = sum((n - e) ** 2 / e for n, e in pairs if e > 0)
    freedom = sum(e > 0 for _, e in pairs) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def kept_probabilities(logits: Tensor, sampling: Sampling) -> NDArray[np.float64]:
    """What each token's probability must be, token by token in the order of likelihood."""
    probabilities = logits.double().softmax(-1)
    least = sampling.min_p * probabilities.max()
    order = [token for token in logits.argsort(descending=True).tolist() if probabilities[token] >= least]
    order = order[: sampling.top_k or None]
    total = sum(float(probabilities[token]) for token in order)
    kept: list[int] = []
    for token in order:
        if sum(float(probabilities[k]) for k in kept) / total >= sampling.top_p:
            break
        kept.append(token)
    exact = np.zeros(VOCABULARY)
    exact[kept] = probabilities[kept].numpy()
    return exact / exact.sum()


async def test_a_bias_is_part_of_greedy_answers_and_of_their_logprobs(folders: Folders) -> None:
    asked = request(prompt=20, max_tokens=30, temperature=0.0, logit_bias={31: 6.0, 40: -100.0})
    async with serving(folders["qwen2"]) as served:
        sample = await served.answer(asked)

    text = asked.prompt_ids.numpy().tolist() + sample.tokens
    logits = load(folders["qwen2"])(torch.tensor([text])).logits[0, 19:-1]
    logits[:, 31] += 6
    logits[:, 40] -= 100
    assert sample.tokens == logits.argmax(-1).tolist()
    assert 31 in sample.tokens
    expected = logits.log_softmax(-1).amax(-1).numpy()
    np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


async def test_the_seed_alone_decides_what_is_drawn(folders: Folders) -> None:
    same = [request(f"{i}", prompt=np.arange(4, 20), seed=2**63 + 5, max_tokens=30) for i in range(2)]
    other = request("other", prompt=np.arange(4, 20), seed=-5, max_tokens=30)
    async with serving(folders["qwen2"]) as served:
        (one,), (two,), (three,) = await served.answers(*same, other)

    assert one.tokens == two.tokens
    assert one.tokens != three.tokens


# ------------------------------------------------------------------------------------------ swaps


async def swapped_in_flight(
    folder: Path, models: list[Any], **config: Any
) -> list[tuple[GenerateRequest, Result]]:
    """Answers during which each model in turn was swapped in, as versions 0, 1, ..."""
    # Prompts of more than one length, and answers that grow beyond the first class of rows.
    requests = [request(f"{i}", prompt=6 + 30 * i, n=2, max_tokens=300) for i in range(5)]
    answers = {(asked.id, i): asked for asked in requests for i in range(2)}
    async with serving(folder, version=None, slots=16, **config) as served:
        await served.engine.swap(Update(weights_of(models[0]), 0))
        for asked in requests:
            served.engine.generate(asked)
        for version, model in enumerate(models[1:], 1):
            await served.until(("0", 0), tokens=30 * version)
            await served.engine.swap(Update(weights_of(model), version))
        await served.until(*answers)
    assert any(len(set(served.results[key].versions)) > 1 for key in answers), "no swap fell into an answer"
    return [(asked, served.results[key]) for key, asked in answers.items()]


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
async def test_recompute_makes_each_logprob_its_versions_own(folders: Folders, name: str) -> None:
    first = load(folders[name])
    models = [first, perturbed(first, 1), perturbed(first, 2)]
    for asked, result in await swapped_in_flight(folders[name], models, on_swap="recompute"):
        assert sorted(result.versions) == result.versions
        by_version = np.stack([own_logprobs(model, asked, result.tokens) for model in models])
        expected = by_version[result.versions, np.arange(len(result.tokens))]
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


async def test_keep_cache_goes_on_over_what_older_weights_computed(folders: Folders) -> None:
    first = load(folders["qwen2"])
    models = [first, perturbed(first, 1)]
    drift: list[float] = []
    for asked, result in await swapped_in_flight(folders["qwen2"], models):
        if set(result.versions) == {0, 1}:
            switch = result.versions.index(1)
            expected = logprobs_over_kept_cache(models, asked, result.tokens, switch)
            np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
            own = own_logprobs(models[1], asked, result.tokens)[switch:]
            drift += np.abs(own - result.logprobs[switch:]).tolist()
    assert 1e-4 < np.mean(drift) < 0.5


def logprobs_over_kept_cache(
    models: list[Any], asked: GenerateRequest, tokens: list[int], switch: int
) -> list[float]:
    """What was really sampled from: transformers' own cache, with other weights from token `switch` on.
    The token before is sampled by the old weights and goes into the cache by the new ones."""
    prompt = asked.prompt_ids.numpy().tolist()
    known = torch.tensor([prompt + tokens[: switch - 1]])
    before = models[0](known, use_cache=True)
    found = before.logits[0, len(prompt) - 1 :].log_softmax(-1)
    rows = [found]
    for token in tokens[switch - 1 : -1]:
        after = models[1](torch.tensor([[token]]), past_key_values=before.past_key_values, use_cache=True)
        rows.append(after.logits[0].log_softmax(-1))
    return torch.cat(rows).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


async def test_a_swap_reports_the_digest_of_what_it_loaded(folders: Folders) -> None:
    weights = weights_of(load(folders["qwen2"]))
    tied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    async with serving(folders["qwen2"], version=None) as served:
        assert served.engine.load().version == -1
        report = await served.engine.swap(Update(weights, 3))
        with_tied = await served.engine.swap(Update(tied, 4))
        figures = served.engine.load()

    assert report.version == 3
    assert report.digest == digest_by_hand(weights)
    assert with_tied.digest == digest_by_hand(tied)
    assert (figures.version, figures.swaps) == (4, 2)
    assert figures.pause_s == pytest.approx(report.pause_s + with_tied.pause_s)
    assert figures.pause_max_s == max(report.pause_s, with_tied.pause_s)


def digest_by_hand(weights: Mapping[str, Tensor]) -> str:
    hashes = {name: sha256(tensor.numpy().astype("<f4").tobytes()) for name, tensor in weights.items()}
    return digest_of((name, whole.hexdigest()) for name, whole in hashes.items())


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (NORM, None, f"lacks the tensor '{NORM}'"),
        (NORM, torch.ones(63), rf"'{NORM}' .* shape \(63,\)"),
        (NORM, torch.ones(64, dtype=torch.int64), f"'{NORM}' .*is torch.int64"),
        ("model.normal.weight", torch.ones(64), f"did you mean '{NORM}'"),
    ],
    ids=["missing", "shape", "integers", "unknown"],
)
async def test_weights_that_do_not_fit_leave_the_old_ones(
    folders: Folders, name: str, tensor: Tensor | None, message: str
) -> None:
    model = load(folders["qwen2"])
    unfit = {**weights_of(perturbed(model, 1)), name: tensor}
    asked = request(max_tokens=10)
    async with serving(folders["qwen2"]) as served:
        with pytest.raises(WeightsError, match=message) as raised:
            await served.engine.swap(Update({n: t for n, t in unfit.items() if t is not None}, 1))
        sample = await served.answer(asked)

    assert raised.value.version == 1
    assert set(sample.versions) == {0}
    np.testing.assert_allclose(sample.logprobs, own_logprobs(model, asked, sample.tokens), atol=1e-4)


async def test_of_several_swaps_the_last_counts_and_all_are_answered(folders: Folders) -> None:
    model = load(folders["qwen2"])
    updates = [Update(weights_of(perturbed(model, version)), version) for version in (1, 2, 3, 4)]
    reports: dict[int, Any] = {}

    async def swap(update: Update) -> None:
        reports[update.version] = await served.engine.swap(update)

    async with serving(folders["qwen2"]) as served:
        served.engine.generate(request("busy", n=8, max_tokens=400))
        async with anyio.create_task_group() as tasks:
            for update in updates:
                tasks.start_soon(swap, update)
        assert served.engine.load().version == 4

    assert sorted(reports) == [1, 2, 3, 4]
    assert reports[4].digest == digest_by_hand(updates[-1].weights)
    assert all(report.version >= version for version, report in reports.items())


async def test_requests_wait_for_the_version_they_need_and_hold_up_nobody(folders: Folders) -> None:
    async with serving(folders["qwen2"], version=None, slots=2) as served:
        for i in range(4):
            served.engine.generate(request(f"new {i}", min_version=1))
        served.engine.generate(request("old", n=3))
        await served.engine.swap(Update(weights_of(load(folders["qwen2"])), 0))
        old = await served.until(*(("old", i) for i in range(3)))
        figures = served.engine.load()
        early = [key for key in served.results if key[0] != "old"]
        await served.engine.swap(Update(weights_of(load(folders["qwen2"])), 1))
        new = await served.until(*((f"new {i}", 0) for i in range(4)))

    assert {version for sample in old for version in sample.versions} == {0}
    assert (figures.waiting, figures.running, early) == (4, 0, [])
    assert {version for sample in new for version in sample.versions} == {1}


async def test_nothing_goes_on_under_older_weights_than_it_needs(folders: Folders) -> None:
    weights = weights_of(load(folders["slow"]))
    async with serving(folders["slow"], version=7) as served:
        served.engine.generate(request("needs 7", min_version=7, max_tokens=480))
        served.engine.generate(request("needs 3", min_version=3, max_tokens=480))
        await served.until(("needs 7", 0), ("needs 3", 0), tokens=1)
        await served.engine.swap(Update(weights, 3))
        one, other = await served.until(("needs 7", 0), ("needs 3", 0))

    assert (one.finish, set(one.versions)) == ("error", {7})
    assert "went back to version 3" in one.error
    assert (other.finish, set(other.versions)) == ("length", {7, 3})


# ------------------------------------------------------------------- beginnings that are known


def turn(id: str, before: GenerateRequest, answer: Result, more: int, **options: Any) -> GenerateRequest:
    """The next turn: all of the one before, and what the environment says to it."""
    said = np.random.default_rng(more).integers(4, VOCABULARY, more)
    return request(id, np.concatenate([before.prompt_ids.numpy(), answer.tokens, said]), **options)


def assert_own(model: Any, asked: GenerateRequest, samples: list[Result]) -> None:
    for sample in samples:
        np.testing.assert_allclose(sample.logprobs, own_logprobs(model, asked, sample.tokens), atol=1e-4)


def totals(logs: Any) -> dict[str, int]:
    """What the engine says of itself when it stops."""
    (entry,) = [entry for entry in logs if entry["event"] == "torch inference engine stops"]
    return entry


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "gemma2"])
async def test_turns_go_on_from_what_is_computed(folders: Folders, name: str) -> None:
    model = load(folders[name])
    with capture_logs() as logs:
        async with serving(folders[name], slots=16) as served:
            asked = request("0", prompt=70, n=3, max_tokens=50)
            samples = (await served.answers(asked))[0]
            for number in range(1, 4):
                # Each sample has a history of its own; together they need more than one prefill.
                nexts = [
                    turn(f"{number}/{i}", asked, sample, more=5 + 17 * i, n=1 + i, max_tokens=20)
                    for i, sample in enumerate(samples)
                ]
                answers = await served.answers(*nexts)
                for each, its_samples in zip(nexts, answers, strict=True):
                    assert_own(model, each, its_samples)
                asked, samples = nexts[2], answers[2]
            # Another text that forks off in the middle, and one that was begun elsewhere.
            fork = request("fork", np.append(asked.prompt_ids.numpy()[:100], [5, 6, 7]))
            begun = request(
                "begun", asked.prompt_ids.numpy()[:90], begun=(Array.of(asked.prompt_ids.numpy()[90:99]),)
            )
            (forked,), (resumed,) = await served.answers(fork, begun)

    assert_own(model, fork, [forked])
    whole = [*asked.prompt_ids.numpy()[90:99].tolist(), *resumed.tokens]
    np.testing.assert_allclose(resumed.logprobs, own_logprobs(model, begun, whole)[9:], atol=1e-4)
    found = totals(logs)
    assert found["prefix_hits"] == 3 * 3 + 2
    assert found["prefix_tokens"] >= 3 * 3 * 119 + 100 + 98


async def test_what_older_weights_computed_is_never_gone_on_from(folders: Folders) -> None:
    models = [load(folders["slow"])]
    models += [perturbed(models[0], seed) for seed in (1, 2)]
    first = request("0", prompt=80, max_tokens=20)
    with capture_logs() as logs:
        async with serving(folders["slow"], slots=4) as served:
            one = await served.answer(first)
            long = request("long", prompt=80, max_tokens=300)
            served.engine.generate(long)
            await served.until(("long", 0), tokens=5)
            await served.engine.swap(Update(weights_of(models[1]), 1))
            second = turn("1", first, one, more=8)
            two = await served.answer(second)
            # Its slot began under the first weights and ended under the second: of no use to any.
            (crossed,) = await served.until(("long", 0))
            third = turn("2", long, crossed, more=8)
            three = await served.answer(third)
            await served.engine.swap(Update(weights_of(models[2]), 1))
            four = await served.answer(msgspec.structs.replace(third, id="3"))

    assert set(crossed.versions) == {0, 1}
    assert_own(models[1], second, [two])
    assert_own(models[1], third, [three])
    assert_own(models[2], third, [four])
    assert totals(logs)["prefix_hits"] == 0


async def test_what_was_computed_anew_may_be_gone_on_from(folders: Folders) -> None:
    models = [load(folders["slow"])]
    models += [perturbed(models[0], 1)]
    long = request("long", prompt=80, max_tokens=200)
    with capture_logs() as logs:
        async with serving(folders["slow"], on_swap="recompute") as served:
            served.engine.generate(long)
            await served.until(("long", 0), tokens=5)
            await served.engine.swap(Update(weights_of(models[1]), 1))
            (crossed,) = await served.until(("long", 0))
            again = turn("again", long, crossed, more=8)
            sample = await served.answer(again)

    assert set(crossed.versions) == {0, 1}
    assert_own(models[1], again, [sample])
    assert (totals(logs)["prefix_hits"], totals(logs)["prefix_tokens"]) == (1, 279)


async def test_a_prompt_begins_like_one_that_is_still_running(folders: Folders) -> None:
    first = request("running", prompt=120, max_tokens=300)
    second = request("second", np.append(first.prompt_ids.numpy()[:110], [4, 5]))
    with capture_logs() as logs:
        async with serving(folders["slow"]) as served:
            served.engine.generate(first)
            await served.until(("running", 0), tokens=1)
            sample = await served.answer(second)
            assert not served.results[("running", 0)].finish
            served.engine.abort("running")
            await served.until(("running", 0))

    assert_own(load(folders["slow"]), second, [sample])
    assert totals(logs)["prefix_tokens"] == 110


# -------------------------------------------------------------------------------- memory for them

# Of one token of the model `qwen2`: 3 layers, one head of 32, keys and values, 4 bytes.
TOKEN_GB = 3 * 2 * 32 * 4 / 2**30


@pytest.mark.parametrize(("name", "tokens"), [("qwen2", 1024), ("qwen2", 512), ("gpt2", 2 * 8 * 512)])
async def test_a_small_cache_makes_samples_wait_and_loses_none(
    folders: Folders, name: str, tokens: int
) -> None:
    # A token of `gpt2` takes twice the memory: the last budget is 8 rows at full length.
    model = load(folders[name])
    requests = [
        request(f"{i}", prompt=1 + 12 * i, n=1 + i % 3, max_tokens=20 + 50 * i, temperature=0.8)
        for i in range(7)
    ]
    with capture_logs() as logs:
        async with serving(folders[name], slots=32, cache_gb=tokens * TOKEN_GB) as served:
            results = await served.answers(*requests)
            figures = served.engine.load()

    for asked, samples in zip(requests, results, strict=True):
        for sample in samples:
            assert (sample.finish, sample.start) == ("length", 0)
            assert len(sample.tokens) == asked.sampling.max_tokens
        assert_own(model, asked, samples)
    assert figures.generated_tokens == sum(len(s.tokens) for samples in results for s in samples)
    assert totals(logs)["preemptions"] > 0


async def test_who_comes_last_gives_way_and_may_be_aborted_meanwhile(folders: Folders) -> None:
    with capture_logs() as logs:
        # The model has 16 layers instead of 3.
        async with serving(folders["slow"], slots=4, cache_gb=1024 * TOKEN_GB * 16 / 3) as served:
            for i in range(4):
                served.engine.generate(request(f"{i}", prompt=30, max_tokens=300))
            await served.until(("0", 0), tokens=150)  # of so long ones the cache holds two
            served.engine.abort("3")
            results = await served.until(*((f"{i}", 0) for i in range(4)))

    assert [result.finish for result in results] == ["length"] * 3 + ["abort"]
    assert 0 < len(results[3].tokens) < 300
    assert totals(logs)["preemptions"] == 2


async def test_a_small_cache_changes_no_bit_of_deterministic_answers(folders: Folders) -> None:
    requests = [request(f"{i}", prompt=20 + 7 * i, n=2, max_tokens=60 + 30 * i) for i in range(6)]

    async def bits(**config: Any) -> list[list[tuple[list[int], list[float]]]]:
        async with serving(folders["qwen2"], slots=16, deterministic=True, **config) as served:
            results = await served.answers(*requests)
        return [[(sample.tokens, sample.logprobs) for sample in samples] for samples in results]

    with capture_logs() as logs:
        small = await bits(cache_gb=1024 * TOKEN_GB)
    assert small == await bits()
    assert (totals(logs)["preemptions"], totals(logs)["prefix_hits"]) == (0, 0)


# ------------------------------------------------------------------------------------- given text


@pytest.mark.parametrize("name", ["llama", "gemma2"])
async def test_given_text_is_scored_by_the_weights_of_now_beside_what_runs(
    folders: Folders, name: str
) -> None:
    models = [load(folders[name])]
    models += [perturbed(models[0], 1)]
    texts = [np.random.default_rng(i).integers(4, VOCABULARY, 2 + 90 * i, np.int32) for i in range(5)]
    asked = request("runs", n=3, max_tokens=400)
    async with serving(folders[name]) as served:
        served.engine.generate(asked)
        await served.until(("runs", 0), tokens=1)
        before = await served.engine.logprobs(texts)
        assert not served.results[("runs", 0)].finish
        samples = await served.until(*(("runs", i) for i in range(3)))
        await served.engine.swap(Update(weights_of(models[1]), 1))
        after = await served.engine.logprobs(texts)

    assert_own(models[0], asked, samples)
    for model, found in zip(models, (before, after), strict=True):
        for text, its in zip(texts, found, strict=True):
            own = model(torch.from_numpy(text)[None].long()).logits[0, :-1].log_softmax(-1)
            assert its.dtype == np.float32
            np.testing.assert_allclose(its, own[range(len(text) - 1), text[1:].tolist()], atol=1e-4)


async def test_text_that_cannot_be_scored_is_refused_with_the_reason(folders: Folders) -> None:
    text = np.arange(4, 20, dtype=np.int32)
    async with serving(folders["qwen2"], version=None) as served:
        with pytest.raises(EngineError, match="no weights are served yet"):
            await served.engine.logprobs([text])
        await served.engine.swap(Update(weights_of(load(folders["qwen2"])), 0))
        for wrong, why in (
            (text[:1], "of 1 tokens"),
            (np.tile(text, 40), "2 to 512"),
            (text + 90, "vocabulary"),
        ):
            with pytest.raises(EngineError, match=why):
                await served.engine.logprobs([text, wrong])
        assert len((await served.engine.logprobs([text]))[0]) == 15
        await served.engine.stop()
        with pytest.raises(EngineError, match="was stopped"):
            await served.engine.logprobs([text])


# ----------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
async def test_deterministic_answers_are_the_same_bits_in_any_company(folders: Folders, name: str) -> None:
    wanted = [
        request(f"{i}", prompt=3 + 11 * i, n=1 + i % 3, seed=i, max_tokens=60 + 20 * i, temperature=0.9)
        for i in range(7)
    ]
    company = [request(f"other {i}", prompt=2 + 5 * i, n=3, max_tokens=10 + 30 * i) for i in range(9)]

    async def bits(requests: list[GenerateRequest], slots: int) -> dict[str, Any]:
        async with serving(folders[name], slots=slots, deterministic=True) as served:
            results = await served.answers(*requests)
        answers = {r.id: samples for r, samples in zip(requests, results, strict=True)}
        return {r.id: [(s.tokens, s.logprobs) for s in answers[r.id]] for r in wanted}

    alone = await bits(wanted, slots=8)
    assert await bits(wanted[::-1], slots=3) == alone
    assert await bits(company[:4] + wanted + company[4:], slots=32) == alone


# --------------------------------------------------------------------------- going on, going back


async def test_an_answer_begun_elsewhere_goes_on_as_if_it_had_not_moved(folders: Folders) -> None:
    asked = request(n=2, max_tokens=50)
    async with serving(folders["qwen2"]) as served:
        whole = (await served.answers(asked))[0]
    begun = (Array.of(whole[0].tokens[:17], np.int32), Array.of([], np.int32))
    async with serving(folders["qwen2"], version=1) as served:
        rest = (await served.answers(msgspec.structs.replace(asked, begun=begun)))[0]

    for before, after, held in zip(whole, rest, (17, 0), strict=True):
        assert (after.start, after.finish, set(after.versions)) == (held, "length", {1})
        assert after.tokens == before.tokens[held:]
        np.testing.assert_allclose(after.logprobs, before.logprobs[held:], atol=1e-4)


async def test_an_answer_that_came_complete_ends_at_once(folders: Folders) -> None:
    begun = (Array.of([5, 6, 3], np.int32), Array.of([5] * 20, np.int32), Array.of([5, 6], np.int32))
    async with serving(folders["qwen2_eos"]) as served:
        stopped, full, open_ = (await served.answers(request(n=3, max_tokens=20, begun=begun)))[0]

    assert (stopped.finish, stopped.start, stopped.tokens) == ("stop", 3, [])
    assert (full.finish, full.start, full.tokens) == ("length", 20, [])
    assert open_.start == 2
    assert open_.tokens


async def test_the_stream_begins_where_the_asker_says(folders: Folders) -> None:
    asked = request(n=2, max_tokens=50)
    async with serving(folders["qwen2"], deterministic=True) as served:
        whole = (await served.answers(asked))[0]
        rest = (await served.answers(msgspec.structs.replace(asked, id="again", have=(0, 31))))[0]

    assert [sample.start for sample in rest] == [0, 31]
    assert rest[0].tokens == whole[0].tokens
    assert (rest[1].tokens, rest[1].logprobs) == (whole[1].tokens[31:], whole[1].logprobs[31:])


async def test_nothing_is_said_of_a_sample_the_asker_holds_to_its_end(folders: Folders) -> None:
    async with serving(folders["qwen2"]) as served:
        served.engine.generate(request("held", n=2, have=(-1, -1)))
        served.engine.generate(request("part", n=3, have=(-1, 0, -1)))
        await served.until(("part", 1))
        served.engine.generate(request("wrong", prompt=500, n=2, max_tokens=500, have=(0, -1)))
        await served.until(("wrong", 0))
        assert served.engine.load().generated_tokens == 20

    assert list(served.results) == [("part", 1), ("wrong", 0)]


# ---------------------------------------------------------------------------- how an answer ends


async def test_end_of_text_is_the_last_token(folders: Folders) -> None:
    async with serving(folders["qwen2_eos"]) as served:
        samples = (await served.answers(request(n=40, max_tokens=300)))[0]

    stopped = [sample for sample in samples if sample.finish == "stop"]
    assert stopped
    for sample in samples:
        ends = [i for i, token in enumerate(sample.tokens) if token in (3, 1)]
        assert ends == ([len(sample.tokens) - 1] if sample.finish == "stop" else [])
        assert sample.finish == "stop" or len(sample.tokens) == 300


async def test_stop_tokens_end_beside_the_models_own_or_instead_of_them(folders: Folders) -> None:
    async with serving(folders["qwen2_eos"]) as served:
        own, also, instead, neither = await served.answers(
            request("a", prompt=np.arange(4, 30), n=20, max_tokens=200),
            request("b", prompt=np.arange(4, 30), n=20, max_tokens=200, stop_token_ids=(9, 30)),
            request(
                "c", prompt=np.arange(4, 30), n=20, max_tokens=200, stop_token_ids=(9, 30), ignore_eos=True
            ),
            request("d", prompt=np.arange(4, 30), n=20, max_tokens=200, ignore_eos=True),
        )
        begun = (Array.of([5, 3], np.int32), Array.of([5, 9], np.int32))
        asked = request("e", n=2, max_tokens=2, stop_token_ids=(9,), ignore_eos=True, begun=begun)
        complete = (await served.answers(asked))[0]

    assert [sample.finish for sample in complete] == ["length", "stop"]
    for samples, ends in ((own, {3, 1}), (also, {3, 1, 9, 30}), (instead, {9, 30}), (neither, set[int]())):
        for sample, whole in zip(samples, neither, strict=True):
            # The seeds are the same, so each is as long a part of the last as its first end says.
            stops = [i for i, token in enumerate(whole.tokens) if token in ends][:1]
            assert sample.tokens == whole.tokens[: stops[0] + 1 if stops else None]
            assert sample.finish == ("stop" if stops else "length")


async def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(folders: Folders) -> None:
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folders["qwen2"])
    async with serving(folders["qwen2"]) as served:
        plain = await served.answer(request("plain", prompt=np.arange(4, 30), max_tokens=60))
        text = tokenizer.decode(plain.tokens)
        string = text[40:43]
        first = text.index(string) + len(string)
        asked = request("stops", prompt=np.arange(4, 30), max_tokens=60, stop=("never there", string))
        sample = await served.answer(asked)

    assert sample.finish == "stop"
    assert tokenizer.decode(sample.tokens) == text[:first]
    assert sample.tokens == plain.tokens[: len(sample.tokens)]


async def test_stop_strings_need_a_tokenizer_and_others_do_not(folders: Folders, tmp_path: Path) -> None:
    load(folders["qwen2"]).save_pretrained(tmp_path)
    async with serving(tmp_path) as served:
        plain = await served.answer(request("plain"))
        stops = await served.answer(request("stops", stop=("x",)))
        empty = await served.answer(request("empty", stop=("",)))

    assert plain.finish == "length"
    assert "stop strings need a tokenizer" in stops.error
    assert "an empty stop string" in empty.error


async def test_abort_ends_what_runs_and_what_waits_and_frees_the_slots(folders: Folders) -> None:
    async with serving(folders["slow"], slots=2) as served:
        served.engine.generate(request("long", n=4, max_tokens=480))
        await served.until(("long", 0), tokens=5)
        served.engine.abort("long")
        served.engine.abort("long")
        served.engine.abort("unheard of")
        ended = await served.until(*(("long", i) for i in range(4)))
        figures = served.engine.load()
        after = await served.answer(request("after"))

    assert [sample.finish for sample in ended] == ["abort"] * 4
    assert 5 <= len(ended[0].tokens) < 480
    assert [len(sample.tokens) for sample in ended[2:]] == [0, 0]
    assert (figures.running, figures.waiting) == (0, 0)
    assert after.finish == "length"


async def test_a_deadline_ends_what_runs_and_what_waits(folders: Folders) -> None:
    async with serving(folders["slow"]) as served:
        served.engine.generate(request("held", min_version=1, deadline_s=0.05))
        (held,) = await served.until(("held", 0))
        served.engine.generate(request("runs", n=8, max_tokens=480, deadline_s=0.2))
        runs = await served.until(*(("runs", i) for i in range(8)))
        other = await served.answer(request("other"))

    assert held.error == "not finished within 0.05 s"
    assert {sample.finish for sample in runs} == {"error"}
    assert all(0 < len(sample.tokens) < 480 for sample in runs)
    assert other.finish == "length"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request(prompt=500, max_tokens=13), "need 513; a slot holds 512"),
        (request(prompt=np.array([4, VOCABULARY])), "outside the vocabulary of 101"),
        (request(prompt=np.array([], np.int32)), "0 prompt tokens"),
        (request(n=2, have=(1,)), "'have' is for 1 samples, the request has 2"),
        (request(begun=(Array.of([5.0]),)), "'begun' is float64"),
        (request(max_tokens=2, begun=(Array.of([5, 5, 5]),)), "more than max_tokens 2"),
        (request(logit_bias={VOCABULARY: 1.0}), "'logit_bias' has tokens outside the vocabulary of 101"),
        (request(stop_token_ids=(3, 999)), "'stop_token_ids' has tokens outside the vocabulary of 101"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_request_that_cannot_be_served_is_told_why(
    folders: Folders, asked: GenerateRequest, message: str
) -> None:
    async with serving(folders["qwen2"]) as served:
        samples = (await served.answers(asked))[0]
        good = await served.answer(request("good", prompt=500, max_tokens=12))

    assert all(sample.finish == "error" and message in sample.error for sample in samples)
    assert good.finish == "length"


async def test_deterministic_refuses_to_go_on_with_what_another_engine_began(folders: Folders) -> None:
    async with serving(folders["qwen2"], deterministic=True) as served:
        sample = await served.answer(request(begun=(Array.of([5]),)))

    assert "repeated from its seed" in sample.error


# ------------------------------------------------------------------------------------- streaming


async def test_first_tokens_come_early_and_messages_are_few(folders: Folders) -> None:
    async with serving(folders["slow"]) as served:
        started = monotonic()
        served.engine.generate(request("long", n=8, max_tokens=480))
        await served.until(("long", 0), tokens=1)
        first = monotonic() - started
        early = [len(served.results[("long", i)].tokens) for i in range(8)]
        await served.until(*(("long", i) for i in range(8)))
        took = monotonic() - started

    assert first < took / 10
    assert all(0 < tokens < 240 for tokens in early)
    assert served.messages <= took / 0.02 + 2


async def test_a_request_repeated_while_it_runs_is_not_started_twice(folders: Folders) -> None:
    asked = request("same", n=2, max_tokens=200)
    async with serving(folders["slow"]) as served:
        served.engine.generate(asked)
        await served.until(("same", 0), tokens=1)
        served.engine.generate(asked)
        await served.answer(request("later", max_tokens=300))
        assert served.engine.load().generated_tokens == 700

    assert [len(served.results[("same", i)].tokens) for i in range(2)] == [200, 200]


async def test_figures_add_up(folders: Folders) -> None:
    async with serving(folders["slow"], slots=4) as served:
        idle = served.engine.load()
        served.engine.generate(request(n=6, max_tokens=100))
        posted = served.engine.load()
        await served.until(("r", 0), tokens=1)
        busy = served.engine.load()
        await served.until(*(("r", i) for i in range(6)))
        done = served.engine.load()

    assert (idle.version, idle.slots, idle.running, idle.waiting, idle.generated_tokens) == (0, 4, 0, 0, 0)
    assert posted.running + posted.waiting == 6
    assert (busy.running, busy.waiting) == (4, 2)
    assert (done.running, done.waiting, done.generated_tokens) == (0, 0, 600)
    assert 0 < busy.busy_s < done.busy_s


# -------------------------------------------------------------------------------- when things fail


class TornWeights(dict[str, Tensor]):
    """Weights whose file is lost after they were checked."""

    reads = 0

    def __getitem__(self, name: str) -> Tensor:
        if name == NORM:
            self.reads += 1
            if self.reads > 1:
                raise OSError("the disk is gone")
        return super().__getitem__(name)


async def test_an_error_in_the_compute_thread_reaches_everyone_concerned(folders: Folders) -> None:
    torn = Update(TornWeights(weights_of(load(folders["slow"]))), 1)
    async with serving(folders["slow"], slots=2) as served:
        served.engine.generate(request("running", n=3, max_tokens=480))
        await served.until(("running", 0), tokens=1)
        with capture_logs() as logs, pytest.raises(EngineError, match="the disk is gone"):
            await served.engine.swap(torn)
        unfinished = await served.until(*(("running", i) for i in range(3)))
        later = await served.answer(request("later"))
        with pytest.raises(EngineError):
            await served.engine.swap(Update(weights_of(load(folders["slow"])), 2))

    (failure,) = served.failures
    assert "the disk is gone" in str(failure)
    assert isinstance(failure.__cause__, OSError)
    assert [entry["log_level"] for entry in logs] == ["error"]
    for sample in (*unfinished, later):
        assert sample.finish == "abort"  # another engine may finish it


@pytest.mark.parametrize("on_swap", ["keep_cache", "recompute"])
async def test_weights_that_are_not_finite_end_answers_and_leave_no_trace(
    folders: Folders, on_swap: str
) -> None:
    model = load(folders["slow"])
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights_of(model).items()}
    asked = request("after", n=3, prompt=30, max_tokens=30)
    async with serving(folders["slow"], slots=3, on_swap=on_swap) as served:
        served.engine.generate(request("running", n=3, max_tokens=480))
        await served.until(("running", 0), tokens=1)
        await served.engine.swap(Update(broken, 1))
        lost = [*await served.until(*(("running", i) for i in range(3))), await served.answer(request("new"))]
        await served.engine.swap(Update(weights_of(model), 2))
        samples = (await served.answers(asked))[0]

    for sample in lost:
        assert sample.error == "the logits of version 1 are not finite"
        assert np.isfinite(sample.logprobs).all()
    for sample in samples:
        np.testing.assert_allclose(sample.logprobs, own_logprobs(model, asked, sample.tokens), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("nowhere", {}, "cannot load the model"),
        ("mamba", {}, "keep keys and values of every layer"),
        ("qwen2", {"context_length": 513}, "the model has 512 positions"),
        ("qwen2", {"cache_gb": 0.0003}, "419 tokens of 768 bytes; it must hold 512"),
        ("gpt2", {"cache_gb": 0.0003}, "must hold 4096, because inference.context_length is 512"),
    ],
)
async def test_start_fails_with_the_reason(
    folders: Folders, name: str, config: dict[str, Any], message: str
) -> None:
    folder = folders[name] if name in MODELS else Path("/nowhere")
    engine = make_engine(folder, **config)
    async with anyio.create_task_group() as tasks:
        with pytest.raises(EngineError, match=message):
            await engine.start(lambda chunks: None, tasks)
        await engine.stop()


async def test_stop_ends_the_stream_and_the_thread(folders: Folders) -> None:
    async with serving(folders["slow"]) as served:
        served.engine.generate(request("endless", n=8, max_tokens=480))
        await served.until(("endless", 0), tokens=1)
        with anyio.fail_after(10):
            await served.engine.stop()
        messages = served.messages
        with pytest.raises(EngineError, match="was stopped"):
            await served.engine.swap(Update(weights_of(load(folders["slow"])), 1))
        await served.engine.stop()

        assert served.messages == messages
        assert not served.results[("endless", 0)].finish


async def test_a_start_that_is_cancelled_leaves_no_thread_behind(folders: Folders) -> None:
    engine = make_engine(folders["slow"])
    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(0.001) as scope:
            await engine.start(lambda chunks: None, tasks)
        assert scope.cancelled_caught
        await engine.stop()

    assert "torch-inference" not in [thread.name for thread in threading.enumerate()]


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import stretto_torch, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
