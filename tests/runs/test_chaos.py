"""`benchmarks/chaos.py` in small: kills at random moments, and an audit of what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from processes import figures_of


def chaos(folder: Path, *arguments: str) -> dict[str, Any]:
    """The figures of a series of attacked runs that all passed."""
    return figures_of("chaos.py", *arguments, "--folder", folder)


@pytest.mark.slow
def test_kills_at_random_moments_lose_and_double_nothing(tmp_path: Path) -> None:
    figures = chaos(tmp_path / "chaos", "--kills=8", "--seed=1", "--only=mock")
    assert figures["kills"] >= 6  # sometimes there is no process of the kind at that moment
    assert (figures["lost"], figures["doubled"]) == (0, 0)


@pytest.mark.chaos
def test_kills_in_all_configurations_lose_and_double_nothing(tmp_path: Path) -> None:
    figures = chaos(tmp_path / "chaos", "--kills=32", "--seed=2")
    assert figures["kills"] >= 24
    assert (figures["lost"], figures["doubled"]) == (0, 0)


@pytest.mark.chaos
def test_kills_change_no_bit_of_a_synchronous_deterministic_run(tmp_path: Path) -> None:
    figures = chaos(tmp_path / "chaos", "--identical=5")
    assert figures["kills"] >= 10
    assert len(figures["digests"]) == 6
    assert len(set(figures["digests"].values())) == 1
