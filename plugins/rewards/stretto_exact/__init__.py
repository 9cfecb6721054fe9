"""Reward `exact`: 1 if the answer is exactly the row's expected text, else 0; also the accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stretto import Component, Context, RewardConfig, hookimpl

__all__ = ["ExactConfig"]


class ExactConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `exact`."""

    column: str = "answer"
    """Column with the expected text or number. White space around both texts is ignored. A number without
    decimals is right with and without them: 5.0 and 5."""


def make(config: ExactConfig, context: Context) -> Callable[..., dict[str, float]]:
    del context

    def exact(prompt: Any, completion: str, **columns: Any) -> dict[str, float]:
        if fault := check_row(config, columns):
            raise ValueError(fault)
        right = float(completion.strip() in _expected(columns[config.column]))
        return {"reward": right, "accuracy": right}

    return exact


def check_row(config: ExactConfig, row: Mapping[str, Any]) -> str:
    """Return why a row cannot be scored; empty if it can be."""
    if config.column not in row:
        return f"no column {config.column!r}; its columns: {', '.join(row)}"
    value = row[config.column]
    if value is None or isinstance(value, list | dict | tuple):
        return f"the column {config.column!r} is {value!r:.60}; `exact` compares a text or a number"
    return ""


def _expected(value: Any) -> set[str]:
    is_whole = isinstance(value, float) and value.is_integer()
    return {str(value).strip(), *([str(int(value))] if is_whole else [])}


@hookimpl
def stretto_reward() -> Iterator[Component[ExactConfig]]:
    yield Component(
        "exact", make, ExactConfig, "1 if the answer equals the row's expected text", check_row=check_row
    )
