"""`benchmarks/images.py` with small images: the whole chain, and every figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_benchmark_of_images_measures_every_figure() -> None:
    command = [sys.executable, str(BENCHMARKS / "images.py"), "--steps=3", "--rounds=1", "--pixels=56"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {"images_per_s", "bytes_per_group", "bytes_ratio", "speed_ratio_to_text"}
    for each in figures.values():
        assert set(each) == {"png", "jpeg"}
        assert all(figure > 0 for figure in each.values())
    # Once for a group of 8. Groups that the end of the run left without an answer may lack theirs.
    assert all(0.04 < ratio < 0.16 for ratio in figures["bytes_ratio"].values())
