"""Benchmarks of whole runs with small inputs: the whole chain, and every figure."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from processes import arguments_of, figures_of

pytestmark = pytest.mark.nightly


def positive(benchmark: str, *arguments: str, each: set[str]) -> dict[str, Any]:
    """The positive figures that a benchmark prints, each by what it was measured for."""
    figures = figures_of(benchmark, *arguments)
    for values in figures.values():
        assert set(values) == each
        assert all(figure > 0 for figure in values.values())
    return figures


def test_the_benchmark_of_images_measures_every_figure() -> None:
    figures = positive("images.py", "--steps=3", "--rounds=1", "--pixels=56", each={"png", "jpeg"})
    assert set(figures) == {"images_per_s", "bytes_per_group", "bytes_ratio", "speed_ratio_to_text"}
    # Once for a group of 8. Groups that the end of the run left without an answer may lack theirs.
    assert all(0.04 < ratio < 0.16 for ratio in figures["bytes_ratio"].values())


def test_the_benchmark_of_many_workers_measures_every_figure() -> None:
    figures = positive("scale.py", "10", "40", "--quick", each={"10", "40"})
    assert set(figures) == {"kernel_us_per_group", "beacon_bytes_per_worker_s"}
    few, more = figures["beacon_bytes_per_worker_s"].values()
    assert more < 2 * few


def gpu_report(folder: Path, *options: str) -> list[dict[str, Any]]:
    """The JSON lines of two parts and of the whole, without a GPU."""
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_report.py"
    command = [sys.executable, script, "--size=tiny", "--only", "decoding", "training", *options]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
    printed = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def test_the_gpu_report_has_a_line_for_each_part_and_one_for_all(tmp_path: Path) -> None:
    decoding, training, whole = gpu_report(tmp_path)
    assert [line.pop("part") for line in (decoding, training)] == ["decoding", "training"]
    assert [line.pop("device") for line in (decoding, training, whole)] == ["cpu"] * 3
    assert whole["parts"] == {"decoding": decoding, "training": training}
    assert all(row["tokens_per_s"] > 0 for row in decoding["rows"].values())
    assert training["rows"]["varlen"] == {"left_out": "needs CUDA"}
    calls = training["rows"]["calls"]
    # A group's prompt is computed once, and nothing needs the output at an answer's last token.
    expected = 8 * (64 + 16) / (64 + 8 * 15)
    assert calls["tokens_per_s"] / calls["computed_tokens_per_s"] == pytest.approx(expected, rel=1e-3)


def test_the_gpu_report_kills_a_part_at_its_deadline_and_goes_on(tmp_path: Path) -> None:
    fault = "killed at its deadline of 0.2 s"  # importing torch takes longer
    assert [(line["failed"], line["rows"]) for line in gpu_report(tmp_path, "--deadline=0.2")[:2]] == [
        (fault, {})
    ] * 2
    first, second, _ = gpu_report(tmp_path, "--seconds=0.2")
    assert (first["rows"], second["left_out"]) == ({}, "the 0.2 s are over")
    assert not [each for each in psutil.process_iter() if str(tmp_path) in " ".join(arguments_of(each))]
