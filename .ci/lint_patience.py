"""Refuse deadlines of tests that do not go through `patience`: `python .ci/lint_patience.py`.

A number of seconds may stand in no call that waits, in no argument, default or key of a run file that is a
limit of time, in no sum with a clock, and in no bound on a time that was taken. It stands in
`patience(...)`, which makes of it what this machine needs.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WAITS = {
    **dict.fromkeys(("fail_after", "move_on_after", "sleep", "timeout", "wait", "join", "result"), 0),
    **dict.fromkeys(("until", "until_step", "wait_for"), 1),
}
"""Function -> place of its argument that is a number of seconds; `timeout` is pytest's mark."""
LIMITS = re.compile(r"(\w*timeout(_s)?|\w*deadline_s|within_s|grace_s|outage_s|silence_s|finish_s)$")
"""Arguments, parameters and keys of run files that are limits of time."""
IN_TEXT = re.compile(r"\b\w*(?:timeout_s|grace_s|outage_s|silence_s)(?:=|\"?: ?)[\d.]+")
CLOCKS = {"monotonic", "perf_counter", "current_time", "clock", "now"}
NO_TIME_PASSES = {
    "tests/assembly",  # values of run files that are compared
    "tests/cli/test_check.py",
    "tests/kernel/test_scheduler.py",  # its time is a number
    "tests/serving/test_intake.py",
    "tests/observe/test_advice.py",  # texts of advice
    "tests/observe/test_verdict.py",
    "tests/helpers/step_lines.py",
    "tests/helpers/patience.py",
}


def main() -> int:
    """Print every deadline that does not go through `patience`; the exit status."""
    faults = [fault for file in sorted((ROOT / "tests").rglob("*.py")) for fault in _faults(file)]
    print("\n".join(faults) or "patience: kept")
    return bool(faults)


def _faults(file: Path) -> Iterator[str]:
    name = str(file.relative_to(ROOT))
    if any(name.startswith(place) for place in NO_TIME_PASSES):
        return
    for node, what in literals(ast.parse(file.read_text())):
        yield f"{name}:{node.lineno}: {what}: write patience({ast.unparse(node)})"


def literals(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Every number of seconds that is a deadline, and where it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _in_call(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _defaults(node.args)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and _is_limit(key.value) and _is_number(value):
                    yield value, f"key {key.value!r}"
        elif isinstance(node, ast.Compare) and _is_difference(node.left) and _is_bound(node):
            yield node.comparators[0], "bound on a time"
        elif isinstance(node, ast.BinOp) and _is_clock(node.left) and _is_number(node.right):
            yield node.right, "deadline by a clock"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _sets_limit(node.value):
            yield node, "text of a run file"


def _in_call(node: ast.Call) -> Iterator[tuple[ast.expr, str]]:
    name = _name(node.func)
    place = WAITS.get(name, len(node.args))
    if place < len(node.args) and _is_number(node.args[place]):
        yield node.args[place], f"{name}()"
    for keyword in node.keywords:
        if _is_limit(keyword.arg) and _is_number(keyword.value):
            yield keyword.value, f"argument {keyword.arg}"


def _defaults(arguments: ast.arguments) -> Iterator[tuple[ast.expr, str]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for argument, default in pairs:
        if _is_limit(argument.arg) and default is not None and _is_number(default):
            yield default, f"default of {argument.arg}"


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_limit(name: object) -> bool:
    return isinstance(name, str) and bool(LIMITS.match(name))


def _is_number(node: ast.expr) -> bool:
    """Whether it is a number other than 0, which is no time at all."""
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value != 0


def _is_difference(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and _is_clock(node.left)


def _is_bound(node: ast.Compare) -> bool:
    return isinstance(node.ops[0], ast.Lt | ast.LtE) and _is_number(node.comparators[0])


def _is_clock(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in CLOCKS


def _sets_limit(text: str) -> bool:
    """Whether a part of a run file sets a limit of time. A sentence, such as an error, may name one."""
    sentence = " " in IN_TEXT.sub("", text).strip() and "\n" not in text and "{" not in text
    return bool(IN_TEXT.search(text)) and not sentence


if __name__ == "__main__":
    sys.exit(main())
