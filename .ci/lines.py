"""Count the lines of each package: `python .ci/lines.py`, which `make lines` runs.

`code` has neither blank lines, docstrings nor comments, and a line of more than 120 characters counts as
several. `all` counts every line. Python, JavaScript, CSS and HTML; no vendored files.
"""

from __future__ import annotations

import ast
import io
import math
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[1]
_PAGES = (".js", ".css", ".html")
_SKIPPED = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
_COMMENT = re.compile(r"/\*.*?\*/|<!--.*?-->|^\s*//[^\n]*", re.DOTALL | re.MULTILINE)


def main() -> None:
    """Print the table."""
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    every, code, docs = Counter[str](), Counter[str](), Counter[str]()
    for name in listed.splitlines():
        path = ROOT / name
        if "/vendor/" in name or path.suffix not in (".py", *_PAGES) or not path.is_file():
            continue
        text = path.read_text()
        if path.suffix == ".py":
            counted, documented = _python(text)
        else:
            counted, documented = _lengths(_COMMENT.sub("", text).splitlines()), 0
        for package in _packages(name):
            every[package] += text.count("\n")
            code[package] += counted
            docs[package] += documented
    print(f"{'':34} {'all':>8} {'code':>8} {'docstrings':>11}")
    for package in sorted(every):
        print(
            f"{package:34} {every[package]:>8,} {code[package]:>8,} {docs[package] / every[package]:>11.1%}"
        )


def _packages(name: str) -> list[str]:
    """The packages in whose rows a file counts."""
    parts = name.split("/")
    kind = "Python" if name.endswith(".py") else "pages"
    top = parts[0]
    rows = [f"{top}, {kind}"]
    if top in ("core", "plugins"):
        rows.append(f"core + plugins, {kind}")
    if top == "core" and kind == "Python":
        rows.append(f"  core/{parts[2] if len(parts) > 3 else '(contracts)'}")
    return rows


def _python(text: str) -> tuple[int, int]:
    """The numbers of code lines and of docstring lines."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if is_docstring(node):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SKIPPED:
            used.update(range(token.start[0], token.end[0] + 1))
    lines = text.splitlines()
    return _lengths([lines[number - 1] for number in used - documented]), len(documented)


def is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Whether a statement is a text alone: a docstring, or a comment of a field or constant."""
    return (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str
    )


def _lengths(lines: list[str]) -> int:
    """The number of lines with text, of at most 120 characters."""
    return sum(math.ceil(len(line) / 120) for line in lines if line.strip())


if __name__ == "__main__":
    main()
