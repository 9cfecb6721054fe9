"""The reward of examples/clevr_count_grpo.yaml: 1 for the right number of objects."""

from __future__ import annotations

import re


def score(completion: str, answer: object) -> float:
    """Return 1 if the last number of the completion is the last one of the column `answer`, else 0."""
    number, expected = _last_number(completion), _last_number(str(answer))
    if expected is None:
        raise ValueError(f"the column 'answer' has no number: {answer!r}")
    return float(number == expected)


def _last_number(text: str) -> int | None:
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None
