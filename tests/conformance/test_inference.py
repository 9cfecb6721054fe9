"""The engine `mock` keeps the promises of inference engines that need no model."""

import re
from pathlib import Path

from stretto.testing import ComponentUnderTest, InferenceConformance


class TestMock(InferenceConformance):
    use = "mock"
    options = {"tokens_per_s": 2000, "slots": 8, "lengths": [2000]}


def test_an_engine_made_of_another_can_be_tested(tmp_path: Path) -> None:
    """The engine of the page about plugins, as composition makes it."""
    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
    code = re.search(r"(# counted\.py\n.*?)```", page, re.DOTALL)
    assert code is not None
    (tmp_path / "counted.py").write_text(code[1])
    section = {"use": "counted", "parts": {"inner": {"use": "mock", "slots": 3}}}
    plugins = (str(tmp_path / "counted.py"),)
    engine = ComponentUnderTest("inference", section, {}, plugins, tmp_path / "run").make()
    assert vars(engine)["_inner"].__class__.__name__ == "MockInference"
