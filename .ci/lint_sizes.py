"""Hold the limits of sizes: `python .ci/lint_sizes.py`.

A folder of core has at most 16 Python files, a file at most 800 lines, a class at most 35 methods and 500
lines. What is larger stands in a list below with its size, which may only fall: lower the number with the
code, and remove the line when it is no longer needed. `sizes.toml` has the limits of the sums.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES, MOST_LINES, MOST_METHODS, MOST_CLASS_LINES = 16, 800, 35, 500

_SLACK = 50
"""Lines by which a sum may be smaller than its limit before the limit has to follow."""

# The contracts stand side by side at the top.
LARGER_FOLDERS = {"core/stretto": 20}
LARGER_FILES: dict[str, int] = {}
# Class -> methods, lines.
LARGER_CLASSES: dict[str, tuple[int, int]] = {}


def main() -> int:
    """Print every size above its limit; the exit status."""
    faults = [*_folders(), *_files(), *_sums()]
    print("\n".join(faults) or "sizes: kept")
    return bool(faults)


def _folders() -> Iterator[str]:
    for folder in sorted({path.parent for path in (ROOT / "core" / "stretto").rglob("*.py")}):
        name = str(folder.relative_to(ROOT))
        count, limit = _count(folder), LARGER_FOLDERS.get(name, MOST_FILES)
        if count > limit:
            yield f"{name}: {count} Python files; at most {limit}: make rooms"


def _count(folder: Path) -> int:
    return sum(path.name != "__init__.py" for path in folder.glob("*.py"))


def _files() -> Iterator[str]:
    for path in sorted([*(ROOT / "core").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        lines, limit = text.count("\n"), LARGER_FILES.get(name, MOST_LINES)
        if lines > limit:
            yield f"{name}: {lines} lines; at most {limit}"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                yield from _class(node, name)


def _sums() -> Iterator[str]:
    limits: dict[str, int] = tomllib.loads((ROOT / ".ci" / "sizes.toml").read_text())
    pages = [path for suffix in ("js", "css", "html") for path in _below("plugins", f"*.{suffix}")]
    docs = _below("docs", "*.md")
    found = {
        "python": _lines([*_below("core", "*.py"), *_below("plugins", "*.py")]),
        "tests": _lines(_below("tests", "*.py")),
        "pages": _lines([path for path in pages if "vendor" not in path.parts]),
        "docs_words": sum(len(path.read_text().split()) for path in docs),
        "docs_pages": len(docs),
    }
    for name, size in found.items():
        if size > limits[name]:
            yield f".ci/sizes.toml: {name} is {size}, at most {limits[name]}"
        elif name in ("python", "tests") and size < limits[name] - _SLACK:
            yield f".ci/sizes.toml: {name} = {limits[name]}, and now it is {size}: write the smaller number"


def _below(folder: str, pattern: str) -> list[Path]:
    return list((ROOT / folder).rglob(pattern))


def _lines(files: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in files)


def _class(node: ast.ClassDef, file: str) -> Iterator[str]:
    methods = sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    most_methods, most_lines = LARGER_CLASSES.get(node.name, (MOST_METHODS, MOST_CLASS_LINES))
    if methods > most_methods or lines > most_lines:
        limit = f"at most {most_methods} and {most_lines}"
        yield f"{file}: {node.name} has {methods} methods and {lines} lines; {limit}"


if __name__ == "__main__":
    sys.exit(main())
