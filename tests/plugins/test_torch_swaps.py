"""The torch inference engine under changing weights."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.engine import GenerateRequest
from stretto.errors import WeightsError
from stretto.models.digest import digest_of
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


async def test_keep_cache_goes_on_over_what_older_weights_computed(folders: Folders) -> None:
    # Prompts of more than one length, and answers that grow beyond the first class of rows.
    requests = [request(f"{i}", prompt=6 + 30 * i, n=2, max_tokens=300) for i in range(5)]
    models = [load(folders["qwen2"])]
    models += [perturbed(models[0], 1)]
    async with serving(folders["qwen2"], slots=16) as served:
        for asked in requests:
            served.engine.generate(asked)
        await served.until(("0", 0), tokens=30)
        await served.engine.swap(Update(weights_of(models[1]), 1))
        keys = [(asked, i) for asked in requests for i in range(2)]
        answers = await served.until(*((asked.id, i) for asked, i in keys))

    drift: list[float] = []
    for (asked, _), sample in zip(keys, answers, strict=True):
        if set(sample.versions) == {0, 1}:
            switch = sample.versions.index(1)
            expected = logprobs_over_kept_cache(models, asked, sample.tokens, switch)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
            own = own_logprobs(models[1], asked, sample.tokens)[switch:]
            drift += np.abs(own - sample.logprobs[switch:]).tolist()
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
        report = await served.engine.swap(Update(weights, 3))
        with_tied = await served.engine.swap(Update(tied, 4))

    assert (report.version, report.digest) == (3, digest_by_hand(weights))
    assert (with_tied.version, with_tied.digest) == (4, digest_by_hand(tied))


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
async def test_weights_that_do_not_fit_are_told_by_name(
    folders: Folders, name: str, tensor: Tensor | None, message: str
) -> None:
    unfit = {**weights_of(load(folders["qwen2"])), name: tensor}
    async with serving(folders["qwen2"]) as served:
        with pytest.raises(WeightsError, match=message) as raised:
            await served.engine.swap(Update({n: t for n, t in unfit.items() if t is not None}, 1))
    assert raised.value.version == 1


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
