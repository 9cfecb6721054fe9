"""`benchmarks/faults.py`: faults of the machine in real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import figures_of


@pytest.mark.chaos
def test_runs_go_on_pause_or_can_be_resumed_at_every_fault(tmp_path: Path) -> None:
    figures = figures_of("faults.py", "--jobs", 3, "--folder", tmp_path / "faults")
    assert figures["failed"] == []
    assert {name for name, seen in figures["faults"].items() if seen["resumes"] == 0} >= {
        *("rollout stopped", "inference stopped", "verifier stopped", "scoring stopped", "guard stopped"),
        *("nats-server stopped", "kernel stopped", "all stopped", "store without room"),
    }
