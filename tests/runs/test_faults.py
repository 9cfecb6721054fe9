"""`benchmarks/faults.py`: faults of the machine in real runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.chaos
def test_runs_go_on_pause_or_can_be_resumed_at_every_fault(tmp_path: Path) -> None:
    command = [sys.executable, str(FAULTS), "--jobs", "3", "--folder", str(tmp_path / "faults")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["failed"] == []
    assert {name for name, seen in figures["faults"].items() if seen["resumes"] == 0} >= {
        *("rollout stopped", "inference stopped", "verifier stopped", "scoring stopped", "guard stopped"),
        *("nats-server stopped", "kernel stopped", "all stopped", "store without room"),
    }
