"""A policy without a model, for the mock engine: it adds with a tool, and sometimes guesses instead."""

from __future__ import annotations

import json


def answer(prompt: str, seed: int) -> str:
    """Return the next call of the tool, or the answer once the tool has returned all partial sums.

    Args:
        prompt: the question, then for each call its text and its result, one line each.
    """
    question, *turns = prompt.splitlines()
    terms = question.removesuffix("=").split("+")
    sums = turns[1::2]
    if len(sums) == len(terms) - 1:
        return " ".join(sums)
    if seed % 16 == 0:
        return "I do not know."
    a, b = sums[-1] if sums else terms[0], terms[len(sums) + 1]
    call = {"name": "add", "arguments": {"a": int(a), "b": int(b)}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"
