"""`stretto run --supervise`: the next kernel after one that was killed, and signals."""

import json
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import write_run_file

from fixture_types import Start
from patience import patience
from plugin_files import write_plugin
from processes import arguments_of
from stretto.cli.start import supervise
from stretto.launcher import ROLES
from terminals import Terminal

PLAIN = """
from stretto_local import LocalLauncher

class PlainLauncher:
    def __init__(self, config, context):
        local = LocalLauncher(config, context)
        self.check, self.launch = local.check, local.launch

make = PlainLauncher
"""


def kernel_of(run: Any) -> psutil.Process:
    return run.until(lambda: next(iter(psutil.Process(run.process.pid).children()), None))


@pytest.mark.slow
def test_a_killed_kernel_is_followed_by_the_next_one(start: Start) -> None:
    run = start("--supervise", "steps=14", "checkpoint.every=5")
    workers = None
    for step in (3, 8):
        run.until_step(step)
        processes = json.loads((run.folder / "bus" / "processes.json").read_text())
        assert workers in (None, processes["workers"])
        workers = processes["workers"]
        kernel_of(run).kill()
    run.assert_completed(14)
    assert run.text().count("the kernel was killed by SIGKILL at version ") == 2
    assert run.text().count("workers of the former kernel live on") == 2
    assert "checkpoint" in run.text()


@pytest.mark.slow
def test_workers_that_no_launcher_takes_over_leave_before_others_start(start: Start, tmp_path: Path) -> None:
    plugin = write_plugin(tmp_path, "launcher", PLAIN, "stretto.LauncherConfig")
    run = start("--supervise", "steps=14", "checkpoint.every=5", f"plugins=[{plugin}]", "launcher=mine")
    run.until_step(3)
    files = [str(run.folder / "bus" / f"{role}-0.json") for role in ROLES]
    former = {run.process_with(file).pid for file in files}
    kernel_of(run).kill()

    def has_started_again() -> bool:
        present = [(each.pid, file) for each in run.look() for file in files if file in arguments_of(each)]
        assert len({file for _, file in present}) == len(present), "a worker runs twice"
        return len(present) == len(files) and not former & {pid for pid, _ in present}

    run.until(has_started_again)
    run.assert_completed(14)
    assert "all workers start again: the launcher takes over none of a former kernel" in run.text()


@pytest.mark.slow
def test_nothing_is_left_of_a_run_whose_supervisor_was_killed_too(start: Start) -> None:
    run = start("--supervise", "steps=100", f"bus.grace_s={patience(3)}")
    run.until_step(3)
    run.process.send_signal(signal.SIGSTOP)  # it starts no other kernel
    kernel_of(run).kill()
    run.process.kill()
    run.assert_nothing_is_left()


@pytest.mark.slow
def test_a_kernel_that_is_killed_again_and_again_is_given_up(start: Start) -> None:
    run = start("--supervise", "steps=100", "checkpoint.every=2")
    run.until_step(3)
    for number in range(1, 5):
        kernel_of(run).kill()
        if number < 4:
            run.until(lambda number=number: run.text().count("the kernel was killed") == number)
    assert run.end() == 128 + signal.SIGKILL
    assert "times without a new step: stretto resume" in run.text()


@pytest.mark.slow
def test_a_signal_reaches_the_run_once(start: Start) -> None:
    """So it finishes its step; two would end it at once."""
    run = start("--supervise", "steps=100")
    run.until_step(2)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 130
    assert run.summary()["reason"] == "SIGTERM"


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.0, 0.5, 1.5])
def test_a_signal_while_the_next_kernel_starts_ends_the_run(start: Start, pause_s: float) -> None:
    run = start("--supervise", "steps=400", f"bus.grace_s={patience(3)}")
    run.until_step(2)
    kernel_of(run).kill()
    run.until(lambda: "the next one continues the run" in run.text())
    time.sleep(pause_s)  # while it imports, while it checks, while it takes the workers over
    run.process.send_signal(signal.SIGTERM)
    assert run.end() in (130, 128 + signal.SIGTERM)
    run.assert_nothing_is_left()


def test_overrides_are_kept_until_they_are_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").touch()
    commands: list[Sequence[str]] = []

    def run(arguments: Sequence[str]) -> tuple[int, bool]:
        commands.append(arguments)
        if len(commands) == 2:
            (tmp_path / "config-1.yaml").write_text("name: former")
        return (-9, False) if len(commands) < 4 else (-15, True)

    monkeypatch.setattr(supervise, "_run", run)
    monkeypatch.setattr(supervise, "await_lock", Path)
    first = ["resume", str(tmp_path), "a=1", "--accept-dataset", "--expire-batch"]
    assert supervise.supervise(first, tmp_path, ["--accept-dataset"], ["a=1"]) == 128 + signal.SIGTERM
    again = ["resume", str(tmp_path), "--accept-dataset"]
    assert commands == [first, [*again[:2], "a=1", again[2]], again, again]


@pytest.mark.slow
def test_ctrl_c_reaches_the_run_once(tmp_path: Path) -> None:
    """The terminal sends it to supervisor and kernel."""
    file, folder = write_run_file(tmp_path), tmp_path / "by-hand"
    metrics = folder / "metrics.jsonl"
    with closing(Terminal("run", f"{file}", "steps=100", f"out={folder}", "--supervise")) as terminal:
        terminal.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
        terminal.press("\x03")
        assert terminal.end() == 130, terminal.shown
    assert json.loads((folder / "summary.json").read_text())["reason"] == "SIGINT"
