"""The built-in rewards keep the promises of rewards; tests/plugins has tests of what they compute."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stretto.testing import RewardConformance


def kit_of(use: str, right: str, wrong: str, **options: Any) -> type[RewardConformance]:
    return type(use, (RewardConformance,), {"use": use, "options": options, "right": right, "wrong": wrong})


TestExact = kit_of("exact", " 2\n", "3")
TestFormat = kit_of(
    "format", "<think>1</think><answer>2</answer>", "<answer>2</answer>", tags=["think", "answer"]
)
TestRegex = kit_of("regex", "1 + 1 = 2", "1 + 1 = 3", pattern=r"= (\d+)")
TestLength = kit_of("length", "2", "2" * 200, limit=100, buffer=20)
TestMath = kit_of("math", "\\boxed{\\frac{4}{2}}", "\\boxed{3}")
TestSum = kit_of(
    "sum",
    "2",
    "it is 2",
    parts={"value": "math", "form": {"use": "format", "pattern": r"\d+"}},
    weights={"form": 0.1},
)


class TestFunctionOfOneAnswer(RewardConformance):
    use = "function"
    code = "def score(prompt, completion, answer): return {'reward': float(completion == answer), 'n': 1}"
    right, wrong = "2", "3"

    @pytest.fixture(scope="class")
    @classmethod
    def section(cls, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
        file: Path = tmp_path_factory.mktemp("function") / "rewards.py"
        file.write_text(cls.code)
        return {"use": cls.use, "function": f"{file}:score"}


class TestFunctionOfAGroup(TestFunctionOfOneAnswer):
    code = "def score(completions, answer, **_): return [float(c == a) for c, a in zip(completions, answer)]"


@pytest.mark.slow
class TestReasoningGym(RewardConformance):
    use = "reasoning_gym"
    row = {
        "prompt": "How many legs do a dog and a bird have?",
        "question": "",
        "answer": "6",
        "task": "leg_counting",
        "options": {},
        "metadata": {"animals": {"dog": 1, "bird": 1}, "total_legs": 6},
    }
    right, wrong = "<answer>6</answer>", "6"
