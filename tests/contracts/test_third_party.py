"""A package outside the repository, installed with pip: listed, checked and run like our own."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import output_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "acme"
    shutil.copytree(ROOT / "examples" / "plugin_package", source)
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", target, source], check=True)
    return target


@pytest.fixture(autouse=True)
def with_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))


def test_it_is_listed_with_its_distribution_and_its_config() -> None:
    lines = [line.split() for line in output_of("plugins").splitlines()]
    ours = {(line[0], line[1]) for line in lines if line[2:4] == ["acme-rl", "0.3"]}
    assert ours == {("algorithm", "reinforce"), ("reward", "digits"), ("launcher", "plain")}
    shown = output_of("plugins", "algorithm", "reinforce")
    assert "max_weight: float > 0 = 2.0" in shown
    assert "Largest importance weight" in shown
    assert '"algorithm_reinforce"' in output_of("schema")


@pytest.mark.slow
def test_it_is_checked_and_run_without_a_change_to_stretto(start: Callable[..., Any], tmp_path: Path) -> None:
    names = ["algorithm=reinforce", "algorithm.max_weight=3", "reward=digits", "launcher=plain", "steps=3"]
    run = start(*names)
    plan = output_of("check", str(tmp_path / "run.yaml"), *names, f"out={tmp_path}/other")
    assert "advantages: rewards, group, sample -> advantages" in plan
    run.assert_completed(3)
    assert run.metrics()[0]["reward"] > 0
