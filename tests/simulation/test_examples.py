"""Every run file of `examples/`, and every component that `stretto new` writes, can be simulated and planned,
or the command says why not; a run that fails without any fault leaves a tape."""

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

import stretto_simulate
from patience import patience
from plugin_files import write_plugin
from stretto.cli.main import app
from stretto.errors import StrettoError
from stretto.simulation import ServiceTimes

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = EXAMPLES / "quickstart" / "run.yaml"
MODEL = EXAMPLES / "quickstart" / "model"
RUN_FILE = re.compile("^model: ", re.MULTILINE)
FILES = [path for path in sorted(EXAMPLES.rglob("*.yaml")) if RUN_FILE.search(path.read_text())]
ROWS = [
    {"prompt": f"{n}+1=", "problem": "1+1=", "answer": "2", "completion": "2", "chosen": "2", "rejected": "3"}
    for n in range(8)
]
CHEAP = ServiceTimes(
    callback_s=dict.fromkeys(("kernel", "rollout", "verifier", "inference", "trainer"), 1e-6), message_s=1e-6
)


def said(*arguments: object) -> str:
    command = CliRunner().invoke(app, [*map(str, arguments)])
    if command.exception is not None and not isinstance(command.exception, StrettoError | SystemExit):
        raise command.exception
    return f"{command.output}{command.exception or ''}"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(EXAMPLES.parent)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "times.json").write_bytes(msgspec.json.encode(CHEAP))
    return file


def small_run(file: Path, rows: Path, *more: str) -> list[str]:
    """A run file and what makes it small, with data and a model that are here."""
    document: dict[str, Any] = yaml.safe_load(file.read_text())
    small = ["steps=2", "queue.batch_size=2", "checkpoint.every=0", f"model={MODEL}"]
    if "dataset=fresh" not in more:
        small.append(f"dataset={{use: jsonl, path: {rows}}}")
    if "evaluation" in document:
        small += [f"evaluation.dataset={{use: jsonl, path: {rows}}}", "evaluation.rows=2"]
    small += ["inference.context_length=128"] if "inference" in document else []
    return [str(file), *small, *more]


def simulated(*arguments: str) -> str:
    return said("simulate", *arguments, "--seeds", 1, "--jobs", 1)


def planned(rows: Path, *arguments: str) -> str:
    return said("plan", *arguments, "--only", "--times", rows.with_name("times.json"))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_every_example_can_be_simulated_and_planned(file: Path, rows: Path) -> None:
    run = small_run(file, rows)
    if "agent" in file.parts:
        assert simulated(*run) == planned(rows, *run)
        assert simulated(*run).startswith("the workflow 'agent' cannot be simulated: it needs HTTP servers")
        return
    assert ": no failure" in simulated(*run)
    of_rows = re.search(r"^algorithm:( \w+$|\n +use: (sft|dpo|reward_model))", file.read_text(), re.MULTILINE)
    assert ("a forecast is of a run whose policy samples" if of_rows else "1.00  2.00") in planned(rows, *run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["algorithm", "dataset", "reward", "workflow"])
def test_every_new_component_can_be_simulated_and_planned(kind: str, rows: Path, tmp_path: Path) -> None:
    said("new", kind, "fresh", "--folder", tmp_path / "package")
    [module] = (tmp_path / "package").glob("stretto_*/__init__.py")
    run = small_run(QUICKSTART, rows, f"plugins=[{module}]", f"{kind}=fresh")
    assert ": no failure" in simulated(*run)
    assert "1.00  2.00" in planned(rows, *run)


STUCK = """
    import asyncio
    from stretto_single_turn import SingleTurn

    class make(SingleTurn):
        async def run(self, prompt, session):
            await asyncio.Event().wait()
"""


HANGING = STUCK.replace("await asyncio.Event().wait()", "while True: pass")
SLOW_SEARCH = STUCK.replace("await asyncio.Event().wait()", "raise TimeoutError('the search was slow')")


@pytest.mark.parametrize(
    ("command", "workflow", "named"),
    [
        (
            simulated,
            HANGING,
            "without any fault, a limit ended the simulated run; it did not fail:\nseed 0: hung",
        ),
        (planned, HANGING, "the simulated run has not completed: it reached its limit: 1 processor seconds"),
        (simulated, SLOW_SEARCH, "TimeoutError: the search was slow"),
    ],
)
def test_the_limit_that_ended_something_is_named(
    command: Callable[..., str],
    workflow: str,
    named: str,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = write_plugin(tmp_path, "workflow", workflow, "stretto.WorkflowConfig")
    run = small_run(QUICKSTART, rows, f"plugins=[{plugin}]", "workflow=mine", "evaluation=null")
    for module in ("search", "forecast"):
        monkeypatch.setattr(import_module(f"stretto.simulation.{module}"), "LIMIT_S", 1)
    monkeypatch.chdir(tmp_path)
    told = simulated(*run, "--limit", "1") if command is simulated else planned(rows, *run)
    assert named in told
    assert "workflow.timeout_s" not in told
    assert "exit status" not in told


def test_a_run_has_the_steps_that_fit_and_shows_progress(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = [value for value in small_run(QUICKSTART, rows, "evaluation=null") if value != "steps=2"]
    monkeypatch.setattr(stretto_simulate, "_UNIVERSE_S", 0)
    monkeypatch.setattr(stretto_simulate, "_SAY_S", 0.1)
    told = simulated(*run)
    assert "simulating 1 of 200 steps; `steps=200` simulates all" in told
    assert "  0 of 1 universes done, 0 failed, " in told


def test_a_run_that_is_stuck_without_a_fault_leaves_a_tape(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = write_plugin(tmp_path, "workflow", STUCK, "stretto.WorkflowConfig")
    monkeypatch.chdir(tmp_path)
    stuck = (f"plugins=[{plugin}]", f"workflow={{use: mine, timeout_s: {patience(1e9)}}}")
    told = simulated(*small_run(QUICKSTART, rows, *stuck))
    assert "without any fault, the simulated run fails:\nseed 0: " in told
    assert "to repeat it: stretto simulate --replay tape-0.json" in told
    tape = json.loads((tmp_path / "tape-0.json").read_text())
    assert (tape["seed"], tape["faults"]) == (0, [])
    again = said("simulate", "--replay", "tape-0.json")
    assert "make.run:" in again
    assert "waits: kernel: " in again
