"""Read the tests of a row, in the forms of common data sets of programming tasks."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from stretto.dataset import object_of
from stretto.errors import ConfigError


class SuiteError(ValueError):
    """The tests of a row cannot be read; the text says what is wrong."""


@dataclass(frozen=True)
class Case:
    """One test: a call if it has a function, else a run of the program with standard input."""

    expected: tuple[Any, ...]
    """Values that count as right: any value of JSON for a call, one text for a program."""
    stdin: str = ""
    """Standard input of a program."""
    function: str = ""
    """Function to call, or method of the class `Solution`; empty for a program."""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None


def read_suite(value: Any, row: Mapping[str, Any]) -> list[Case]:
    """Return the tests in a column: a list of tests, a map of `inputs` and `outputs`, or either as JSON text.
    The row's `fn_name` names the function if the tests do not. Raises SuiteError for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=object_of)
        except (ValueError, ConfigError) as error:
            raise SuiteError(f"expected JSON: {error}") from error
    function = row.get("fn_name") or ""
    if isinstance(value, Mapping):
        cases = _read_lists(cast("Mapping[str, Any]", value), function)
    elif isinstance(value, Sequence):
        cases = [_read_test(test, function, index) for index, test in enumerate(cast("Sequence[Any]", value))]
    else:
        raise SuiteError(
            f"expected a list of tests, or a map of `inputs` and `outputs`; found {_named(value)}"
        )
    if not cases:
        raise SuiteError("there are no tests")
    return cases


def _read_lists(value: Mapping[str, Any], function: str) -> list[Case]:
    """Read `{"inputs": […], "outputs": […], "fn_name": …}` (APPS, TACO). Some data sets wrap a call's value
    in a list, so the value counts with and without the list."""
    if missing := [name for name in ("inputs", "outputs") if name not in value]:
        raise SuiteError(f"the map of tests has no {missing[0]!r}; its keys: {', '.join(value)}")
    inputs, outputs = value["inputs"], value["outputs"]
    if len(inputs) != len(outputs):
        raise SuiteError(f"{len(inputs)} inputs, but {len(outputs)} outputs")
    function = value.get("fn_name") or function
    cases: list[Case] = []
    for test_input, expected in zip(inputs, outputs, strict=True):
        case = _read_pair(test_input, expected, function)
        if function and isinstance(expected, list) and len(cast("list[Any]", expected)) == 1:
            case = Case((*case.expected, *cast("list[Any]", expected)), "", function, case.args)
        cases.append(case)
    return cases


def _read_test(test: Any, function: str, index: int) -> Case:
    """Read one test of a list, in one of three forms: a call, `input` and `output`, or stdin and stdout."""
    if not isinstance(test, Mapping):
        raise SuiteError(f"test {index}: expected a map, found {_named(test)}")
    test = cast("Mapping[str, Any]", test)
    if "call" in test and (unknown := test.keys() - {"call", "args", "kwargs", "expected"}):
        raise SuiteError(f"test {index} has {sorted(unknown)[0]!r}; a call has `args`, `kwargs`, `expected`")
    try:
        if "call" in test:
            return Case((test["expected"],), "", test["call"], test.get("args") or (), test.get("kwargs"))
        if "stdin" in test:
            return Case((_text(test["stdout"]),), _text(test["stdin"]))
        is_call = test.get("testtype", "functional" if function else "stdin") == "functional"
        if is_call and not function:
            raise SuiteError("the test is functional, but the row has no column `fn_name`")
        return _read_pair(test["input"], test["output"], function if is_call else "")
    except KeyError as error:
        raise SuiteError(
            f"test {index} has no {error}; expected `call`, `args` and `expected`, or `stdin` and `stdout`, "
            "or `input` and `output`"
        ) from error
    except SuiteError as error:
        raise SuiteError(f"test {index}: {error}") from error


def _read_pair(given: Any, expected: Any, function: str) -> Case:
    """Read one input with its output. A call's arguments are a list, or lines of JSON (LiveCodeBench)."""
    if not function:
        return Case((_text(expected),), _text(given))
    if isinstance(given, str):
        try:
            args = [json.loads(line) for line in given.split("\n") if line.strip()]
            return Case(
                (json.loads(expected) if isinstance(expected, str) else expected,), "", function, args
            )
        except ValueError as error:
            raise SuiteError(f"expected a value of JSON in each line of the arguments: {error}") from error
    if not isinstance(given, Sequence):
        raise SuiteError(f"expected a list of arguments for {function!r}, found {_named(given)}")
    return Case((expected,), "", function, cast("Sequence[Any]", given))


def _text(value: Any) -> str:
    """Return the text of an input or an output; some data sets have a list of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(line, str) for line in cast("Sequence[Any]", value)):
        return "\n".join(cast("Sequence[str]", value))
    raise SuiteError(f"expected text, found {_named(value)}; name a function to call with values")


def _named(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
