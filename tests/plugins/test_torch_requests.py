"""The torch inference engine's requests: scoring, determinism, resumption, endings and failures."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from stretto.array import Array
from stretto.engine import GenerateRequest
from stretto.errors import EngineError
from torch_engine import (
    MODELS,
    VOCABULARY,
    Folders,
    Update,
    assert_own,
    load,
    make_engine,
    own_logprobs,
    perturbed,
    request,
    serving,
    weights_of,
)

# -------------------------------------------------------------------------------------- given text


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


# ------------------------------------------------------------------------------------- determinism


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


# ------------------------------------------------------------------------------ how an answer ends


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
        (request(prompt=500, max_tokens=13), "need 513; a sample can have 512"),
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

    assert "repeats an answer from its seed" in sample.error


# --------------------------------------------------------------------------------------- streaming


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
