"""Runs whose numbers of threads and processes are `auto`, and change while they go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.assembly.compose import compose
from stretto.errors import ConfigError
from stretto.kernel.division import division_of

Start = Callable[..., Any]

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
REAL = (
    f"model={MODEL}",
    "training=torch",
    "inference=torch",
    "sampling.max_tokens=24",
    "queue.batch_size=8",
)

PLANNED = """
from stretto.hooks import hookimpl
from stretto.kernel.division import CoreDivision

PLAN = {plan}

def step(self, load):
    self.steps = getattr(self, "steps", 0) + 1
    before, self.numbers = self.numbers, self.numbers | PLAN.get(self.steps, {{}})
    self._best = self.numbers
    self._keep()
    return self.numbers != before

@hookimpl
def stretto_run_configured(config):
    CoreDivision.step = step
"""


def planned(folder: Path, plan: dict[int, dict[str, int]]) -> str:
    """An override for a run whose division does not measure: after these steps it has these numbers."""
    file = folder / "planned.py"
    file.write_text(PLANNED.format(plan=plan))
    return f"plugins=[{file}]"


def events(run: Any, name: str) -> list[dict[str, Any]]:
    """The lines of a process's log, in order."""
    return [json.loads(line) for line in (run.folder / "logs" / name).read_text().splitlines()]


@pytest.mark.slow
def test_a_run_killed_after_its_threads_have_changed_repeats_its_steps_bit_for_bit(
    start: Start, tmp_path: Path
) -> None:
    plan = planned(tmp_path, {2: {"training.threads": 2, "inference.threads": 2}})
    auto = ("training.threads=auto", "inference.threads=auto")
    run = start(*REAL, *auto, plan, "checkpoint.every=0", "steps=6")
    run.until_step(4)
    run.process.kill()
    run.process.wait()
    resumed = start(resume=run)
    resumed.assert_completed(6, batch_size=8)
    names = [event["event"] for event in events(run, "kernel.jsonl")]
    assert names.count("step repeated") >= 4
    assert "repetition differs" not in names
    changes = [event["number"] for event in events(run, "trainer-0.jsonl") if event["event"] == "threads"]
    assert changes == [2, 1, 2]  # the last two in the repetition, whose kernel begins with 2
    assert 2 in [event["number"] for event in events(run, "inference-0.jsonl") if event["event"] == "threads"]
    run.assert_audit_is_clean()


@pytest.mark.slow
def test_another_number_of_processes_goes_over_a_checkpoint(start: Start, tmp_path: Path) -> None:
    plan = planned(tmp_path, {2: {"training.processes": 2}, 4: {"training.processes": 1}})
    overrides = (
        "training=fsdp2",
        "training.shard=false",
        "training.processes=auto",
        "training.dtype=float32",
    )
    run = start(*REAL, *overrides, plan, "steps=8")
    run.assert_completed(8, batch_size=8)
    joined = [event["worker"] for event in events(run, "kernel.jsonl") if event["event"] == "worker joined"]
    assert (joined.count("trainer-0"), joined.count("trainer-1")) == (3, 1)
    assert json.loads((run.folder / "division.json").read_text())["numbers"] == {"training.processes": 1}
    run.assert_audit_is_clean()


def test_auto_stays_out_where_another_engine_or_deterministic_needs_a_fixed_number(
    tmp_path: Path,
) -> None:
    quickstart = MODEL.parent / "run.yaml"
    composed = compose(quickstart, ["training=mock"])
    assert composed.measured == ("inference.threads",)
    assert any("'mock' does not use threads" in note for note in composed.notices), composed.notices
    deterministic = compose(quickstart, ["inference.deterministic=true"])
    assert dict(division_of(deterministic, tmp_path).numbers) == {"training.threads": 1}
    with pytest.raises(ConfigError, match=r"training\.threads: cannot be measured for this component"):
        compose(quickstart, ["training=mock", "training.threads=auto"])
