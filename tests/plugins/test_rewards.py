"""The rewards `exact` and `function`, and the forms that a reward may have."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from stretto import Context
from stretto.errors import RewardError
from stretto.user_code.scoring import score_group
from stretto_text_rewards import ExactConfig, make_exact

CONTEXT = Context(run="r", name="n", seed=1)


def test_exact_compares_texts() -> None:
    exact = make_exact(ExactConfig(use="exact"), CONTEXT)
    assert exact("", " 8 17\n", answer="8 17") == {"reward": 1, "accuracy": 1}
    assert exact("", "8 18", answer="8 17") == {"reward": 0, "accuracy": 0}
    assert make_exact(ExactConfig(use="exact", column="n"), CONTEXT)("", "7", n=7)["reward"] == 1
    assert [exact("", text, answer=5.0)["reward"] for text in ("5", "5.0", "5.00")] == [1, 1, 0]
    with pytest.raises(ValueError, match="no column 'answer'; its columns: gold"):
        exact("", "x", gold="x")
    for value in (None, ["8 17"], {"text": "8 17"}):
        with pytest.raises(ValueError, match=r"the column 'answer' is .*; expected a text or a number"):
            exact("", "8 17", answer=value)


def plain(prompt: str, completion: str, answer: str, **columns: Any) -> float:
    assert prompt == "p"
    assert columns == {"extra": 3}
    return float(completion == answer)


def narrow(completion: str, answer: str) -> dict[str, float]:
    return {"reward": len(completion), "accuracy": float(completion == answer)}


def positional(_: str, text: str) -> int:
    return len(text)


async def awaited(prompt: str, completion: str) -> float:
    return 2.0


def trl(completions: list[str], prompts: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    assert prompts == ["p"] * 2
    assert kwargs == {"extra": [3, 3]}
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


ROW = {"prompt": "p", "answer": "ab", "extra": 3}


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (plain, [(1.0, {}), (0.0, {})]),
        (narrow, [(2.0, {"accuracy": 1.0}), (1.0, {"accuracy": 0.0})]),
        (positional, [(2.0, {}), (1.0, {})]),
        (awaited, [(2.0, {}), (2.0, {})]),
        (trl, [(1.0, {}), (0.0, {})]),
    ],
)
def test_rewards_are_called_in_their_own_form(reward: Callable[..., Any], expected: Any) -> None:
    assert score_group(reward, ROW, ("ab", "c"), {}) == expected


def test_a_rows_columns_do_not_stand_for_what_was_sampled() -> None:
    """A dataset made for supervised training has the right answer in the column `completion`."""
    assert score_group(plain, {**ROW, "completion": "ab"}, ("ab", "c"), {}) == [(1.0, {}), (0.0, {})]
    assert score_group(trl, {**ROW, "completions": "ab"}, ("ab", "c"), {}) == [(1.0, {}), (0.0, {})]


def test_trl_rewards_of_chat_rows_get_messages() -> None:
    def chat(completions: list[Any], **kwargs: Any) -> list[float]:
        assert completions == [[{"role": "assistant", "content": "hi"}]]
        return [1.0]

    score_group(chat, {"prompt": [{"role": "user", "content": "?"}]}, ("hi",), {})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, r"completion 0 is None \(.*test_rewards.py:\d+\)"),
        (math.nan, "is nan, not a number"),
        (10**400, "is 1000.*, beyond the range of float32"),
        ("1", "is '1', a str; expected a number"),
        ({"score": 1.0}, "without 'reward'"),
        ({"reward": None}, "is None"),
        (-1e308, "is -1e\\+308, beyond the range of float32"),
        ({"reward": 1.0, 7: 2.0}, "a dict with the key 7; a metric's name is text"),
        ({"reward": 1.0, "length": math.inf}, "the metric 'length' of completion 0 .* is inf"),
    ],
)
def test_what_is_no_number_is_a_failure(value: Any, words: str) -> None:
    def reward(prompt: str, completion: str) -> Any:
        return value

    with pytest.raises(RewardError, match=words):
        score_group(reward, ROW, ("ab",), {})
