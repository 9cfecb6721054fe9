"""Runs that are resumed with other values than they began with."""

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fixture_types import Start
from stretto.bus.messages.events import BatchStarted, Event, RunOwned
from stretto.records.run_folder import RunFolder
from worlds import in_both_worlds, module_in_both_worlds

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


def changes(events: list[Event]) -> list[RunOwned]:
    """Where other values came into force."""
    owned = [event for event in events if isinstance(event, RunOwned)]
    return [now for former, now in pairwise(owned) if now.values != former.values]


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
    config = (completed.folder / "config.yaml").read_text()
    (tmp_path / "others.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "n": 1}\n')
    refused = module_start(
        *("seed=7", "dataset.shuffle=false", f"dataset.path={tmp_path}/others.jsonl", "steps=2"),
        *("algorithm.group_size=8", f"model={QUICKSTART}/model", f"out={tmp_path}/other"),
        resume=completed,
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
    assert (completed.folder / "config.yaml").read_text() == config
    other = module_start("algorithm=sft", "algorithm.completion_column=answer", resume=completed)
    assert other.end() == 2
    assert "algorithm" in other.text()


@module_in_both_worlds
def test_a_completed_run_is_extended_by_steps_and_what_refers_to_them(
    module_start: Start, completed: Any
) -> None:
    run = completed
    plain = module_start(resume=run)
    assert plain.end() == 2
    assert f"is complete; to train it for more steps: stretto resume {run.folder} steps=…" in plain.text()
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
from stretto_policy_gradients import GRPO, GRPOConfig

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
    assert counted("steps=2") == (2, 2)  # the previous values are compared with the new ones


@in_both_worlds
def test_other_values_begin_with_the_newest_checkpoint_whatever_is_killed(start: Start) -> None:
    options = ("checkpoint.every=4", "checkpoint.keep=9", "steps=60", "training.seconds_per_step=0.2")
    run = start(*options, "samples.keep=all")
    run.until_step(7)
    run.kill()
    reached = run.metrics()[-1]["step"]

    changing = start("queue.batch_size=2", "queue.max_staleness=1", "steps=30", resume=run)
    changing.until(lambda: "values changed" in changing.text())
    changing.kill()
    training = start(resume=run)  # what was decided holds
    training.until_step(9)
    training.kill()
    assert [line["step"] for line in run.metrics()][:9] == list(range(1, 10))
    assert "workers of the former kernel live on" not in [line["event"] for line in run.log()]
    repeating = start(resume=run)  # the checkpoint has these values, so its later steps are repeated
    repeating.until(lambda: "resumed" in repeating.text())
    repeating.kill()
    assert "repetition differs" not in run.text()
    again = run.metrics()[-1]["step"]
    for folder in (run.folder / "checkpoints").glob("step-*"):
        if folder.name > "step-000004":
            (folder / "mock.json").write_text('{"steps": 9999}')
    last = start("steps=25", resume=run)
    assert last.end() == 0, last.text()
    summary = last.assert_balanced()
    assert summary["version"] == 25
    assert summary["ledger"]["trained"] == 4 * 4 + 2 * (25 - 4)
    assert summary["lost"]["steps"] in (reached - 4, again - 4)
    assert any(each.startswith("the values have changed; lost: ") for each in summary["problems"])
    events = run.journal()
    assert {event.version for event in changes(events)} == {4}
    batches = {event.version: event.tickets for event in events if isinstance(event, BatchStarted)}
    tickets = [ticket for batch in batches.values() for ticket in batch]
    assert len(tickets) == len(set(tickets))
    for folder in (run.folder / "checkpoints").glob("step-*"):
        if "9999" in (folder / "mock.json").read_text():  # damaged above, and later than what was resumed
            shutil.rmtree(folder)
    run.assert_audit_is_clean()
    [first, *_] = [
        event.tickets for event in events if isinstance(event, BatchStarted) and event.version == 4
    ]
    in_force = RunFolder(run.folder).history.batches.values()
    for ticket in first:  # of the batch that was replaced
        assert sum(ticket in batch.tickets for batch in in_force) <= 1, ticket
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, 26))
    assert all(line["staleness_max"] <= 1 for line in lines[4:])
    last.assert_nothing_is_left()


@in_both_worlds
def test_other_values_after_a_signal_lose_nothing(start: Start) -> None:
    dataset = f"{{use: jsonl, path: {QUICKSTART}/heldout.jsonl}}"
    evaluation = f"evaluation={{dataset: {dataset}, rows: 8, every: 2}}"
    run = start("steps=60", "checkpoint.every=50", evaluation)
    run.until_step(5)
    run.operate("stop")
    run.end()
    steps = run.summary()["version"] + 3
    summary = start(f"steps={steps}", "queue.max_staleness=1", resume=run).assert_completed(steps)
    assert set(summary["lost"].values()) == {0}
    events = run.journal()
    assert {event.incarnation for event in events if isinstance(event, RunOwned)} == {0}
    assert len(changes(events)) == 1
    run.assert_audit_is_clean()
