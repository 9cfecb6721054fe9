"""A real run that has ended: its kept samples and its report say the same as its log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from stretto.bus.client import connect
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import TrajectoryBundle, WireTrajectory
from stretto.bus.server import Bootstrap, NatsServer, lock_run
from stretto.config import BusConfig
from stretto.records.kept.samples import SampleStore

pytestmark = pytest.mark.slow

STEPS = 12
REWARD = """
def score(prompt, completion, answer):
    return {"reward": (len(completion) % 5) / 4, "even": float(len(completion) % 2 == 0)}
"""


@dataclass
class Ended:
    """A run that has ended, and what its files hold."""

    folder: Path
    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    log: dict[str, WireTrajectory]
    """Id -> trajectory for training, as a rollout worker wrote it to the run's log."""
    rows: dict[str, dict[str, Any]]
    """Id -> kept sample."""

    def those(self, **values: Any) -> list[dict[str, Any]]:
        return [row for row in self.rows.values() if all(row[name] == each for name, each in values.items())]


@pytest.fixture(scope="module")
def run(module_start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"{n}+2=", "answer": str(n + 2)} for n in range(10)]
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    started = module_start(
        f"steps={STEPS}",
        f"reward={{use: function, function: '{folder}/rewards.py:score'}}",
        f"evaluation.dataset={{use: jsonl, path: {folder}/heldout.jsonl}}",
        "evaluation.every=4",
        "samples.keep=all",
        "checkpoint.every=4",  # the newest two stay, and of the log what a resume from version 8 needs
    )
    summary = started.assert_completed(STEPS)
    return Ended(
        started.folder,
        summary,
        started.metrics(),
        started.evaluations(),
        anyio.run(_trajectories, started.folder),
        {row["id"]: row for row in SampleStore(started.folder).find(limit=None, tokens=True)},
    )


async def _trajectories(folder: Path) -> dict[str, WireTrajectory]:
    """What the log of a run that has ended still holds, read by a server on the run's store."""
    found: dict[str, WireTrajectory] = {}
    run = Bootstrap.read(folder / "bus" / "kernel.json").run
    names, lock = Subjects(run), lock_run(folder / "bus")
    server = await NatsServer.start(folder / "bus", run, BusConfig(), folder / "logs")
    async with connect(Bootstrap.read(folder / "bus" / "kernel.json")) as bus:
        last = await bus.store.last_sequence(names.log_stream, names.trajectories)
        kind = TrajectoryBundle
        async for sequence, bundle in bus.store.follow(names.log_stream, names.trajectories, kind, start=1):
            found |= {each.id: each for each in bundle.trajectories}
            if sequence >= last:
                break
    await server.stop()
    lock.close()
    return found


def test_kept_samples_are_those_of_the_log(run: Ended) -> None:
    trained = {id: row for id, row in run.rows.items() if row["outcome"] == "trained"}
    assert Counter(row["step"] for row in trained.values()) == dict.fromkeys(range(1, STEPS + 1), 16)
    in_log = [id for id in trained if id in run.log]
    assert len(in_log) >= 16 * (STEPS - 8), "the log has at least the newest batches"
    for id in in_log:
        row, sent = trained[id], run.log[id]
        assert row["tokens"] == sent.tokens.numpy().tolist()
        assert row["loss_mask"] == sent.loss_mask.numpy().tolist()
        assert row["logprobs"] == sent.logprobs.numpy().tolist()
        assert row["versions"] == sent.versions.numpy().tolist()
        assert (row["reward"], row["metrics"]) == (sent.reward, sent.metrics)
        assert (row["finish"], row["engine"], row["sample"]) == (sent.finish, sent.engine, sent.sample)


def test_kept_samples_give_the_figures_of_metrics_jsonl(run: Ended) -> None:
    for line in run.steps:
        batch = [
            row for row in run.rows.values() if (row["outcome"], row["step"]) == ("trained", line["step"])
        ]
        assert _mean(batch, "reward") == pytest.approx(line["reward"], abs=1e-6)
        assert _mean(batch, "sampled") == pytest.approx(line["length"], abs=1e-6)
        assert max(row["staleness"] for row in batch) == line["staleness_max"]
        even = [row["metrics"]["even"] for row in batch]
        assert sum(even) / len(even) == pytest.approx(line["reward/even"], abs=1e-6)
    for line in run.evaluations:
        answers = [
            row for row in run.rows.values() if (row["purpose"], row["step"]) == ("eval", line["step"])
        ]
        assert len(answers) == line["evaluation/samples"]
        assert _mean(answers, "reward") == pytest.approx(line["evaluation/reward"], abs=1e-6)


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)
