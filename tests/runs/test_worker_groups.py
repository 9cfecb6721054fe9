"""Runs of several models in several worker groups, and runs that start trainers only."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fixture_types import Start
from patience import patience
from plugin_files import write_plugin
from processes import arguments_of
from stretto.bus.messages.events import StepTrained, VersionPublished
from worlds import in_simulation

SEVERAL = '''
    from stretto.algorithm import Loss, Model, forward, function, generate, score, train

    READ = ("values", "reference_logprobs", "behaviour_logprobs", "rewards")

    class make:
        """Three models; `check` fails the run if rows of any rank are not where they belong."""

        models = {"actor": Model(), "critic": Model(head="value"), "reference": Model(trainable=False)}

        def __init__(self, config, context):
            pass

        def calls(self):
            return [
                generate("actor", samples=4),
                score(),
                forward("critic", writes="values"),
                forward("reference", writes="reference_logprobs"),
                function(self.check, reads=READ, writes=("advantages", "scores"), name="check"),
                train("actor", Loss(self.loss, "token"), reads=("advantages", "scores"), minibatches=2),
                train("critic", Loss(self.loss, "token"), reads=("advantages",)),
            ]

        def keep(self, group):
            return True

        def check(self, batch):
            import torch

            assert torch.equal(batch["values"], batch["behaviour_logprobs"])
            assert torch.equal(batch["reference_logprobs"], batch["behaviour_logprobs"])
            return {"advantages": batch["tokens"].float(), "scores": batch["group"] * 2}

        def loss(self, logprobs, batch):
            import torch

            assert torch.equal(batch["advantages"], batch["tokens"].float())
            if "scores" in batch:
                assert torch.equal(batch["scores"], batch["group"] * 2)
            return logprobs, {}
'''


@pytest.fixture
def several(tmp_path: Path) -> list[str]:
    """Overrides for a run of three models, on three worker groups of two ranks each or fewer."""
    plugin = write_plugin(tmp_path, "algorithm", SEVERAL, "stretto.AlgorithmConfig")
    slow = "{use: mock, seconds_per_forward: 0.4, seconds_per_step: 0.1, calls_loss: true}"
    return [
        *(f"plugins=[{plugin}]", "algorithm=mine", "steps=3"),
        *(f"groups={{critics: {slow}, references: {slow}}}", "training.calls_loss=true"),
        *("models.critic.group=critics", "models.reference.group=references"),
        *("training.processes=2", "groups.critics.processes=2"),
    ]


@pytest.mark.slow
def test_calls_of_groups_overlap_and_rows_move_between_ranks(start: Start, several: list[str]) -> None:
    run = start(*several)
    summary = run.assert_completed(3)
    assert summary["restarts"] == 0
    for line in run.metrics():
        times = {call["call"]: (call["start_s"], call["end_s"]) for call in line["calls"]}
        critic, reference = times["forward(critic)"], times["forward(reference)"]
        assert max(critic[0], reference[0]) < min(critic[1], reference[1]) - 0.2
        assert times["check"][0] >= max(critic[1], reference[1])
        assert line["critic/lr"] == line["lr"]
    for rank in ("0", "1", "critics-0", "critics-1", "references-0"):
        assert (run.folder / "logs" / f"trainer-{rank}.jsonl").exists()
    files = {path.name for path in (run.folder / "checkpoints" / "step-000003").iterdir()}
    assert files == {"kernel.json", "manifest.json", "mock.json", "models"}


@pytest.mark.slow
def test_a_run_of_many_groups_outlives_a_trainer_and_is_resumed(start: Start, several: list[str]) -> None:
    grace = f"bus.grace_s={patience(30)}"  # the next kernel adopts them
    run = start(*several, "steps=16", "checkpoint.every=2", grace)
    run.until_step(3)
    os.kill(run.worker("trainer-critics-1").pid, signal.SIGKILL)
    run.until_step(5)
    run.kill()
    again = start(resume=run)
    recoveries = again.assert_completed(16)["recoveries"]
    assert [recovery["lost"] for recovery in recoveries] == ["trainer-critics-1", "kernel"]


@pytest.mark.slow
def test_supervised_runs_start_trainers_only(start: Start) -> None:
    supervised = ["algorithm=sft", "algorithm.completion_column=answer", "training.calls_loss=true"]
    run = start(*supervised, "training.processes=2", "steps=40", "checkpoint.every=5")
    run.until_step(7)
    # Behind the arguments of a forked process are empty ones.
    files = {
        Path(arguments[-1]) for process in run.look() if (arguments := [*filter(None, arguments_of(process))])
    }
    roles = {file.stem for file in files if file.parent == run.folder / "bus" and file.suffix == ".json"}
    assert roles == {"trainer-0", "trainer-1"}
    run.kill()
    run.assert_nothing_is_left()
    again = start(resume=run)
    summary = again.assert_completed(40, bound=0)
    assert summary["tokens"] == {"generated": 0, "trained": sum(line["tokens"] for line in again.metrics())}
    assert summary["tokens"]["trained"] >= 40 * 4
    assert "reward" not in again.metrics()[0]


@in_simulation
def test_a_supervised_run_may_sample_for_its_evaluation(start: Start, tmp_path: Path) -> None:
    evaluated = f"evaluation.dataset={{use: jsonl, path: {tmp_path}/rows.jsonl}}"
    run = start("algorithm=sft", "algorithm.completion_column=answer", evaluated, "evaluation.rows=10")
    summary = run.assert_completed(8, bound=0)
    assert [point["version"] for point in summary["evaluation"]] == [0, 8]
    # No step waits until the weights of the one before are hashed: its rows need no version.
    told = [type(event) for event in run.journal() if isinstance(event, VersionPublished | StepTrained)]
    assert told.index(StepTrained) < told.index(VersionPublished)


@in_simulation
def test_rows_that_cannot_be_trained_on_are_refused_or_end_the_run(
    start: Start, refusals: Callable[..., list[str]], tmp_path: Path
) -> None:
    supervised = ["algorithm=sft", "algorithm.completion_column=solution"]
    [refused] = refusals(*supervised)
    assert "the first row: column 'solution': is not there; the row's columns: answer, n, prompt" in refused
    rows = [{"prompt": "1+1=", "solution": "2"}, {"prompt": "1+2="}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = start(*supervised, out="later")
    assert run.end() == 1
    reason = run.summary()["reason"]
    assert "row 1 of the dataset: column 'solution'" in reason
    assert "correct the row, then: stretto resume RUN --accept-dataset" in reason
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "solution": "3"}) + "\n" for row in rows))
    start("--accept-dataset", resume=run).assert_completed(8, bound=0)
