"""examples/loop.py is the algorithm of a run: it reaches the run's own weights, without any part of a run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands import output_of
from patience import patience
from stretto.records.run_folder import RunFolder

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, BATCH = 10, 8
RUN_PARTS = r"\| +stretto\.(?:assembly|bus|cli|kernel|observe|records|runs\.life|workers)\b"
"""A line of `python -X importtime` about a module that the loop must not need."""


@pytest.mark.slow
def test_the_loop_and_a_synchronous_run_reach_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    output_of(
        *("run", EXAMPLES / "quickstart" / "run.yaml", f"out={tmp_path / 'run'}", f"steps={STEPS}"),
        *("queue.max_staleness=0", f"queue.batch_size={BATCH}", "evaluation=null"),
        *("inference.deterministic=true", "inference.slots=64"),
    )
    loop = [EXAMPLES / "loop.py", "--steps", STEPS, "--batch-size", BATCH]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *map(str, loop), "--out", str(tmp_path / "loop")],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=patience(200),
    )
    assert done.returncode == 0, done.stderr
    of_run = RunFolder(tmp_path / "run").series("reward")
    of_loop = re.findall(r"^step (\d+): reward (\d\.\d+), ", done.stdout, re.MULTILINE)
    assert of_loop == [(str(step), f"{reward:.4f}") for step, reward in of_run]

    weights = f"checkpoints/step-{STEPS:06d}/model/model.safetensors"
    initial = load_file(EXAMPLES / "quickstart" / "model" / "model.safetensors")
    expected, found = (
        load_file(tmp_path / "run" / weights),
        load_file(tmp_path / "loop/model/model.safetensors"),
    )
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert not any(torch.equal(found[name], initial[name]) for name in found)  # it has trained

    assert "stretto_torch.inference" in done.stderr
    assert re.findall(RUN_PARTS, done.stderr) == []
