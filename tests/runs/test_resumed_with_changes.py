"""Runs that are resumed with other values than they began with."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fixture_types import Start
from patience import patience
from stretto.bus.messages.events import BatchStarted, Event, RunOwned
from worlds import in_both_worlds, module_in_both_worlds

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


# ---------------------------------------------------------------------------- resumed with changes


def changes(events: list[Event]) -> list[RunOwned]:
    """Where other values came into force."""
    owned = [event for event in events if isinstance(event, RunOwned)]
    return [now for former, now in pairwise(owned) if now.values != former.values]


def assert_each_ticket_trained_once(events: list[Event]) -> None:
    """By the last batch that the journal has of each version."""
    batches = {event.version: event.tickets for event in events if isinstance(event, BatchStarted)}
    tickets = [ticket for batch in batches.values() for ticket in batch]
    assert len(tickets) == len(set(tickets))


@pytest.fixture(scope="module")
def completed(module_start: Start) -> Any:
    """A completed run of three steps. The last test that uses it continues with it."""
    run = module_start("steps=3", "name=run-${steps}", "queue.max_failures=${steps}")
    run.assert_completed(3)
    return run


@module_in_both_worlds
def test_what_makes_it_another_run_cannot_change_on_a_resume(
    module_start: Start, completed: Any, tmp_path: Path
) -> None:
    run = completed
    config = (run.folder / "config.yaml").read_text()
    (tmp_path / "others.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "n": 1}\n')
    refused = module_start(
        *("seed=7", "dataset.shuffle=false", f"dataset.path={tmp_path}/others.jsonl", "steps=2"),
        *("algorithm.group_size=8", f"model={QUICKSTART}/model", f"out={tmp_path}/other"),
        resume=run,
    )
    assert refused.end() == 2
    text = refused.text()
    assert "override seed: cannot change from 1 to 7 in a resumed run: the order of the rows" in text
    assert "override dataset.shuffle: cannot change from True to False" in text
    assert "override dataset: has other rows (1, fingerprint" in text
    assert "override algorithm.group_size: cannot change from 4 to 8" in text
    assert "override model: cannot change from None to" in text
    assert "override out: cannot change" in text
    assert "override steps: is 2, and the run is at version 3 already" in text
    assert (run.folder / "config.yaml").read_text() == config
    other = module_start("algorithm=sft", "algorithm.completion_column=answer", resume=run)
    assert other.end() == 2
    assert "algorithm" in other.text()


@module_in_both_worlds
def test_a_completed_run_is_extended_by_steps_and_what_refers_to_them(
    module_start: Start, completed: Any
) -> None:
    run = completed
    same = module_start("steps=3", resume=run)
    assert same.end() == 2
    assert "steps: is 3, and the run is complete: give it more" in same.text()
    module_start("steps=6", resume=run).assert_completed(6)
    run.assert_audit_is_clean()
    config = (run.folder / "config.yaml").read_text()
    assert "steps: 6" in config
    assert "max_failures: 6" in config  # a reference follows
    assert "name: run-3" in config  # a text that only contains one is a value
    assert "max_failures: 3" in (run.folder / "config-1.yaml").read_text()


COUNTED = """
import os
from pathlib import Path
from stretto import Component, hookimpl
from stretto_grpo import GRPO, GRPOConfig

def count(what):
    with Path(__file__).with_suffix(".txt").open("a") as file:
        file.write(f"{os.getpid()} {what}\\n")

class Counted(GRPO):
    def calls(self):
        count("graph")
        return super().calls()

@hookimpl
def stretto_algorithm():
    count("composed")
    yield Component("counted", Counted, GRPOConfig, "counts what is made of it")
"""


@pytest.mark.slow
def test_a_resumed_run_is_composed_and_assembled_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    run = start("steps=1", f"plugins=[{tmp_path}/counted.py]", "algorithm.use=counted")
    run.assert_completed(1)

    def counted(*overrides: str) -> tuple[int, int]:
        (tmp_path / "counted.txt").unlink()
        resumed = start(*overrides, resume=run)
        resumed.end()
        lines = (tmp_path / "counted.txt").read_text().splitlines()
        pid = resumed.process.pid
        return lines.count(f"{pid} composed"), lines.count(f"{pid} graph")

    assert counted() == (1, 0)  # the run is complete
    # The previous values are compared with the new ones, and are composed again to repeat what they trained.
    assert counted("steps=2") == (3, 3)


@in_both_worlds
def test_a_resume_with_changes_loses_no_step_of_trainers_that_live_on(start: Start) -> None:
    # Training waits for samples: no step is under way. No checkpoint is as new as the trainer, and it waits
    # for the next kernel however busy the machine is.
    run = start(
        *("checkpoint.every=50", "steps=8", f"bus.grace_s={patience(60)}"),
        *("training.seconds_per_step=0.01", "inference.tokens_per_s=1000"),
    )
    run.until_step(4)
    run.kill()
    # The first kernel finds the trainer ahead of the checkpoint, and ends for the one with the next values.
    summary = start("queue.max_staleness=1", resume=run).assert_completed(8)
    assert set(summary["lost"].values()) == {0}
    assert "workers of the former kernel live on" in [line["event"] for line in run.log()]


@in_both_worlds
def test_a_resume_with_changes_survives_a_kill_at_any_moment(start: Start) -> None:
    options = ("checkpoint.every=4", "checkpoint.keep=9", "steps=60", "training.seconds_per_step=0.2")
    run = start(*options, "samples.keep=all")
    run.until_step(7)
    run.kill()

    repeating = start("queue.batch_size=2", "queue.max_staleness=1", "steps=30", resume=run)
    repeating.until(lambda: "step repeated" in repeating.text())
    repeating.kill()
    changed = run.text().count("values changed")
    changing = start(resume=run)  # what was decided holds
    changing.until(lambda: changing.text().count("values changed") > changed)
    changing.kill()
    at = [line["version"] for line in run.log() if line["event"] == "values changed"][-1]

    training = start(resume=run)
    training.until_step(at + 5)
    training.kill()
    for folder in (run.folder / "checkpoints").glob("step-*"):
        if folder.name >= f"step-{at:06d}":
            (folder / "mock.json").write_text('{"steps": 9999}')
    offset = len(run.text())
    last = start(resume=run)
    assert last.end() == 0, last.text()
    text = last.text()[offset:]
    assert (
        text.count("step repeated") >= 5
    )  # those before the change with the old values, those after with the new
    assert "repetition differs" not in text
    summary = last.assert_balanced()
    assert summary["version"] == 30
    assert summary["ledger"]["trained"] == 4 * at + 2 * (30 - at)
    events = run.journal()
    assert len(changes(events)) == 1
    assert all(
        len(event.tickets) == (4 if event.version < at else 2)
        for event in events
        if isinstance(event, BatchStarted)
    )
    assert_each_ticket_trained_once(events)
    for folder in (run.folder / "checkpoints").glob("step-*"):
        if "9999" in (folder / "mock.json").read_text():  # damaged above, and later than what was resumed
            shutil.rmtree(folder)
    run.assert_audit_is_clean()
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert all(line["staleness_max"] <= 1 for line in lines[at:])
    last.assert_nothing_is_left()
