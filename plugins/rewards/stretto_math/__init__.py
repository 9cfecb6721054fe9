"""Reward `math`: 1 where the result that an answer states last is the row's own, else 0.

Values are compared exactly where they can be, by math-verify and SymPy where they cannot; letters of a
multiple choice and words are compared as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from stretto import Component, Context, RewardConfig, hookimpl
from stretto.component import PositiveFloat, PositiveInt

__all__ = ["MathConfig"]


class MathConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `math`."""

    answer_cpu_s: PositiveFloat | None = 1.0
    """As of every reward. Some answers, such as a tower of powers, would never be done."""
    answer_memory_mb: PositiveInt | None = 64
    """As of every reward."""
    column: str = "answer"
    """Column with the expected answer: a number, LaTeX, a letter of a choice, or words; bare, in `$…$`, in
    `\\boxed{}`, after `####`, or at the end of a whole solution in one of the last two forms."""


_USUAL = (
    r"\frac{\sqrt{2}}{2}", r"2^{3^2} \cdot 10^{-3}", r"x^2 + 2x + 1", r"\sin 30^\circ", r"e^{i\pi}",
    r"\log_2 8", r"3\times 10^8", r"\binom{5}{2} + 4!", r"a_{n+1}", r"\sqrt[3]{x+1}", r"|x - 1| > 2y",
)  # fmt: skip


def make(config: MathConfig, context: Context) -> Callable[..., float]:
    """The scoring function."""
    del context
    import logging

    from stretto_math.statements import is_right, read_gold
    from stretto_math.values import equal, read

    # It warns at every call that it runs without its own time limits; the scoring process has them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for (
        usual
    ) in _USUAL:  # the parser learns its tables here, once, rather than in the limited time of each answer
        equal(read(usual), read("1 + " + usual))
    gold_of = lru_cache(16)(read_gold)

    def math(prompt: Any, completion: str, **columns: Any) -> float:
        expected = str(columns[config.column])
        try:
            gold = gold_of(expected)
        except ValueError as error:
            row = f" of row {columns['id']!r}" if "id" in columns else ""
            raise ValueError(f"{_fault(config, expected, error)}{row}") from error
        return float(is_right(gold, completion))

    return math


def check_row(config: MathConfig, row: Mapping[str, Any]) -> str:
    """Why the expected answer of a row cannot be read; empty if it can."""
    from stretto_math.statements import read_gold

    if config.column not in row:
        return f"no column {config.column!r}; its columns: {', '.join(row)}"
    try:
        read_gold(str(row[config.column]))
    except ValueError as error:
        return _fault(config, str(row[config.column]), error)
    return ""


def _fault(config: MathConfig, expected: str, error: ValueError) -> str:
    shown = expected if len(expected) <= 100 else f"…{expected[-100:]}"
    return f"cannot read the expected answer {shown!r} (column {config.column!r}): {error}"


@hookimpl
def stretto_reward() -> Iterator[Component[MathConfig]]:
    """The component of this package."""
    yield Component(
        "math",
        make,
        MathConfig,
        "1 if the answer's last result equals the row's, as mathematics or as text (math-verify)",
        check_row=check_row,
        requires={"math_verify": "stretto[math]"},
    )
