"""The reward `my_name`: 1 for the expected answer, and less for some of its words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stretto import Component, Context, RewardConfig, hookimpl
from stretto.component import NonNegativeFloat


class MyNameConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `my_name`."""

    partial: NonNegativeFloat = 0.5
    """Reward of a wrong answer in which all expected words are at their places. With fewer of them, the
    reward is smaller."""


def make(config: MyNameConfig, context: Context) -> Callable[..., dict[str, float]]:
    """Return the function that scores one answer. `answer` is a column of the row."""
    del context

    def score(prompt: Any, completion: str, answer: str) -> dict[str, float]:
        expected, given = answer.split(), completion.split()
        if given == expected:
            return {"reward": 1.0, "accuracy": 1.0}
        right = sum(a == b for a, b in zip(expected, given, strict=False))
        return {"reward": config.partial * right / max(1, len(expected)), "accuracy": 0.0}

    return score


@hookimpl
def stretto_reward() -> Iterator[Component[MyNameConfig]]:
    """The component of this package."""
    yield Component("my_name", make, MyNameConfig, "words of the expected answer at their places")
