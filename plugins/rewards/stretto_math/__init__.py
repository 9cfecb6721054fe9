"""Reward `math`: 1 where the answer is mathematically equal to the row's own, by math-verify."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stretto import Component, Context, RewardConfig, hookimpl

__all__ = ["MathConfig"]


class MathConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `math`."""

    column: str = "answer"
    """Column with the expected value: a number, an expression or LaTeX."""


def make(config: MathConfig, context: Context) -> Callable[..., float]:
    """The scoring function."""
    del context
    import logging

    from math_verify import parse, verify

    # It warns at every call that it runs without its own time limits.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def math(prompt: Any, completion: str, **columns: Any) -> float:
        expected = str(columns[config.column])
        # 0: without math-verify's own time limits, since the scoring process has one.
        gold = parse(expected, parsing_timeout=0)
        if not gold:
            raise ValueError(
                f"the expected answer {expected!r} (column {config.column!r}) is not mathematics"
            )
        found = parse(completion, parsing_timeout=0)
        return float(verify(gold, found, timeout_seconds=0))

    return math


@hookimpl
def stretto_reward() -> Iterator[Component[MathConfig]]:
    """The component of this package."""
    yield Component(
        "math",
        make,
        MathConfig,
        "1 if the answer equals the row's expected value as mathematics (math-verify)",
        requires={"math_verify": "stretto[math]"},
    )
