"""`stretto quickstart`: the packaged files, copied into a folder and run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from commands import stretto
from stretto.assembly.compose import compose
from stretto.cli.start.quickstart import copy_quickstart

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "quickstart"
SHORT = ("steps=2", "evaluation=null", "queue.batch_size=4")
MOCK = ("inference=mock", "training=mock", "samples.keep=none")


def quickstart(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return stretto("quickstart", *arguments, cwd=where)


def summary_of(where: Path) -> dict[str, object]:
    """The summary of the only run in a working directory."""
    (file,) = where.glob("runs/*/summary.json")
    return json.loads(file.read_text())


@pytest.mark.slow
def test_one_command_copies_the_quickstart_and_runs_it(tmp_path: Path) -> None:
    done = quickstart(tmp_path, *SHORT, *MOCK)
    assert done.returncode == 0, done.stderr
    assert "to run it again: stretto run quickstart/run.yaml" in done.stderr
    assert summary_of(tmp_path)["version"] == 2
    copied = {path.name for path in (tmp_path / "quickstart").iterdir()}
    assert {"run.yaml", "ppo.yaml", "dpo.yaml", "model", "train.jsonl", "make_model.py"} <= copied
    config = next(tmp_path.glob("runs/*/config.yaml")).read_text()
    assert str(tmp_path / "quickstart" / "model") in config
    assert str(EXAMPLE) not in config


@pytest.mark.parametrize("name", ["run", "ppo", "dpo", "reward_model"])
def test_the_copied_run_files_find_what_lies_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with copy_quickstart(Path("here")):
        composed = compose(Path("here", f"{name}.yaml"))
    assert composed.config.model == str(tmp_path / "here" / "model")
    assert "examples/" not in Path("here", f"{name}.yaml").read_text()


def test_a_folder_that_is_not_empty_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    done = quickstart(tmp_path, "notes")
    assert done.returncode == 2
    assert "'notes' exists and is not an empty folder" in done.stderr
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["mine.txt"]


def test_files_that_would_take_the_place_of_the_quickstarts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = quickstart(tmp_path)
    assert done.returncode == 2
    assert "the working directory has 'model'" in done.stderr
    assert not (tmp_path / "quickstart").exists()


def test_a_refused_run_leaves_no_copy_behind(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "absent"):
        done = quickstart(tmp_path, folder, "training.lrr=1")
        assert done.returncode == 2
        assert "did you mean 'lr'?" in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
