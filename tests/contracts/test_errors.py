"""The tree of exceptions in the docstring of `stretto.errors` is that of the code, and complete."""

import ast
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import stretto
from stretto import errors
from stretto.errors import nearest, place_of
from stretto.user_code.faults import SampleFault

CORE = Path(stretto.__file__).parent
_LINE = re.compile(
    r"    (?P<branch>[│├└─ ]*)(?P<name>\w+)(?: +\((?P<module>stretto[\w.]*)\))?(?: {2,}\S.*| \S.*)?"
)

Entry = tuple[str, str, str]
"""Name, name of the parent, and module of an exception."""


def drawn_tree() -> set[Entry]:
    """The exceptions below `StrettoError` in the docstring."""
    entries: set[Entry] = set()
    parents = ["StrettoError"]
    for line in inspect.getdoc(errors).splitlines():  # pyright: ignore[reportOptionalMemberAccess]
        if not re.match(r"    [│├└]", line):
            continue
        match = _LINE.fullmatch(line)
        assert match, line
        depth = len(match["branch"]) // 4
        entries.add((match["name"], parents[depth - 1], match["module"] or "stretto.errors"))
        parents[depth:] = [match["name"]]
    return entries


def defined_tree() -> set[Entry]:
    """The exceptions below `StrettoError` in the code of core."""
    classes: dict[str, tuple[list[str], str]] = {}  # name -> the names of its bases, and its module
    for path in CORE.rglob("*.py"):
        parts = path.relative_to(CORE.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                classes[node.name] = (bases, module)
    family = {"StrettoError"}
    while more := {name for name, (bases, _) in classes.items() if family & {*bases}} - family:
        family |= more
    return {
        (name, base, module) for name, (bases, module) in classes.items() for base in bases if base in family
    }


def test_the_docstring_draws_every_exception_of_core_below_its_parent() -> None:
    assert drawn_tree() == defined_tree()


def test_every_exception_of_the_module_is_public() -> None:
    assert {name for name, _, module in drawn_tree() if module == "stretto.errors"} <= {*errors.__all__}


def test_leaves_are_all_exceptions_in_their_order() -> None:
    first, second, third = ValueError("1"), KeyboardInterrupt(), ValueError("3")
    tree = BaseExceptionGroup("outer", [first, BaseExceptionGroup("inner", [second, third])])
    assert errors.leaves(tree) == [first, second, third]
    assert errors.leaves(first) == [first]


def test_the_nearest_word() -> None:
    assert nearest("gpro", ["gspo", "grpo", "ppo"]) == "; did you mean 'grpo'?"
    assert nearest("zzz", ["grpo"]) == ""
    assert nearest("x", []) == ""


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:  # noqa: BLE001
        return caught


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (raised(Mute()), r"Mute, whose text cannot be made \(KeyError in __str__\) \(PLACE\)"),
        (raised(ExceptionGroup("g", [ValueError("a")])), r"ValueError: a \(PLACE\)"),
        (
            raised(RuntimeError("setup"), FileNotFoundError(2, "No such file", "/rubric")),
            r"RuntimeError: setup \(PLACE\), caused by FileNotFoundError: .* '/rubric'",
        ),
        (
            raised(RuntimeError("no x"), KeyError("x")),
            r"RuntimeError: no x \(PLACE\), caused by KeyError: 'x'",
        ),
        (raised(RuntimeError("again: lost"), OSError("lost")), r"RuntimeError: again: lost \(PLACE\)"),
    ],
)
def test_an_error_of_user_code_has_its_text_line_and_cause(error: Exception, text: str) -> None:
    fault = SampleFault.of(error, "reward")
    assert re.fullmatch(f"reward raised {text}".replace("PLACE", rf"{re.escape(__file__)}:\d+"), fault.error)
    assert re.fullmatch(rf"\w+ {re.escape(__file__)}:\d+", fault.site)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ExceptionGroup("outer", [ExceptionGroup("inner", [KeyError("a")])]), "KeyError: 'a'"),
        (ExceptionGroup("two", [KeyError("a"), ValueError("b")]), "KeyError: 'a'; ValueError: b"),
        (
            ExceptionGroup("many", [ValueError(f"{number}") for number in range(9)]),
            "ValueError: 0; ValueError: 1; ValueError: 2; and 6 more",
        ),
        (
            subprocess.CalledProcessError(2, ["git"], stderr=b"usage\nfatal: no repository\n"),
            "CalledProcessError: Command '['git']' returned non-zero exit status 2.; its last line: "
            "fatal: no repository",
        ),
    ],
)
def test_an_error_shows_what_its_wrapper_hides(error: BaseException, text: str) -> None:
    assert place_of(error) == text
    assert SampleFault.of(error, "reward").error == f"reward raised {text}"
