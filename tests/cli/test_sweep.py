"""Sweeps through the command line, with runs of the mock engines; and what runs at once."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
import yaml
from rich.console import Console

from commands import STRETTO, output_of
from patience import patience
from statuses import make_status
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.cli.sweep.sweep import Machine, Needs, Sweep, needs_of
from stretto.cli.sweep.sweep_grid import grid
from stretto.cli.sweep.sweep_report import CombinationFigures, report_of, report_tables
from stretto.cli.sweep.sweep_view import SweepView
from stretto.errors import ConfigError
from stretto.records.comparison import compare_runs
from stretto.run_folder import RunFolder
from stretto_views.compare import comparison_tables
from stretto_views.report import report_html
from stretto_views.runs import runs_below, runs_table
from waiting import until

RUN = """\
name: test
algorithm: {use: grpo, group_size: 4}
training: {use: mock, seconds_per_step: 0.02, threads: 2}
inference: {use: mock, tokens_per_s: 20000, mean_tokens: 24}
reward: {use: function, function: score.py:score}
dataset: {use: jsonl, path: rows.jsonl}
evaluation: {dataset: {use: jsonl, path: rows.jsonl}, rows: 4}
queue: {batch_size: 2}
samples: {keep: none}
steps: 3
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "score.py").write_text("def score(prompt, completion): return 0.5\n")
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def planned(file: Path, *items: str, seeds: str | None = None) -> Sweep:
    return Sweep(file, grid(items, seeds), file.parent / "sweep")


# ---------------------------------------------------------------------------------- before it starts


def test_an_error_names_its_combination(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"batch_size-none: override queue.batch_size: expected int"):
        planned(run_file, "queue.batch_size=2,none")
    sweep = planned(run_file, "sampling.temperature=1,0", seeds="1,2")
    with pytest.raises(ConfigError, match=r"^temperature-0_seed-1: .*0 is greedy"):
        sweep.check()


def test_equal_values_written_in_two_ways_are_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"seconds_per_step-0.1 and .* are the same run"):
        planned(run_file, "training.seconds_per_step=0.1,1e-1").check()


def test_a_folder_with_a_run_of_other_values_is_refused(run_file: Path) -> None:
    sweep = planned(run_file, "queue.max_staleness=0,1", "steps=2")
    folder = run_file.parent / "sweep" / "max_staleness-1"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump(dict(sweep.assemblies["max_staleness-1"].composed.document))
    )
    sweep.check()
    with pytest.raises(ConfigError, match=r"max_staleness-1: .* other values \(steps is 2, now 3\)"):
        planned(run_file, "queue.max_staleness=0,1").check()


def test_a_run_needs_what_its_plan_says(run_file: Path) -> None:
    needs = needs_of(Assembly(compose(run_file, ["rollout.memory_gb=2.5"])))
    assert needs == Needs(cores=3, memory_gb=6.5, gpus=0)  # kernel, trainer, inference, verifier: 1 GiB each
    gpus = ["inference.replicas=3", "inference.gpus=1", "inference.share=0.6", "training.gpus=1"]
    assert needs_of(Assembly(compose(run_file, [*gpus, "training.share=0.4"]))).gpus == 3
    assert needs_of(Assembly(compose(run_file, [*gpus, "training.share=0.5"]))).gpus == 4


def test_a_machine_carries_runs_until_something_is_short() -> None:
    machine = Machine(cores=8, memory_gb=20, gpus=("0", "1", "2"))
    needs = Needs(cores=3, memory_gb=4, gpus=1)
    left = machine.without(needs, ["0"]).without(needs, ["1"])
    assert (left.cores, left.memory_gb, left.gpus) == (2, 12, ("2",))
    assert not left.fits(needs)
    assert left.fits(Needs(2, 12, 1))
    assert not left.fits(Needs(2, 13, 1))
    assert not left.fits(Needs(2, 12, 2))


# ------------------------------------------------------------------------------------------ running


def command(file: Path, *arguments: str) -> list[str]:
    return ["sweep", str(file), *arguments, "--out", f"{file.parent}/sweep"]


def swept(file: Path, *arguments: str) -> str:
    """What the command prints, once all its runs are complete."""
    return output_of(*command(file, *arguments))


@pytest.mark.slow
@pytest.mark.timeout(patience(900))
def test_a_sweep_is_interrupted_goes_on_and_is_extended(run_file: Path) -> None:
    folder, values = run_file.parent / "sweep", "queue.max_staleness=0,1"
    with (run_file.parent / "first.txt").open("w") as output:
        first = subprocess.Popen(
            [*STRETTO, *command(run_file, values, "steps=100", "--jobs", "1")], stdout=output, stderr=output
        )
    metrics = folder / "max_staleness-0" / "metrics.jsonl"
    said = (run_file.parent / "first.txt").read_text
    until(lambda: metrics.exists() and metrics.read_text().count('"ledger"') >= 2, otherwise=said)
    first.send_signal(signal.SIGINT)
    assert first.wait(patience()) == 130
    assert json.loads((folder / "max_staleness-0" / "summary.json").read_text())["status"] == "interrupted"
    assert not (folder / "max_staleness-1").exists()
    assert "the same command again continues it" in said()

    text = swept(run_file, values, "steps=100", "--jobs", "2")
    assert "max_staleness-0: completed, step 100/100, reward 0.500, held-out reward 0.500" in text
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}
    assert len(kept) == 2

    text = swept(run_file, "queue.max_staleness=1,2", "steps=100")  # one run more
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert "max_staleness-1: started" not in text
    report = json.loads((folder / "sweep.json").read_text())
    assert [run["name"] for run in report["runs"]] == [f"max_staleness-{eta}" for eta in (0, 1, 2)]
    for run in report["runs"]:
        summary = json.loads((folder / run["name"] / "summary.json").read_text())
        figures = run["figures"]
        assert (figures["state"], figures["steps"], figures["reward"]) == ("completed", 100, 0.5)
        assert figures["last"]["score"]["mean"] == summary["evaluation"][-1]["reward"] == 0.5


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(run_file: Path) -> None:
    short = patience(0.0001)
    values = f"workflow.timeout_s={short},60", "queue.max_failures=2"
    printed = output_of(*command(run_file, *values, "--jobs", "1"), status=1)
    assert f"timeout_s-{short}: exit status 1; failed at step 0" in printed
    assert "timeout_s-60: completed" in printed


# ------------------------------------------------------------------------------------------- report


def written(folder: Path, accuracy: float, reward: float) -> None:
    """A complete run's files, with the figures of two evaluations and twelve steps."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: test\nsteps: 12\n")
    steps = [{"step": n, "reward": 9.0 if n < 3 else reward, "time_s": n, "ledger": {}} for n in range(1, 13)]
    evaluations = [
        {"step": 0, "evaluation/accuracy": 0.9, "evaluation/samples": 4},
        {"step": 12, "evaluation/accuracy": accuracy, "evaluation/samples": 4},
    ]
    lines = "".join(json.dumps(line) + "\n" for line in (*steps, *evaluations))
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "summary.json").write_text(json.dumps({"status": "completed", "version": 12, "wall_s": 30.0}))


def test_the_report_has_mean_and_spread_over_seeds_and_the_best_first(run_file: Path) -> None:
    sweep = planned(run_file, "queue.max_staleness=0,1", seeds="1,2,3")
    for seed, accuracy in ((1, 0.1), (2, 0.2), (3, 0.3)):
        written(sweep.folder / f"max_staleness-0_seed-{seed}", accuracy, 0.25)
    written(sweep.folder / "max_staleness-1_seed-1", 0.8, 0.75)
    report = report_of(sweep.folder, sweep.planned())
    first, second = report.combinations
    assert (first.combination, first.completed, first.runs) == ("max_staleness-1", 1, 3)
    assert first.figures["score"].sd is None
    assert second.values == {"queue.max_staleness": "0"}
    assert figure(second, "score") == pytest.approx((0.2, 4.3027 * 0.1 / 3**0.5, 0.1), rel=1e-3)
    assert figure(second, "reward") == (0.25, 0.0, 0.0)  # of the last 10 steps
    assert figure(second, "best")[0] == pytest.approx(0.9)
    assert [run.figures is None for run in report.runs] == [False] * 4 + [True] * 2


def test_all_views_show_the_duration_of_the_summary(run_file: Path) -> None:
    sweep = planned(run_file, "queue.max_staleness=0,1")
    name = next(iter(sweep.planned()))
    written(sweep.folder / name, 0.5, 0.25)
    summary = json.loads((sweep.folder / name / "summary.json").read_text())
    (sweep.folder / name / "summary.json").write_text(json.dumps({**summary, "wall_s": 297.666}))
    (sweep.folder / name / "status.json").write_bytes(msgspec.json.encode(make_status(wall_s=290.0)))
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    for _, table in (
        *report_tables(report_of(sweep.folder, sweep.planned())),
        *comparison_tables(compare_runs([RunFolder(sweep.folder / name)])),
        ("", runs_table(runs_below(sweep.folder), sweep.folder)),
    ):
        console.print(table)
    with contextlib.redirect_stderr(shown):
        SweepView(sweep.folder, [name]).ended(name, 0)
    assert shown.getvalue().count("4 min 58 s") == 4
    assert "4 min 58 s" in report_html([RunFolder(sweep.folder / name)])


def figure(combination: CombinationFigures, name: str) -> tuple[float, float | None, float | None]:
    found = combination.figures[name]
    return found.estimate.mean, found.estimate.ci95, found.sd
