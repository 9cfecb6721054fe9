"""The torch inference engine under changing weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from stretto.errors import WeightsError
from stretto.models.digest import digest_of, tensor_hash
from torch_engine import (
    NORM,
    Folders,
    Update,
    assert_own,
    load,
    perturbed,
    request,
    serving,
    weights_of,
)


async def test_products_by_onednn_use_the_weights_of_the_last_swap(folders: Folders) -> None:
    asked, model = request(max_tokens=30, min_version=1), perturbed(load(folders["wide"]), 1)
    async with serving(folders["wide"], linear="onednn") as served:
        await served.engine.swap(Update(weights_of(model), 1))
        sample = await served.answer(asked)

    assert_own(model, asked, [sample])


async def test_a_swap_takes_a_tied_tensor_by_its_second_name_too(folders: Folders) -> None:
    weights = weights_of(load(folders["qwen2"]))
    tied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    async with serving(folders["qwen2"], version=None) as served:
        report = await served.engine.swap(Update(tied, 4))

    assert (report.version, report.digest) == (4, digest_of_weights(tied))


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
    assert report.digest == digest_of_weights(weights_of(model))
    assert_own(model, asked, [sample])


def digest_of_weights(weights: Mapping[str, Tensor]) -> str:
    return digest_of((name, tensor_hash(tensor)) for name, tensor in weights.items())


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
    assert reports[4].digest == digest_of_weights(updates[-1].weights)
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
