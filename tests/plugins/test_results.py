"""What rewards take for a result: text behind the reasoning, columns as texts, and numbers of any library."""

import json
import math
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import stretto_code
import stretto_math
from stretto import Context
from stretto.assembly.plugins import Plugins
from stretto.environment import feedback_of
from stretto.errors import RewardError
from stretto.models.tokenizer import ByteTokenizer
from stretto.reward import reasoning_end
from stretto.testing import FakeSession
from stretto.tools import text_of
from stretto.user_code.scoring import score_group
from stretto.workers.sampling.trajectory_log import wire_trajectories
from stretto.workflow import Answer, Prompt, Score, Trajectory, WorkflowConfig, texts_and_columns
from stretto_single_turn import SingleTurn
from stretto_text_rewards import ExactConfig, RegexConfig, make_exact, make_regex

CONTEXT = Context(run="r", name="n", seed=1)


def rewards(completion: str, row: dict[str, Any], pattern: str = r"(\d+)", **options: Any) -> list[float]:
    """Score by `exact`, `math` and `regex`, as a user of the Python API does."""
    made = (
        make_exact(ExactConfig(use="exact", **options), CONTEXT),
        stretto_math.make(stretto_math.MathConfig(use="math", **options), CONTEXT),
        make_regex(RegexConfig(use="regex", pattern=pattern, **options), CONTEXT),
    )
    return [reward(prompt="?", completion=completion, **row)["reward"] for reward in made]


@pytest.mark.parametrize(
    ("completion", "opened", "end"),
    [
        ("9", "", 0),
        ("<think>9", "", None),
        ("maybe 9, but let me", "<think>\n", None),
        ("8</think>9", "<think>\n", 9),
        ("<think>9</think> none", "", 16),
        ("8</think>9", "", 9),  # without what the prompt opened
        ("9", "<think>\n\n</think>\n\n", 0),
        ("<think>8</think>9<think>hm", "", None),  # reasoning begins again
        ("<think>I write <think>8</think>.</think>9", "", 40),
        ("8[/THINK]9", "[THINK]", 9),
        ("8</reasoning>9", "<reasoning>\n", 13),
        ("9", "</think>", 0),
        ("9", "<answer>", 0),  # not reasoning
        ("[THINK] maybe 9", "", None),
        ("\n<reasoning>9, but", "", None),
        ("<seed:think>8</seed:think>9", "", 26),
        ("◁think▷9", "", None),
    ],
)
def test_a_draft_is_no_result(completion: str, opened: str, end: int | None) -> None:
    assert reasoning_end(completion, opened) == end
    behind, row = "" if end is None else completion[end:], {"answer": "9", "prompt_opened": opened}
    right = float("9" in behind)
    assert rewards(completion, row) == rewards(completion, {**row, "reasoning_end": end}) == [right] * 3


def test_a_group_behind_the_reasoning_counts() -> None:
    covered = "<think>I write <a> then.</think><a>9</a>"  # by a match from the reasoning
    assert rewards(covered, {"answer": "9"}, pattern="<a>(.*?)</a>")[2] == 1
    assert rewards("<think>8</think> 9", {"answer": "9"}, pattern=r"</think>\s*(\d)")[2] == 1
    assert rewards("<think> It is 9, but", {"answer": "9"}, reasoning="counts") == [0, 1, 1]
    assert rewards("\n9", {"answer": "9", "prompt_opened": "<think></think>"}, pattern=r"^(\d)$")[2] == 1
    assert rewards("9", {"answer": "9", "prompt_opened": "<think></think>"}, pattern=r"^(.*)$")[2] == 1
    assert rewards("\n9</a>", {"answer": "9", "prompt_opened": "<a>\n"}, pattern="<a>(.*)</a>")[2] == 1


def test_a_program_in_the_reasoning_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(source: str, stdin: bytes, limits: Any) -> Any:
        return SimpleNamespace(ending="exit", status=0, output=source.encode())

    def runner(*arguments: Any) -> Any:
        return SimpleNamespace(run=run)

    monkeypatch.setattr(stretto_code, "_runner", runner)
    draft, final = "```python\ndraft\n```\n", "```python\nfinal\n```"
    row = {"prompt": "?", "tests": [{"stdin": "", "stdout": "final"}, {"stdin": "", "stdout": "draft"}]}
    for reasoning, expected in (("ignored", [0.5, 0.0]), ("counts", [0.5, 0.5])):
        options: dict[str, Any] = {"reasoning": reasoning, "credit": "share"}
        code = stretto_code.make(stretto_code.CodeConfig(use="code", **options), CONTEXT)
        found = score_group(code, row, (f"{draft}</think>{final}", draft), {"prompt_opened": ["<think>"] * 2})
        assert [reward for reward, _ in found] == expected


class Marked(ByteTokenizer):
    """Its `[THINK]` and `[/THINK]` are special tokens, which an answer's text does not have."""

    def special_in(self, text: str) -> str:
        return next((mark for mark in ("[THINK]", "[/THINK]") if mark in text), "")

    def decode(self, ids: Any, *, special: bool = False, after: Any = None) -> str:
        text = super().decode(ids)
        return text if special else text.replace("[THINK]", "").replace("[/THINK]", "")


async def test_the_end_of_the_reasoning_travels_beside_the_text() -> None:
    session = FakeSession(["so[/THINK]9", "so"], tokenizer=Marked())
    prompt = Prompt({}, session.tokenizer.encode_prompt("2+7? [THINK]\n"))
    await SingleTurn(WorkflowConfig(), CONTEXT).run(prompt, session)
    [(texts, columns)] = session.scored
    assert (texts, columns["reasoning_end"]) == (["so9", "so"], [2, None])
    assert columns["prompt_opened"] == ["[THINK]\n"] * 2
    _, columns = texts_and_columns(["so</think>9", "so"], {"prompt_opened": ["<think>", ""]})
    assert columns["reasoning_end"] == [10, 0]


@pytest.mark.parametrize("value", [None, {}, [], ["9"], [["9"]], float("nan"), b"9", datetime(2026, 9, 9)])
def test_a_column_without_an_expected_answer_is_refused_with_its_row(value: Any) -> None:
    row = {"id": "a7", "answer": value}
    fault = r"the column 'answer' of row 'a7' is .*; expected a text or a number"
    for use, options in (("exact", {}), ("math", {}), ("regex", {"pattern": "(.)"})):
        component = Plugins().get("reward", use)
        config: Any = component.config(use=use, **options)
        assert component.check_row is not None
        assert "of row 'a7' is" in component.check_row(config, row)
        with pytest.raises(ValueError, match=fault):
            component.make(config, CONTEXT)(prompt="?", completion="9", **row)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((5.0, "5"), (5, "5"), (5, "5.0"), (5.0, "5.0"), (Decimal("5.00"), "5"), (1e16, f"1{'0' * 16}")),
        *(
            (2.5, "2.5"),
            (True, "True"),
            (True, "true"),
            (False, "false"),
            (1e-05, "0.00001"),
            (1e-05, "1e-05"),
        ),
    ],
)
def test_a_number_is_compared_as_it_is_written(value: Any, text: str) -> None:
    assert rewards(text, {"answer": value}, pattern=r"(.*\S)") == [1, 1, 1]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *((np.float32(0.5), 0.5), (np.int64(1), 1), (np.bool_(True), 1), (np.array(0.5), 0.5), (True, 1)),
        *((torch.tensor(0.5, requires_grad=True), 0.5), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5)),
        *((Decimal("0.5"), 0.5), (Fraction(1, 2), 0.5)),
    ],
)
def test_a_number_is_one_in_all_places(value: Any, number: float) -> None:
    def reward(prompt: str, completion: str) -> Any:
        return {"reward": value, "m": value}

    assert score_group(reward, {"prompt": ""}, ("",), {}) == [(number, {"m": number})]
    feedback = feedback_of(reward("", ""), {})
    assert (feedback.reward, feedback.metrics) == (number, {"m": number})
    assert json.loads(text_of({"x": [value]}, 99)) == {"x": [number]}
    assert text_of({1: float("nan"), "café": (-math.inf,)}, 99) == '{"1":NaN,"café":[-Infinity]}'
    ids, zeros = np.zeros(2, np.int32), np.zeros(1, np.float32)
    answer, ticket = Answer(ids[:1], zeros, ids[:1], "stop", "", "e"), SimpleNamespace(name="t")
    trajectory = Trajectory.of(ids, answer, Score(value, {"m": value}))
    [wire] = wire_trajectories(ticket, [trajectory])  # pyright: ignore[reportArgumentType]
    assert (wire.reward, wire.metrics) == (number, {"m": number})
    assert {type(wire.reward), type(wire.metrics["m"])} <= {int, float, bool}


@pytest.mark.parametrize(
    "value", ["5", np.str_("5"), np.array("5"), b"5", 1j, np.complex64(1), np.zeros(2), [1]]
)
def test_what_is_no_number_is_refused_in_all_places(value: Any) -> None:
    def reward(prompt: str, completion: str) -> Any:
        return value

    with pytest.raises(RewardError, match=r"(?s)the reward of completion 0 .* is .*expected a number"):
        score_group(reward, {"prompt": ""}, ("",), {})
    with pytest.raises(ValueError, match=r"(?s)'m' in the environment's feedback is .*expected a number"):
        feedback_of({"m": value}, {})
