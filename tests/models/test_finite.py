"""NaN and infinity in weights are found, whatever the dtype."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stretto.errors import WeightsError
from stretto.models.finite import not_finite
from stretto.models.version_files import FolderPublisher


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_not_finite_is_counted_and_named(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-1, 1, 1000).reshape(10, 100).to(dtype)
    assert not not_finite("w", tensor)
    for value in (torch.nan, torch.inf, -torch.inf):
        wrong = tensor.clone()
        wrong[7, 3] = wrong[9, 99] = value
        text = "weights are not finite: 2 of 1000 values of tensor 'w' are NaN or infinite"
        assert not_finite("w", wrong) == text


def test_numbers_that_cannot_be_infinite_are_finite() -> None:
    for tensor in (torch.ones(3, dtype=torch.int64), torch.empty(0), torch.ones(3).to(torch.float8_e4m3fn)):
        assert not not_finite("w", tensor)


def test_a_version_that_breaks_off_leaves_no_files(tmp_path: Path) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1000)
        raise WeightsError("the second tensor is not finite")

    publisher = FolderPublisher(tmp_path / "versions", 3, shard_gb=1e-6)
    with pytest.raises(WeightsError, match="the second tensor"):
        publisher.publish(0, weights())
    assert list((tmp_path / "versions").iterdir()) == []
