"""Real SGLang and vLLM servers keep every promise of the conformance suite, and train the quickstart.

`make test-integration` installs the servers.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import output_of
from patience import patience
from stretto.records.samples.answers import read_answers
from stretto.records.samples.store import SampleStore
from stretto.serving.config import ServerEngineConfig
from stretto.serving.environment import environment_of
from stretto.testing import InferenceConformance
from stretto_sglang import SglangConfig
from stretto_vllm import VllmConfig

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.integration


def _installed(config: type[ServerEngineConfig]) -> pytest.MarkDecorator:
    assert config.requirements is not None
    environment = environment_of(config.requirements, cpu=True)
    return pytest.mark.skipif(not environment.is_ready(), reason=f"{environment.folder} is not installed")


with_sglang, with_vllm = _installed(SglangConfig), _installed(VllmConfig)


@with_sglang
class TestSglang(InferenceConformance):
    use, options, start_s = "sglang", {"slots": 8}, patience(240)
    refuses = frozenset({"top_k+top_p"})


@with_vllm
class TestVllm(InferenceConformance):
    use, options, start_s = "vllm", {"slots": 8}, patience(240)
    seeds = True


both_servers = pytest.mark.parametrize(
    "use", [pytest.param("sglang", marks=with_sglang), pytest.param("vllm", marks=with_vllm)]
)


@both_servers
def test_the_quickstart_trains_with_only_the_engines_name_changed(tmp_path: Path, use: str) -> None:
    steps = 40
    out = tmp_path / "run"
    changed = [f"inference.use={use}", f"steps={steps}", f"out={out}"]
    output_of("run", "examples/quickstart/run.yaml", *changed, cwd=ROOT)

    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = (line["accuracy"] for line in summary["evaluation"])
    assert last > first + 0.2
    assert (summary["version"], summary["ledger"]["failed"], summary["restarts"]) == (steps, 0, 0)
    assert summary["swaps"]["count"] >= 0.8 * steps  # an engine may skip a version
    assert 0 < summary["swaps"]["pause_mean_s"] <= summary["swaps"]["pause_max_s"]
    assert max(line.get("mismatch_max", 0.0) for line in metrics) < 1e-3


@both_servers
def test_the_vision_example_trains_with_only_the_engines_name_changed(tmp_path: Path, use: str) -> None:
    """A server that made other ids of a prompt with an image would fail its ticket."""
    rows, out = tmp_path / "rows", tmp_path / "run"
    made = [sys.executable, "examples/vision/make_model.py", "--out", str(rows), "--demonstrations", "10"]
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    changed = [f"inference.use={use}", "steps=20", f"out={out}"]
    changed += [f"dataset.path={rows}/train.jsonl", f"evaluation.dataset.path={rows}/heldout.jsonl"]
    output_of("run", "examples/vision/run.yaml", *changed, cwd=ROOT)
    output_of("audit", str(out), cwd=ROOT)

    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    first, *_, last = (line["accuracy"] for line in summary["evaluation"])
    assert first <= 0.5
    assert last >= 0.8
    assert (summary["version"], summary["ledger"]["failed"], summary["restarts"]) == (20, 0, 0)
    assert summary["canary"]["max"] < 1e-3
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("mismatch_max", 0.0) for line in metrics) < 1e-3


@both_servers
def test_evaluations_beside_training_are_of_the_version_they_name(tmp_path: Path, use: str) -> None:
    server, run = [f"inference.use={use}"], tmp_path / "run"
    trained = [*server, "steps=12", "evaluation.every=4", "evaluation.rows=200", "checkpoint.every=4"]
    trained += ["checkpoint.keep=9", "evaluation.keep_answers=true", "queue.max_staleness=2", f"out={run}"]
    output_of("run", "examples/quickstart/run.yaml", *trained, cwd=ROOT)
    for version in (4, 8):
        again = tmp_path / str(version)
        output_of("evaluate", str(run), "--version", str(version), "--out", str(again), cwd=ROOT)
        reported, repeated = _completions(run, version), _completions(again, 0)
        assert len(reported) == 200
        assert reported.keys() == repeated.keys()
        # The order of floating-point sums depends on what else a server computes.
        assert sum(reported[row] != repeated[row] for row in reported) <= 2


def _completions(folder: Path, version: int) -> dict[int, str]:
    answers = read_answers(SampleStore(folder), version, texts=True)
    return {answer.row: answer.completion or "" for answer in answers}
