"""Reward `math`, also the accuracy: 1 if the last result that an answer states equals the row's, else 0.

Values are compared exactly where possible, else by math-verify and SymPy; choices and words as text.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from stretto import Component, Context, hookimpl
from stretto.component import PositiveFloat, PositiveInt
from stretto.reward import ResultRewardConfig, expected_texts, fault_of_expected

__all__ = ["MathConfig"]


class MathConfig(ResultRewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `math`."""

    answer_cpu_s: PositiveFloat | None = 1.0
    """CPU seconds for scoring one answer. The value of some answers, such as a tower of powers, would take
    for ever."""
    answer_memory_mb: PositiveInt | None = 64
    """Memory for scoring one answer, in MiB."""
    column: str = "answer"
    """Column with the expected answer: a number, LaTeX, a letter of a choice, or words. It may stand alone,
    in `$…$`, in `\\boxed{}`, after `####`, or at the end of a whole solution in one of the last two forms."""


_COMMON_LATEX = (
    r"\frac{\sqrt{2}}{2}", r"2^{3^2} \cdot 10^{-3}", r"x^2 + 2x + 1", r"\sin 30^\circ", r"e^{i\pi}",
    r"\log_2 8", r"3\times 10^8", r"\binom{5}{2} + 4!", r"a_{n+1}", r"\sqrt[3]{x+1}", r"|x - 1| > 2y",
)  # fmt: skip


def make(config: MathConfig, context: Context) -> Callable[..., dict[str, float]]:
    del context
    import logging

    from stretto_math.statements import is_right, read_gold
    from stretto_math.values import equal, read

    # math_verify warns at every call that its own time limits are off; the scoring process has limits.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The parser builds its tables here, once, rather than within the time limit of an answer.
    for latex in _COMMON_LATEX:
        equal(read(latex), read("1 + " + latex))
    gold_of = lru_cache(16)(read_gold)

    def math(prompt: Any, completion: str, **columns: Any) -> dict[str, float]:
        expected = expected_texts(columns, config.column)[0]
        try:
            gold = gold_of(expected)
        except ValueError as error:
            row = f" of row {columns['id']!r}" if "id" in columns else ""
            raise ValueError(f"{_fault(config, expected, error)}{row}") from error
        start = config.start_of_result(completion, columns)
        right = float(start is not None and is_right(gold, completion[start:]))
        return {"reward": right, "accuracy": right}

    return math


def check_row(config: MathConfig, row: Mapping[str, Any]) -> str:
    """Return why the expected answer of a row cannot be read; empty if it can be read."""
    from stretto_math.statements import read_gold

    if fault := fault_of_expected(row, config.column):
        return fault
    [expected, *_] = expected_texts(row, config.column)
    try:
        read_gold(expected)
    except ValueError as error:
        return _fault(config, expected, error)
    return ""


def _fault(config: MathConfig, expected: str, error: ValueError) -> str:
    text = expected if len(expected) <= 100 else f"…{expected[-100:]}"
    return f"cannot read the expected answer {text!r} (column {config.column!r}): {error}"


@hookimpl
def stretto_reward() -> Iterator[Component[MathConfig]]:
    yield Component(
        "math",
        make,
        MathConfig,
        "1 if the answer's last result equals the row's, as mathematics or as text (math-verify)",
        check_row=check_row,
        requires={"math_verify": "stretto[math]"},
    )
