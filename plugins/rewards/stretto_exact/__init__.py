"""Reward `exact`: 1 if the answer is exactly the row's expected text, else 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stretto import Component, Context, RewardConfig, hookimpl

__all__ = ["ExactConfig"]


class ExactConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `exact`."""

    column: str = "answer"
    """Column with the expected text. White space around both texts is ignored."""


def make(config: ExactConfig, context: Context) -> Callable[..., float]:
    """Return the scoring function."""
    del context

    def exact(prompt: Any, completion: str, **columns: Any) -> float:
        if config.column not in columns:
            raise KeyError(f"the row has no column {config.column!r}; its columns: {', '.join(columns)}")
        return float(completion.strip() == str(columns[config.column]).strip())

    return exact


@hookimpl
def stretto_reward() -> Iterator[Component[ExactConfig]]:
    """The component of this package."""
    yield Component("exact", make, ExactConfig, "1 if the answer equals the row's expected text")
