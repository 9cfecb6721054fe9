"""What a run's engines take of the machine's memory, as `stretto check` counts it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from commands import called
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.cli.start import check_memory
from stretto.cli.start.check_memory import memory_lines, memory_problems

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
MIB, GIB = 2**20, 2**30
PARAMETERS = 204_096
"""Of the quickstart's model."""


def assembled(*overrides: str) -> Assembly:
    return Assembly(compose(QUICKSTART / "run.yaml", overrides))


def machine(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=int(gib * GIB)))


def problems(*overrides: str, limited: bool = True) -> dict[str, tuple[str, str]]:
    found = memory_problems(assembled(*overrides), limited=limited)
    return {each.path: (each.severity, each.message) for each in found}


def test_check_says_what_each_process_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 16)
    cache = 5.5 * GIB
    lines = [*memory_lines(assembled(f"inference.cache_gb={cache / GIB}", "inference.slots=40"))]
    assert lines == [
        "memory     training 0.3 GiB",
        "           inference 5.8 GiB (40 slots x 96 tokens, cache at most 5.5 GiB)",
        "           6.0 GiB of 16.0, besides activations",
    ]
    assert "\nmemory     training 0.3 GiB\n" in called("check", QUICKSTART / "run.yaml").stdout


def test_what_does_not_fit_is_refused_unless_a_user_knows_better(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 16)
    assert problems() == {}
    assert problems("inference.cache_gb=13")["model"][0] == "warning"  # over 80 %
    severity, message = problems("inference.cache_gb=60")["model"]
    assert severity == "error"
    assert message.startswith("its engines take 60.5 GiB of memory, and this machine has 16.0: training 0.3")
    assert problems("inference.cache_gb=60", limited=False)["model"][0] == "warning"
    refused = called("check", QUICKSTART / "run.yaml", "inference.cache_gb=60")
    assert refused.returncode == 2
    assert "--no-memory-limit" in refused.stderr
    accepted = called("check", QUICKSTART / "run.yaml", "inference.cache_gb=60", "--no-memory-limit")
    assert accepted.returncode == 0
    assert "warning" in accepted.stderr
    assert problems("inference.cache_gb=60", "launcher=slurm") == {}  # other machines


def test_a_cache_without_a_size_keeps_within_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 slots of 96 tokens of 1.5 kB would take 4.5 MiB."""
    machine(monkeypatch, 0.02)
    [_, engine, _] = memory_lines(assembled("evaluation.own_engine=false", "inference.slots=32"))
    assert "cache at most 0.0025 GiB" in engine


def test_weights_that_do_not_fit_into_shared_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_usage(folder: Path) -> SimpleNamespace:
        assert folder == Path("/dev/shm")
        return SimpleNamespace(free=2 * 4 * PARAMETERS - 1)

    monkeypatch.setattr(check_memory, "shutil", SimpleNamespace(disk_usage=disk_usage))
    severity, message = problems()["weights"]
    assert (severity, "--shm-size" in message) == ("environment", True)
    assert "weights" not in problems("training.dtype=bfloat16")
    assert "weights" not in problems("weights.folder=/tmp")
