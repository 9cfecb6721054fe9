"""`stretto quickstart`: the packaged files, copied into a folder and run."""

import json
from pathlib import Path

import pytest

from commands import called, stretto
from stretto.assembly.compose import compose
from stretto.cli.start.quickstart import copy_quickstart

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "quickstart"
SHORT = ("steps=2", "evaluation=null", "queue.batch_size=4")
MOCK = ("inference=mock", "training=mock", "samples.keep=none")


@pytest.mark.slow
def test_one_command_copies_the_quickstart_and_runs_it(tmp_path: Path) -> None:
    done = stretto("quickstart", *SHORT, *MOCK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "to run it again: stretto run quickstart/run.yaml" in done.stderr
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["version"] == 2
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


@pytest.mark.parametrize(
    ("there", "arguments", "said"),
    [
        ("notes/mine.txt", ["notes"], "'notes' exists and is not an empty folder"),
        ("model/config.json", [], "the working directory has 'model'"),
        ("empty/", ["empty", "training.lrr=1"], "did you mean 'lr'?"),
        ("empty/", ["absent", "training.lrr=1"], "did you mean 'lr'?"),
    ],
)
def test_a_refused_run_leaves_everything_as_it_is(
    there: str, arguments: list[str], said: str, tmp_path: Path
) -> None:
    folder, _, file = there.partition("/")
    (tmp_path / folder).mkdir()
    if file:
        (tmp_path / there).write_text("mine")
    done = called("quickstart", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    assert left == [folder, *([there] if file else [])]
