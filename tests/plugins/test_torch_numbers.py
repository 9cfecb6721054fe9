"""The torch inference engine's numbers, against transformers' own forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from structlog.testing import capture_logs
from torch import Tensor

from stretto.engine import Sampling
from torch_engine import (
    VOCABULARY,
    Folders,
    load,
    own_logprobs,
    request,
    serving,
)


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
