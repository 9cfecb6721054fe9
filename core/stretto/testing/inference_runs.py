"""The contract of inference engines as tests of whole runs of several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from stretto.component import Component, Context
from stretto.hooks import hookimpl
from stretto.testing.served_engine import EngineUnderTest
from stretto.testing.tiny_model import Reference, make_tiny_model
from stretto.workflow import Answer, Prompt, Score, Session, Trajectory, WorkflowConfig

__all__ = ["RunConformance"]

_GROUP, _BATCH, _LENGTH, _STALENESS = 2, 4, 200, 2


@dataclass(frozen=True)
class _Kill:
    """A moment in which processes of inference-0 were killed."""

    under_way: set[str]
    """Ids of the prompts that had no answers yet."""
    version: int
    """Number of train steps so far."""
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class _Attacked:
    """A run that has ended, after processes of inference-0 were killed in mid-answer."""

    run: _Run
    model: Path
    kills: dict[str, _Kill]
    """By victim."""
    summary: dict[str, Any]
    left: list[int]
    """Ids of processes that outlive the run."""


class RunConformance:
    """Tests of two replicas of an engine in a training run. The run kills the worker of one replica and, once
    that answers again, its server, if the engine has servers."""

    engine: ClassVar[EngineUnderTest]

    @pytest.fixture(scope="class")
    @classmethod
    def attacked(cls, tmp_path_factory: pytest.TempPathFactory) -> _Attacked:
        """The run after its end."""
        folder = tmp_path_factory.mktemp("attacked")
        model = make_tiny_model(folder / "model", layers=4)
        kills: dict[str, _Kill] = {}
        with _Run.started(cls.engine, model, folder) as run:
            run.until(lambda: run.version() >= _STALENESS + 2)
            for victim in ("worker", "server") if cls.engine.servers else ("worker",):
                run.until(lambda: len(run.under_way()) >= _BATCH)
                kills[victim] = kill = _Kill(run.under_way(), run.version(), time.time())
                worker = run.process("inference-0")
                for process in [worker] if victim == "worker" else _descendants(worker):
                    os.kill(process, signal.SIGKILL)
                run.until(lambda kill=kill: len(run.answered_by("inference-0", since=kill.time)) >= _BATCH)
                run.until(lambda kill=kill: kill.under_way <= run.answered())
            processes = _descendants(run.process_id)
            summary = run.interrupt()
            left = [pid for pid in processes if Path(f"/proc/{pid}").exists()]
        return _Attacked(run, model, kills, summary, left)

    @pytest.mark.parametrize("victim", ["worker", "server"])
    def test_a_replica_killed_in_mid_answer_loses_and_doubles_no_token(
        self, attacked: _Attacked, victim: str
    ) -> None:
        """Another replica continues its answers, and it serves no request before it has the current
        weights."""
        if victim == "server" and not self.engine.servers:
            pytest.skip(f"{self.engine.use} runs the model in its worker")
        run, kill = attacked.run, attacked.kills[victim]
        assert not attacked.left, f"processes outlive the run: {attacked.left}"
        ledger = attacked.summary["ledger"]
        assert ledger["failed"] == ledger["expired"] == ledger["filtered"] == 0
        assert ledger["trained"] == _BATCH * attacked.summary["version"]
        answered = [record["id"] for record in run.records() if "answers" in record]
        assert len(answered) == len(set(answered)) >= ledger["trained"]
        for record in run.answered_by("inference-0", since=kill.time):
            oldest = min(min(answer["versions"]) for answer in record["answers"])
            assert oldest >= kill.version - _STALENESS

    def test_every_token_of_a_run_with_kills_has_the_logprob_of_its_version(
        self, attacked: _Attacked
    ) -> None:
        """It is the one that the trainer's checkpoint of the version computes."""
        attacked.run.assert_own_logprobs(attacked.model, self.engine.tolerance)


class _Run:
    """A run with two replicas, whose workflow records every answer."""

    def __init__(self, engine: EngineUnderTest, model: Path, folder: Path) -> None:
        self._start_s = engine.start_s
        self._folder = folder / "run"
        self._output = folder / "output.txt"
        rows = [{"prompt": f"{n}+{n % 7}=", "answer": "?"} for n in range(100)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = {
            "name": "conformance",
            "plugins": [__file__, *engine.plugins],
            "model": str(model),
            "algorithm": {"use": "grpo", "group_size": _GROUP},
            "training": {"use": "torch", "lr": 2e-3},
            "inference": {"use": engine.use, **engine.options, "replicas": 2, "on_swap": "recompute"},
            "sampling": {"max_tokens": _LENGTH, "ignore_eos": True},
            "workflow": "recorder",
            "reward": "exact",
            "dataset": {"use": "jsonl", "path": str(folder / "rows.jsonl")},
            "queue": {"batch_size": _BATCH, "max_staleness": _STALENESS},
            "checkpoint": {"every": 1, "keep": 100_000},
            "steps": 100_000,
        }
        (folder / "run.yaml").write_text(json.dumps(run))  # JSON is YAML
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stretto", "run", folder / "run.yaml", f"out={self._folder}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @classmethod
    @contextmanager
    def started(cls, engine: EngineUnderTest, model: Path, folder: Path) -> Generator[_Run]:
        """Start a run, and kill it at the end of the block if it still runs."""
        run = cls(engine, model, folder)
        try:
            yield run
        finally:
            if run._process.poll() is None:
                for pid in [*_descendants(run.process_id), run.process_id]:
                    os.kill(pid, signal.SIGKILL)
            run._process.wait()

    @property
    def process_id(self) -> int:
        """Process id of the kernel."""
        return self._process.pid

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition, at most twice the maximum duration of a start."""
        deadline = time.monotonic() + 2 * self._start_s
        while not condition():
            assert self._process.poll() is None, f"the run ended early:\n{self._last_output()}"
            assert time.monotonic() < deadline, f"waited too long:\n{self._last_output()}"
            time.sleep(0.05)

    def interrupt(self) -> dict[str, Any]:
        """End the run as Ctrl-C does, check that its ledger adds up, and return its summary."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(2 * self._start_s)
        summary = json.loads((self._folder / "summary.json").read_text())
        assert summary["status"] == "interrupted", self._last_output()
        ledger = summary["ledger"]
        assert ledger["issued"] == sum(number for name, number in ledger.items() if name != "issued")
        return summary

    def _last_output(self) -> str:
        """Return the end of its output."""
        return self._output.read_text()[-4000:]

    def version(self) -> int:
        """Return the number of train steps so far."""
        return len([line for line in _json_lines(self._folder / "metrics.jsonl") if "ledger" in line])

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the workflow: `id` and `asked` of every prompt, and a second one with
        `answers`."""
        return _json_lines(self._folder / "answers.jsonl")

    def answered(self) -> set[str]:
        """Return the ids of prompts that have answers."""
        return {each["id"] for each in self.records() if "answers" in each}

    def under_way(self) -> set[str]:
        """Return the ids of prompts that have no answers yet."""
        return {each["id"] for each in self.records()} - self.answered()

    def answered_by(self, worker: str, since: float) -> list[dict[str, Any]]:
        """Return the records of prompts asked after `since` that have an answer which this worker
        finished."""
        return [
            record
            for record in self.records()
            if record["asked"] > since and any(a["engine"] == worker for a in record.get("answers", ()))
        ]

    def process(self, worker: str) -> int:
        """Return the process id of a running worker."""
        joined = [line for line in _json_lines(self._folder / "logs" / "kernel.jsonl") if "place" in line]
        return int([line["place"] for line in joined if line["worker"] == worker][-1].split()[-1])

    def assert_own_logprobs(self, model: Path, tolerance: float) -> None:
        """Assert the logprob of every token of every answer against the trainer's checkpoints, and the length
        of every answer."""
        answers = [(r, answer) for r in self.records() for answer in r.get("answers", ())]
        assert {len(answer["tokens"]) for _, answer in answers} == {_LENGTH}
        by_version: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        for record, answer in answers:
            for version in set(answer["versions"]):
                by_version.setdefault(version, []).append((record, answer))
        assert len(by_version) > _STALENESS
        for version, having in sorted(by_version.items()):
            checkpoint = self._folder / "checkpoints" / f"step-{version:06d}" / "model"
            reference = Reference(checkpoint if version else model)
            texts = [(record["prompt"], answer["tokens"]) for record, answer in having]
            for (record, answer), forward in zip(having, reference.many_logprobs(texts), strict=True):
                own = np.array(answer["versions"]) == version
                off = np.abs(forward - answer["logprobs"])[own].max()
                assert off <= tolerance, f"version {version}, prompt {record['id']}: off by {off:.2g}"


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON Lines file that another process is writing."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [*children, *(below for child in children for below in _descendants(child))]


class _Recorder:
    """Workflow `recorder`: like `single_turn`, but its rewards differ and it records every answer."""

    def __init__(self, config: WorkflowConfig, context: Context) -> None:
        del config
        self._path = context.path("answers.jsonl")
        self._ids = count()

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Make one answer for each sample, with the mean of its token ids as the reward."""
        record: dict[str, Any] = {
            "id": f"{os.getpid()}-{next(self._ids)}",
            "asked": time.time(),
            "prompt": prompt.ids.tolist(),
        }
        self._write(record)
        answers = await session.generate(prompt.ids, n=session.group_size)
        self._write({**record, "answers": [_plain(answer) for answer in answers]})
        return [Trajectory.of(prompt.ids, answer, Score(float(answer.tokens.mean()))) for answer in answers]

    def _write(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _plain(answer: Answer) -> dict[str, Any]:
    return {
        "tokens": answer.tokens.tolist(),
        "logprobs": answer.logprobs.tolist(),
        "versions": answer.versions.tolist(),
        "engine": answer.engine,
    }


@hookimpl
def stretto_workflow() -> Iterable[Component[WorkflowConfig]]:
    """The workflow of `RunConformance`, whose runs load this file as a plugin."""
    yield Component("recorder", _Recorder, WorkflowConfig, "answers like single_turn and writes them down")
