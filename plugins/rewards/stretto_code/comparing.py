"""Compares what a program computed with what was expected, in the scoring process."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from itertools import zip_longest
from typing import Any, cast

# Only one way divides the digits of a word, so matching is linear in its length.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,9})?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether two values of JSON are equal: `true` is no number, `2` equals `2.0`. The tolerance applies
    where the expected number has a fraction."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, int | float):
        return isinstance(value, int | float) and _same_number(value, expected, tolerance)
    if isinstance(expected, list | tuple):
        wanted = cast("list[Any]", expected)
        found = cast("list[Any]", value)
        return (
            isinstance(value, list)
            and len(found) == len(wanted)
            and all(same_value(a, b, tolerance) for a, b in zip(found, wanted, strict=True))
        )
    if isinstance(expected, dict):
        wanted_of = {str(key): each for key, each in cast("dict[Any, Any]", expected).items()}
        found_of = cast("dict[str, Any]", value)
        return (
            isinstance(value, dict)
            and found_of.keys() == wanted_of.keys()
            and all(same_value(found_of[key], each, tolerance) for key, each in wanted_of.items())
        )
    return type(value) is type(expected) and value == expected


def same_text(output: str, expected: str, tolerance: float) -> bool:
    """Whether two outputs are equal, line by line, but for blanks at the ends of lines and empty lines at the
    end. Words may be numbers; the tolerance applies where the expected one has a fraction."""
    pairs = zip_longest(_lines(output), _lines(expected))
    return all(a is not None and b is not None and _same_line(a, b, tolerance) for a, b in pairs)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_line(line: str, expected: str, tolerance: float) -> bool:
    if line == expected:
        return True
    words, wanted = line.split(), expected.split()
    return len(words) == len(wanted) and all(
        _same_word(a, b, tolerance) for a, b in zip(words, wanted, strict=True)
    )


def _same_word(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    whole = _WHOLE.fullmatch(expected)
    if whole and _WHOLE.fullmatch(word):
        return False  # whole numbers are compared as they are written, however long
    wanted = float(expected)
    if whole or math.isinf(wanted):
        return Decimal(word) == Decimal(expected)
    return _same_number(float(word), wanted, tolerance)


def _same_number(value: float, expected: float, tolerance: float) -> bool:
    if isinstance(expected, int):
        return value == expected
    try:
        if math.isnan(value) and math.isnan(expected):
            return True
        return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # a whole number beyond the range of float
        return value == expected
