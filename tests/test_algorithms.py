"""Every algorithm against golden vectors, and its gradient over every split of the batch.

The vectors in `golden/` come from `reference.py`, which shares no code with what is tested.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto import Context
from stretto.algorithm import Group
from stretto.batch import Batch
from stretto.functional import loss_weights
from stretto.plugins import Plugins
from stretto.policy import PolicyGradient

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json"))
ALGORITHMS = ["cispo", "dapo", "gspo", "grpo", "m2po", "reinforce_pp", "rloo", "sapo"]


def made(name: str, **options: Any) -> PolicyGradient[Any]:
    component = Plugins().get("algorithm", name)
    # Two minibatches, so that the proximal policy is a column and not the current one.
    config = msgspec.convert({"use": name, "minibatches": 2, **options}, component.config)
    return component.factory(config, Context(run="r", name="n", seed=1))


def batch_of(inputs: dict[str, Any]) -> Batch:
    def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(inputs[name], dtype=dtype)

    return Batch(
        inputs["lengths"],
        {
            "loss_mask": column("loss_mask", torch.bool),
            "behaviour_logprobs": column("behaviour_logprobs"),
            "proximal_logprobs": column("proximal_logprobs"),
        },
        {"rewards": column("rewards"), "group": column("group", torch.long)},
    )


def prepared(algorithm: PolicyGradient[Any], batch: Batch) -> Batch:
    """The batch with all that the functions of the dataflow write."""
    for call in algorithm.calls():
        if call.function is not None:
            batch = batch.with_columns(call.function(batch))
    return batch


def reduced(algorithm: PolicyGradient[Any], losses: Tensor, batch: Batch) -> Tensor:
    weights = loss_weights(batch["loss_mask"], batch.sequence_index(), len(batch), algorithm.config.loss_mean)
    return (torch.where(batch["loss_mask"], losses, 0.0) * weights).sum()


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_golden_vectors(file: Path) -> None:
    golden = json.loads(file.read_text())
    expected = golden["expected"]
    algorithm = made(golden["algorithm"], **golden["options"])
    batch = prepared(algorithm, batch_of(golden["inputs"]))
    torch.testing.assert_close(
        batch["advantages"], torch.tensor(expected["advantages"]), rtol=1e-4, atol=1e-5
    )
    losses, _ = algorithm.loss(torch.tensor(golden["inputs"]["logprobs"]), batch)
    found = torch.where(batch["loss_mask"], losses, 0.0) * algorithm.config.loss_divisor
    torch.testing.assert_close(found, torch.tensor(expected["losses"]), rtol=1e-4, atol=1e-5)
    assert float(reduced(algorithm, losses, batch)) == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)


def test_every_algorithm_and_correction_has_a_vector() -> None:
    found = [json.loads(file.read_text()) for file in GOLDEN]
    assert {golden["algorithm"] for golden in found} == set(ALGORITHMS)
    kinds = {golden["options"].get("correction", {}).get("use", "decoupled") for golden in found}
    assert len(kinds) == 7


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["token", "sequence", "sequence_sum"]), st.data())
def test_the_gradient_does_not_depend_on_the_split(
    name: str, seed: int, reduction: str, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = [0, 0, 0, 1, 1, 2]
    lengths = torch.randint(3, 9, (len(groups),), generator=generator).tolist()
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.7
    behaviour = -torch.rand(total, generator=generator) * 3
    correction = data.draw(st.sampled_from(["decoupled", "token_tis", "sequence_tis", "icepop"]))
    algorithm = made(name, loss_mean=reduction, correction={"use": correction})
    batch = prepared(
        algorithm,
        Batch(
            lengths,
            {
                "loss_mask": mask,
                "behaviour_logprobs": behaviour,
                "proximal_logprobs": behaviour + 0.2 * torch.randn(total, generator=generator),
            },
            {
                "rewards": torch.randint(0, 3, (len(groups),), generator=generator).float(),
                "group": torch.tensor(groups),
            },
        ),
    )
    current = (batch["proximal_logprobs"] + 0.2 * torch.randn(total, generator=generator)).requires_grad_()
    whole = torch.autograd.grad(reduced(algorithm, algorithm.loss(current, batch)[0], batch), current)[0]

    order = data.draw(st.permutations(range(len(groups))))
    cut = data.draw(st.integers(1, len(groups) - 1))
    weights = loss_weights(mask, batch.sequence_index(), len(batch), algorithm.config.loss_mean)
    weighted = batch.with_columns({"weights": weights, "at": torch.arange(total), "current": current})
    parts: list[Tensor] = []
    for part in weighted.select(order).split([cut, len(groups) - cut]):
        losses, _ = algorithm.loss(part["current"], part)
        parts.append((torch.where(part["loss_mask"], losses, 0.0) * part["weights"]).sum())
    split = torch.autograd.grad(torch.stack(parts).sum(), current)[0]
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-7)


def test_dapo_leaves_out_groups_that_teach_nothing() -> None:
    same, mixed = Group((1.0, 1.0), (3, 4)), Group((1.0, 0.0), (3, 4))
    assert [made("dapo").keep(group) for group in (same, mixed)] == [False, True]
    assert made("dapo", dynamic_sampling=False).keep(same)


def test_m2po_always_asks_for_the_proximal_policy() -> None:
    names = [call.name for call in made("m2po", minibatches=1).calls()]
    assert "forward(actor)" in names
    assert "forward(actor)" not in [call.name for call in made("gspo", minibatches=1).calls()]
