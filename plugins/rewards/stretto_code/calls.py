"""Calls of a function of an answer: the program that makes one call, and its result."""

from __future__ import annotations

import json
from typing import Any

from stretto_code.suites import Case

CALLER = """
import json, os, sys, types

call = json.load(sys.stdin)
sys.stdin = open(os.devnull)
result = os.dup(1)
os.dup2(2, 1)  # what the function prints is no result

solution = sys.modules["solution"] = types.ModuleType("solution")
exec("from typing import *", solution.__dict__)
exec(compile(call["source"], "solution.py", "exec"), solution.__dict__)
name = call["function"]
owner = solution if hasattr(solution, name) or not hasattr(solution, "Solution") else solution.Solution()
value = getattr(owner, name)(*call["args"], **call["kwargs"])


def plain(value):
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    raise TypeError(f"the result is no value of JSON: {type(value).__name__}")


with os.fdopen(result, "w") as file:
    file.write(json.dumps(value, default=plain))
"""
"""Makes one call, in a process of its own, and writes its result to standard output as JSON."""


def call_of(source: str, case: Case) -> bytes:
    """Return the input of `CALLER` for one test."""
    call = {"source": source, "function": case.function, "args": case.args, "kwargs": case.kwargs or {}}
    return json.dumps(call).encode()


def value_in(output: bytes) -> Any:
    """Return the result in the output of `CALLER`.

    Raises:
        ValueError: if it is not exactly one value of JSON.
    """
    try:
        return json.loads(output)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error
