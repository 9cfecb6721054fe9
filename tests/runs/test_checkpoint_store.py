"""Runs whose trainers share no folder with the kernel: their checkpoints are in a store."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import Start, write_run_file

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.cli.start.checks import faults_and_warnings
from stretto.errors import ConfigError

HIDDEN = Path(__file__).parent.parent / "helpers" / "hidden_folder.py"


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    store = f"checkpoint.store=file://{tmp_path}/store"
    return [f"plugins=[{HIDDEN}]", "launcher.use=hidden", "weights=bus", "checkpoint.every=2", store]


@pytest.mark.slow
def test_a_run_goes_on_from_the_store(start: Start, options: list[str], tmp_path: Path) -> None:
    run = start(*options, "steps=400", "training.seconds_per_step=0.05")
    run.until_step(5)
    run.kill()
    [folder] = (tmp_path / "store").iterdir()
    assert len(list(folder.glob("step-*/manifest.json"))) == 2
    again = start("steps=7", resume=run)
    again.assert_completed(7)
    again.assert_audit_is_clean()
    assert not list((run.folder / "logs").glob("trainer-0.jsonl*"))  # it has not seen the folder
    kept = {path.name.rpartition("-")[0]: path for path in folder.iterdir()}
    assert len(kept) == 2
    manifest = json.loads((kept["step-000007"] / "manifest.json").read_text())
    assert manifest.keys() == {"mock.json", "kernel.json"}


@pytest.mark.slow
def test_without_a_store_the_trainer_says_what_to_do(start: Start, options: list[str]) -> None:
    run = start(*options[:-1])
    assert run.end() == 1
    assert "does not see the run's folder" in run.text()
    assert "set `checkpoint.store` to the URL of a store" in run.text()


def test_urls_that_cannot_be_used_are_refused(refusals: Callable[..., list[str]]) -> None:
    with pytest.raises(ConfigError, match=r"without a login; found 's3://<login>@host/folder'"):
        refusals("checkpoint.store=s3://me:secret@host/folder")
    [memory] = refusals("checkpoint.store=memory://folder")
    assert "the processes of a run share none" in memory


def test_a_url_is_not_the_folder_of_a_run(tmp_path: Path) -> None:
    composed = compose(write_run_file(tmp_path), ["out=s3://bucket/runs"])
    [fault] = faults_and_warnings(Assembly(composed), starting=True)[0]
    assert "write it as `checkpoint.store`" in fault
