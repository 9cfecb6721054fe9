"""The torch inference engine's requests: numbers, determinism, resumption, endings and failures."""

import threading
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from patience import patience
from stretto.array import Array
from stretto.engine import GenerateRequest
from stretto.errors import EngineError
from torch_engine import (
    MODELS,
    Folders,
    Update,
    assert_own,
    load,
    make_engine,
    own_logprobs,
    request,
    serving,
    weights_of,
)


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
        assert {len(sample.tokens) for sample in samples} == {asked.sampling.max_tokens}
        assert_own(model, asked, samples)


async def test_bfloat16_serves_a_float32_file_and_stays_near(folders: Folders) -> None:
    requests = [request(f"{i}", prompt=5 + i, max_tokens=150) for i in range(20)]
    async with serving(folders["qwen2"], slots=20, dtype="bfloat16") as served:
        results = await served.answers(*requests)

    model = load(folders["qwen2"])
    off: list[float] = []
    for asked, (sample,) in zip(requests, results, strict=True):
        off += np.abs(own_logprobs(model, asked, sample.tokens) - sample.logprobs).tolist()
    assert 0 < np.mean(off) < 0.05


async def test_text_that_cannot_be_scored_is_refused_with_the_reason(folders: Folders) -> None:
    """By a model that transformers computes; the kit scores text with one that the engine computes itself."""
    text, model = np.arange(4, 20, dtype=np.int32), load(folders["gemma2"])
    async with serving(folders["gemma2"], version=None) as served:
        with pytest.raises(EngineError, match="no weights are served yet"):
            await served.engine.logprobs([text])
        await served.engine.swap(Update(weights_of(model), 0))
        for wrong, why in ((text[:1], "1 tokens"), (np.tile(text, 40), "2 to 512"), (text + 90, "vocab")):
            with pytest.raises(EngineError, match=why):
                await served.engine.logprobs([text, wrong])
        [found] = await served.engine.logprobs([text])
        own = own_logprobs(model, request(prompt=text[:1]), text[1:].tolist())
        np.testing.assert_allclose(found, own, atol=1e-4)
        await served.engine.stop()
        with pytest.raises(EngineError, match="was stopped"):
            await served.engine.logprobs([text])


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


# ---------------------------------------------------------------------------- going on, going back


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


async def test_the_stream_begins_where_the_asker_says(folders: Folders) -> None:
    asked = request(n=2, max_tokens=50)
    async with serving(folders["qwen2"], deterministic=True) as served:
        whole = (await served.answers(asked))[0]
        rest = (await served.answers(msgspec.structs.replace(asked, id="again", have=(0, 31))))[0]

    assert [sample.start for sample in rest] == [0, 31]
    assert rest[0].tokens == whole[0].tokens
    assert (rest[1].tokens, rest[1].logprobs) == (whole[1].tokens[31:], whole[1].logprobs[31:])


# ------------------------------------------------------------------------------ how an answer ends


async def test_any_of_the_models_end_of_sequence_tokens_ends_an_answer(folders: Folders) -> None:
    asked: dict[str, Any] = {"prompt": np.arange(4, 30), "n": 20, "max_tokens": 200}
    async with serving(folders["qwen2_eos"]) as served:
        own, whole = await served.answers(request("a", **asked), request("b", **asked, ignore_eos=True))

    for sample, longer in zip(own, whole, strict=True):
        # The seeds are the same, so each is as long a part of the other as its first end says.
        ends = [i for i, token in enumerate(longer.tokens) if token in (3, 1)][:1]
        assert sample.tokens == longer.tokens[: ends[0] + 1 if ends else None]
        assert sample.finish == ("stop" if ends else "length")


async def test_stop_strings_need_a_tokenizer_and_others_do_not(folders: Folders, tmp_path: Path) -> None:
    load(folders["qwen2"]).save_pretrained(tmp_path)
    async with serving(tmp_path) as served:
        plain = await served.answer(request("plain"))
        stops = await served.answer(request("stops", stop=("x",)))
        empty = await served.answer(request("empty", stop=("",)))

    assert plain.finish == "length"
    assert "stop strings need a tokenizer" in stops.error
    assert "an empty stop string" in empty.error


async def test_deterministic_refuses_to_go_on_with_what_another_engine_began(folders: Folders) -> None:
    async with serving(folders["qwen2"], deterministic=True) as served:
        sample = await served.answer(request(begun=(Array.of([5]),)))

    assert "repeats an answer from its seed" in sample.error


# -------------------------------------------------------------------------------- when things fail


class TornWeights(dict[str, Tensor]):
    """Weights whose file is lost after they were checked, which is when another thread reads them."""

    checked_by: int | None = None

    def items(self) -> Any:
        self.checked_by = self.checked_by or threading.get_ident()
        if threading.get_ident() != self.checked_by:
            raise OSError("the disk is gone")
        return super().items()


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
async def test_weights_that_are_not_finite_end_answers_without_trace(folders: Folders, on_swap: str) -> None:
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
    assert_own(model, asked, samples)


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


async def test_a_start_that_is_cancelled_leaves_no_thread_behind(folders: Folders) -> None:
    engine = make_engine(folders["slow"])
    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(patience(0.001)) as scope:
            await engine.start(lambda chunks: None, tasks)
        assert scope.cancelled_caught
        await engine.stop()

    assert "torch-inference" not in [thread.name for thread in threading.enumerate()]
