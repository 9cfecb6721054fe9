"""Where a run comes from."""

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

import stretto.records.origin
from kernel_setup import write_run
from stretto.assembly.compose import compose
from stretto.engine import Sampling
from stretto.errors import ConfigError
from stretto.kernel.durable.changes import put_into_force, write_values
from stretto.machine import gpus
from stretto.records.origin import read_origin, write_origin
from stretto.records.run_folder import RunFolder


def test_the_keys_of_the_file_and_of_overrides_are_kept_also_those_of_a_resume(tmp_path: Path) -> None:
    composed = compose(write_run(tmp_path, steps=3), ["training.seconds_per_step=0.5", "steps=4"])
    write_values(tmp_path, composed)
    write_origin(tmp_path, composed.config, composed.written)

    origin = RunFolder(tmp_path).origin()
    assert origin is not None
    assert set(origin.written) == {
        *("name", "steps", "algorithm.use", "algorithm.group_size", "dataset.use", "dataset.path"),
        *("training.use", "training.seconds_per_step", "inference.use", "reward.use"),
    }
    assert origin.packages["stretto"] == version("stretto")
    assert origin.defaults["training.seconds_per_step"] == "1.0"
    assert origin.defaults["sampling.max_tokens"] == str(Sampling().max_tokens)
    assert not {"name", "dataset.path", "training"} & origin.defaults.keys()  # they have none

    put_into_force(tmp_path, compose(tmp_path / "config.yaml", ["steps=5", "algorithm.eps_clip=0.3"]))
    changed = read_origin(tmp_path)
    assert changed is not None
    assert changed.written == [*origin.written, "algorithm.eps_clip"]


def test_the_gpus_are_those_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\nfor at in 0 1; do echo "GPU $at: NVIDIA H100 80GB HBM3 (UUID: $at)"; done')
    program.chmod(0o755)
    monkeypatch.setattr(gpus, "_PROGRAMS", (str(program),))
    monkeypatch.setattr(stretto.records.origin, "listed_gpus", gpus.listed_gpus.__wrapped__)
    write_origin(tmp_path, Sampling(), [])
    assert (origin := read_origin(tmp_path)) is not None
    assert origin.gpus == ["NVIDIA H100 80GB HBM3"] * 2


def test_the_commit_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def commit() -> str:
        write_origin(tmp_path, Sampling(), [])
        origin = read_origin(tmp_path)
        assert origin is not None
        return origin.commit

    def git(*arguments: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        return subprocess.run(["git", *names, *arguments], check=True, capture_output=True, text=True).stdout

    assert commit() == ""
    (tmp_path / "rewards.py").write_text("")
    git("init", "-q")
    git("add", "rewards.py")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD").strip()
    assert commit() == head
    (tmp_path / "rewards.py").write_text("changed")
    assert commit() == f"{head}+"
    (tmp_path / "origin.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not say where a run comes from"):
        read_origin(tmp_path)
