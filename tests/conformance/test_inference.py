"""The engine `mock` keeps the promises of inference engines that need no model."""

from __future__ import annotations

import re
from pathlib import Path

from stretto.testing import EngineUnderTest, InferenceConformance


class TestMock(InferenceConformance):
    use = "mock"
    options = {"tokens_per_s": 30_000, "mean_tokens": 100}


def test_an_engine_made_of_another_can_be_tested(tmp_path: Path) -> None:
    """The engine of the page about plugins, as composition makes it."""
    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
    code = re.search(r"(# counted\.py\n.*?)```", page, re.DOTALL)
    assert code is not None
    (tmp_path / "counted.py").write_text(code[1])
    options = {"parts": {"inner": {"use": "mock", "slots": 3}}}
    under_test = EngineUnderTest("counted", options, (str(tmp_path / "counted.py"),))
    engine = under_test.make(tmp_path / "model", tmp_path / "run")
    assert vars(engine)["_inner"].__class__.__name__ == "MockInference"
