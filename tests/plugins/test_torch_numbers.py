"""The torch inference engine's numbers, against transformers' own forward."""

from __future__ import annotations

import numpy as np
import pytest
from structlog.testing import capture_logs

from torch_engine import Folders, load, own_logprobs, request, serving


@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        *((name, f"hand-written {name}") for name in ("qwen2", "llama", "qwen3")),
        *((name, f"transformers {name}") for name in ("mistral", "gpt2", "gemma2")),
        ("llama_dynamic", "transformers llama"),
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
