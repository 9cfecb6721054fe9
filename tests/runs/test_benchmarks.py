"""Benchmarks of whole runs with small inputs: the whole chain, and every figure."""

from __future__ import annotations

from typing import Any

import pytest

from processes import figures_of

pytestmark = pytest.mark.nightly


def positive(benchmark: str, *arguments: str, each: set[str]) -> dict[str, Any]:
    """The positive figures that a benchmark prints, each by what it was measured for."""
    figures = figures_of(benchmark, *arguments)
    for values in figures.values():
        assert set(values) == each
        assert all(figure > 0 for figure in values.values())
    return figures


def test_the_benchmark_of_images_measures_every_figure() -> None:
    figures = positive("images.py", "--steps=3", "--rounds=1", "--pixels=56", each={"png", "jpeg"})
    assert set(figures) == {"images_per_s", "bytes_per_group", "bytes_ratio", "speed_ratio_to_text"}
    # Once for a group of 8. Groups that the end of the run left without an answer may lack theirs.
    assert all(0.04 < ratio < 0.16 for ratio in figures["bytes_ratio"].values())


def test_the_benchmark_of_many_workers_measures_every_figure() -> None:
    figures = positive("scale.py", "10", "40", "--quick", each={"10", "40"})
    assert set(figures) == {"kernel_us_per_group", "beacon_bytes_per_worker_s"}
    few, more = figures["beacon_bytes_per_worker_s"].values()
    assert more < 2 * few
