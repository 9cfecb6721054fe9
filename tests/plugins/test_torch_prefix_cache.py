"""The torch inference engine's prefix cache, and the memory that it takes."""

from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from stretto.array import Array
from stretto.engine import GenerateRequest
from stretto.testing import Sample
from torch_engine import (
    VOCABULARY,
    Folders,
    Update,
    assert_own,
    load,
    own_logprobs,
    perturbed,
    request,
    serving,
    weights_of,
)

# ----------------------------------------------------------------------- beginnings that are known


def turn(id: str, before: GenerateRequest, answer: Sample, more: int, **options: Any) -> GenerateRequest:
    """The next turn: all of the one before, and what the environment says to it."""
    said = np.random.default_rng(more).integers(4, VOCABULARY, more)
    return request(id, np.concatenate([before.prompt_ids.numpy(), answer.tokens, said]), **options)


def totals(logs: Any) -> dict[str, int]:
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


# --------------------------------------------------------------------------------- memory for them

# Of one token of the model `qwen2`: 3 layers, one head of 32, keys and values, 4 bytes.
TOKEN_GB = 3 * 2 * 32 * 4 / 2**30


@pytest.mark.parametrize(("name", "tokens"), [("qwen2", 1024), ("qwen2", 512), ("gpt2", 2 * 8 * 512)])
async def test_a_small_cache_delays_samples_and_loses_none(folders: Folders, name: str, tokens: int) -> None:
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
