"""Reward `exact`: 1 if the answer is exactly the row's expected text, else 0; also the accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stretto import Component, Context, hookimpl
from stretto.reward import ResultRewardConfig, expected_texts, fault_of_expected

__all__ = ["ExactConfig"]


class ExactConfig(ResultRewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `exact`."""

    column: str = "answer"
    """Column with the expected text or number. White space around both texts is ignored. A number without
    decimals is right with and without them: 5.0 and 5."""


def make(config: ExactConfig, context: Context) -> Callable[..., dict[str, float]]:
    del context

    def exact(prompt: Any, completion: str, **columns: Any) -> dict[str, float]:
        expected, start = expected_texts(columns, config.column), config.start_of_result(completion, columns)
        right = float(start is not None and completion[start:].strip() in expected)
        return {"reward": right, "accuracy": right}

    return exact


@hookimpl
def stretto_reward() -> Iterator[Component[ExactConfig]]:
    yield Component(
        "exact",
        make,
        ExactConfig,
        "1 if the answer equals the row's expected text",
        check_row=lambda config, row: fault_of_expected(row, config.column),
    )
