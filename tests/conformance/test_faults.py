"""The kit finds what is wrong with components that break their contract, and says it in words."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

FILE = Path(__file__).with_name("broken.py")


@pytest.mark.slow
def test_the_kit_finds_each_fault_and_no_other(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    subprocess.run(
        # Broken components leave things open, for which pytest would blame a later test.
        [
            *(sys.executable, "-m", "pytest", FILE, "-q", f"--junitxml={report}"),
            *("-p", "no:cacheprovider", "-p", "no:unraisableexception"),
        ],
        check=False,
        stdout=subprocess.DEVNULL,
        cwd=FILE.parents[2],
    )
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        faults = [*case.iter("failure"), *case.iter("error")]
        tests = found.setdefault(case.attrib["classname"].rpartition(".")[2], {})
        tests |= {case.attrib["name"].removeprefix("test_"): fault.attrib["message"] for fault in faults}
    for test_class, expected in finds().items():
        assert found[test_class].keys() == expected.keys(), f"{test_class}: {found[test_class]}"
        for test, words in expected.items():
            assert words in found[test_class][test], f"{test_class}.{test}: {found[test_class][test]}"


FORGETFUL = """
import stretto_torch.slots
from stretto import Component, hookimpl
from stretto.testing import EngineUnderTest, InferenceConformance
from stretto_torch import TorchInferenceConfig
from stretto_torch.sampling import draw
from dataclasses import replace
import msgspec
import numpy as np


def draw_of_50(logits, uniform, settings):
    whole = logits.clone()
    if settings is not None:
        settings = replace(settings, top_k=np.where(settings.top_k == 0, 50, settings.top_k))
    tokens, logprobs, kept = draw(logits, uniform, settings)
    if settings is not None:
        whole /= settings.temperature[:, None]
    rows = np.arange(len(tokens))
    return tokens, whole.log_softmax(-1).numpy()[rows, tokens], kept


def engine(config, context):
    from stretto_torch.inference import TorchInferenceEngine

    stretto_torch.slots.draw = draw_of_50
    return TorchInferenceEngine(msgspec.structs.replace(config, on_swap="recompute"), context)


@hookimpl
def stretto_inference():
    yield Component("forgetful", engine, TorchInferenceConfig, "")


class TestForgetful(InferenceConformance):
    engine = EngineUnderTest("forgetful", {"slots": 8}, (__file__,), recomputes=True)


class TestUnsaid(InferenceConformance):
    engine = EngineUnderTest("forgetful", {"slots": 8}, (__file__,))
"""


@pytest.mark.slow
def test_an_engine_that_draws_from_fewer_tokens_or_computes_anew_is_told(tmp_path: Path) -> None:
    """`transformers.generate` draws from the 50 likeliest tokens unless it is told otherwise. At temperature
    0.7 the others have so little weight that 600 answers do not show it."""
    file = tmp_path / "test_forgetful.py"
    file.write_text(FORGETFUL)
    command = [*(sys.executable, "-m", "pytest", file, "-q", "-p", "no:cacheprovider")]
    command += ["-k", "keep_cache or (probability and temperature and not top and not bias)"]
    said = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=tmp_path).stdout
    failed = [line.partition("::")[2] for line in said.splitlines() if line.startswith("FAILED")]
    drawn = "test_tokens_are_drawn_with_the_probability_they_report[{'temperature': 2.0}]"
    kept = "test_keep_cache_goes_on_over_what_older_weights_computed"
    assert [name.partition(" - ")[0] for name in failed] == [
        *(f"TestForgetful::{drawn}", f"TestUnsaid::{kept}", f"TestUnsaid::{drawn}")
    ]
    assert "says `EngineUnderTest(…, recomputes=True)`" in said


def finds() -> dict[str, dict[str, str]]:
    """The tests that fail and words of their messages, for each class of the file."""
    spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: value.finds for name, value in vars(module).items() if name.startswith("Test")}
