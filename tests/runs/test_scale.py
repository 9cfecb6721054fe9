"""`benchmarks/scale.py` with a few workers: the whole protocol, and every figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_benchmark_of_many_workers_measures_every_figure() -> None:
    command = [sys.executable, str(BENCHMARKS / "scale.py"), "10", "40", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {"kernel_us_per_group", "beacon_bytes_per_worker_s"}
    for each in figures.values():
        assert set(each) == {"10", "40"}
        assert all(figure > 0 for figure in each.values())
    few, more = figures["beacon_bytes_per_worker_s"].values()
    assert more < 2 * few
