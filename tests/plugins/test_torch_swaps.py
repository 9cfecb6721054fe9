"""The torch inference engine under changing weights."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.engine import GenerateRequest
from stretto.errors import WeightsError
from stretto.models.digest import digest_of
from stretto.testing import Sample
from torch_engine import (
    NORM,
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


async def swapped_in_flight(
    folder: Path, models: list[Any], **config: Any
) -> list[tuple[GenerateRequest, Sample]]:
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


async def test_products_by_onednn_use_the_weights_of_the_last_swap(folders: Folders) -> None:
    asked, model = request(max_tokens=30, min_version=1), perturbed(load(folders["wide"]), 1)
    async with serving(folders["wide"], linear="onednn") as served:
        await served.engine.swap(Update(weights_of(model), 1))
        sample = await served.answer(asked)

    assert_own(model, asked, [sample])


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


class Unread(Update):
    """Says what the engine holds already, and has other numbers there: nobody may read them."""

    def tensors(self) -> Mapping[str, Tensor]:
        return {name: tensor if name == NORM else tensor + 1 for name, tensor in self.weights.items()}


async def test_a_swap_reads_only_the_tensors_that_changed(folders: Folders) -> None:
    model = load(folders["qwen2"])
    async with serving(folders["qwen2"], version=None) as served:
        await served.engine.swap(Update({name: each.clone() for name, each in weights_of(model).items()}, 0))
        dict(model.named_parameters())[NORM].data.mul_(1.5)
        report = await served.engine.swap(Unread(weights_of(model), 1))
        sample = await served.answer(asked := request(max_tokens=20, min_version=1))
    assert report.digest == digest_by_hand(weights_of(model))
    assert_own(model, asked, [sample])


def digest_by_hand(weights: Mapping[str, Tensor]) -> str:
    hashes: dict[str, str] = {}
    for name, tensor in weights.items():
        shape, values = "x".join(map(str, tensor.shape)), tensor.numpy().astype("<f4").tobytes()
        hashes[name] = sha256(b"stretto tensor\0float32 " + shape.encode() + b"\n" + values).hexdigest()
    return digest_of(hashes.items())


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
