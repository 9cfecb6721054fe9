"""Deltas of tensor files: what they restore, what they cost, and what is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.models.deltas import FileBytes, apply_delta


def written(width: int, before: Any, after: Any, cut: int = 0) -> tuple[FileBytes, bytes | None]:
    """A file after two versions, of which the second comes as two tensors, and the delta between them."""
    file = FileBytes(len(before), width)
    file.begin(is_new=True)
    file.put(0, before)
    assert file.delta() is None
    file.begin(is_new=False)
    file.put(0, after[:cut])
    file.put(cut, after[cut:])
    return file, file.delta()


@given(st.integers(1, 2), st.integers(0, 300), st.lists(st.integers(0, 299), max_size=75), st.integers(0, 9))
def test_a_delta_leads_from_version_to_version(width: int, words: int, changed: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 256, words * width, np.uint8)
    after = before.copy()
    for word in changed[: words // 4]:
        if word < words:
            after[word * width] ^= 1 + seed
    file, delta = written(width, before, after, cut=words // 2 * width)
    assert delta is not None
    assert bytes(file.data) == after.tobytes()
    apply_delta(delta, before)
    assert (before == after).all()


def test_of_many_changes_no_delta_is_made() -> None:
    file, delta = written(2, np.zeros(200, np.uint8), np.ones(200, np.uint8))
    assert delta is None
    assert bytes(file.data) == b"\1" * 200


def test_at_a_small_rate_a_delta_has_few_hundredths_of_the_bytes() -> None:
    """A step of 1e-6 on weights as transformers have them, each in a random direction."""
    torch = pytest.importorskip("torch")
    drawn = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(1_000_000, generator=drawn)
    steps = [weights, weights + 1e-6 * torch.sign(torch.randn(1_000_000, generator=drawn))]
    _, delta = written(2, *(step.bfloat16().view(torch.uint8).numpy() for step in steps))
    assert delta is not None
    assert 0.01 < len(delta) / 2_000_000 < 0.035


def test_what_is_no_delta_of_the_file_is_refused() -> None:
    _, delta = written(2, np.zeros(400, np.uint8), (np.arange(400) % 40 == 0).astype(np.uint8))
    assert delta is not None
    damaged = [delta[:end] for end in (0, 10, -3)]
    for place, data in ((17, b"?"), (0, b"\3"), (9, (3).to_bytes(8, "little"))):
        damaged.append(delta[:place] + data + delta[place + len(data) :])
    for wrong in damaged:
        with pytest.raises(ValueError, match="delta"):
            apply_delta(wrong, np.zeros(400, np.uint8))
    with pytest.raises(ValueError, match="delta"):
        apply_delta(delta, np.zeros(398, np.uint8))
