"""Compare the results of programs with the expected results, in the scoring process."""

import math
import re
from decimal import Decimal
from itertools import zip_longest
from typing import Any, cast

# The pattern divides the digits of a word in only one way, so matching is linear in the word's length.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,9})?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two values of JSON are equal: `true` is no number, `2` equals `2.0`. The tolerance
    applies where the expected number has a fraction."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, int | float):
        return isinstance(value, int | float) and _same_number(value, expected, tolerance)
    if isinstance(expected, list | tuple):
        expected_items = cast("list[Any]", expected)
        items = cast("list[Any]", value)
        return (
            isinstance(value, list)
            and len(items) == len(expected_items)
            and all(same_value(a, b, tolerance) for a, b in zip(items, expected_items, strict=True))
        )
    if isinstance(expected, dict):
        expected_fields = {str(key): field for key, field in cast("dict[Any, Any]", expected).items()}
        fields = cast("dict[str, Any]", value)
        return (
            isinstance(value, dict)
            and fields.keys() == expected_fields.keys()
            and all(same_value(fields[key], field, tolerance) for key, field in expected_fields.items())
        )
    return type(value) is type(expected) and value == expected


def same_text(output: str, expected: str, tolerance: float) -> bool:
    """Return whether two outputs are equal line by line, except for blanks at the ends of lines and empty
    lines at the end. Words may be numbers; the tolerance applies where the expected number has a fraction."""
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
