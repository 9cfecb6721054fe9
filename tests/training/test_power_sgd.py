"""PowerSGD on gradients that are known: what it leaves out comes back, and what is not finite stays out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.errors import EngineError
from stretto_fsdp2 import PowerSgdConfig
from stretto_fsdp2.power_sgd import PowerSgd

CONFIG = PowerSgdConfig(rank=2, after_steps=2)
SIZES = 24 * 16 + 16


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A group of one rank: its sum is its own gradient."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(24, 16, generator=generator), torch.randn(16, generator=generator)]


def reduced(power: PowerSgd, given: list[Tensor]) -> list[Tensor]:
    copies = [each.clone() for each in given]
    power.add_up(copies)
    return copies


def test_what_a_step_leaves_out_comes_back_later(group: dist.ProcessGroup) -> None:
    power, steps = PowerSgd(CONFIG, group), 30
    found = [reduced(power, gradients(step)) for step in range(steps)]
    for step in range(steps):
        exact = step < CONFIG.after_steps
        matrix, vector = gradients(step)
        assert torch.equal(found[step][0], matrix) == exact
        assert torch.equal(found[step][1], vector)  # too small to be compressed
        if not exact:
            assert int(torch.linalg.matrix_rank(found[step][0])) == CONFIG.rank
    left = dict(power.carried())["error.0"][: 24 * 16].view(24, 16)
    total = sum(gradients(step)[0] for step in range(steps))
    assert isinstance(total, Tensor)
    torch.testing.assert_close(sum(each[0] for each in found) + left, total, atol=1e-4, rtol=1e-4)
    assert power.compression == pytest.approx(SIZES / (2 * (24 + 16) + 16))


def test_a_gradient_of_low_rank_loses_nothing(group: dist.ProcessGroup) -> None:
    power = PowerSgd(CONFIG, group)
    first, second = gradients(0)[0][:, :2], gradients(1)[0][:, :2]
    low = first @ second[:16].T
    found = [reduced(power, [low])[0] for _ in range(3)]
    torch.testing.assert_close(found[-1], low, atol=1e-5, rtol=1e-5)


def test_a_gradient_that_is_not_finite_spoils_no_later_step(group: dist.ProcessGroup) -> None:
    power = PowerSgd(CONFIG, group)
    for step in range(4):
        reduced(power, gradients(step))
    broken = gradients(4)
    broken[0][3, 3] = torch.inf
    assert not all(each.isfinite().all() for each in reduced(power, broken))
    assert all(each.isfinite().all() for each in reduced(power, gradients(5)))


def test_it_goes_on_from_what_it_carried(group: dist.ProcessGroup) -> None:
    power, other = PowerSgd(CONFIG, group), PowerSgd(CONFIG, group)
    for step in range(5):
        reduced(power, gradients(step))
    carried = {name: tensor.clone() for name, tensor in power.carried()}
    other.restore(carried, SIZES, torch.device("cpu"))
    expected = reduced(power, gradients(5))
    assert all(map(torch.equal, reduced(other, gradients(5)), expected))
    # Saved by two ranks: the one rank takes up both errors.
    half = carried["error.0"] / 2
    other.restore({**carried, "error.0": half, "error.1": half}, SIZES, torch.device("cpu"))
    assert torch.equal(reduced(other, gradients(5))[1], expected[1])
    other.restore({**carried, "rank": torch.tensor(3)}, SIZES, torch.device("cpu"))
    assert int(torch.linalg.matrix_rank(reduced(other, gradients(5))[0])) == CONFIG.rank
    with pytest.raises(EngineError, match="errors of 400 numbers"):
        other.restore(carried, 99, torch.device("cpu"))
