"""`benchmarks/chaos.py` and `benchmarks/faults.py`: runs under kills and under faults of the machine."""

from pathlib import Path

import pytest

from processes import figures_of


@pytest.mark.slow
def test_kills_at_random_moments_lose_and_double_nothing(tmp_path: Path) -> None:
    figures = figures_of("chaos.py", "--kills=8", "--seed=1", "--only=mock", "--folder", tmp_path / "chaos")
    assert figures["kills"] >= 6  # sometimes there is no process of the kind at that moment
    assert (figures["lost"], figures["doubled"]) == (0, 0)


@pytest.mark.chaos
def test_kills_in_all_configurations_lose_and_double_nothing(tmp_path: Path) -> None:
    figures = figures_of("chaos.py", "--kills=32", "--seed=2", "--folder", tmp_path / "chaos")
    assert figures["kills"] >= 24
    assert (figures["lost"], figures["doubled"]) == (0, 0)


@pytest.mark.chaos
def test_kills_change_no_bit_of_a_synchronous_deterministic_run(tmp_path: Path) -> None:
    figures = figures_of("chaos.py", "--identical=5", "--folder", tmp_path / "chaos")
    assert figures["kills"] >= 10
    assert len(figures["digests"]) == 6
    assert len(set(figures["digests"].values())) == 1


@pytest.mark.chaos
def test_runs_go_on_pause_or_can_be_resumed_at_every_fault(tmp_path: Path) -> None:
    figures = figures_of("faults.py", "--jobs", 3, "--folder", tmp_path / "faults")
    assert figures["failed"] == []
    assert {name for name, seen in figures["faults"].items() if seen["resumes"] == 0} >= {
        *("rollout stopped", "inference stopped", "verifier stopped", "scoring stopped", "guard stopped"),
        *("nats-server stopped", "kernel stopped", "all stopped", "store without room"),
    }
