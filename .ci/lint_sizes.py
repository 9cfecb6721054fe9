"""Hold the limits of sizes: `python .ci/lint_sizes.py`.

A folder of core has at most 16 Python files, a file at most 800 lines, a class at most 35 methods and 500
lines. What is larger stands in a list below with its size, which may only fall: lower the number with the
code, and remove the line when it is no longer needed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES, MOST_LINES, MOST_METHODS, MOST_CLASS_LINES = 16, 800, 35, 500

# The contracts stand side by side at the top.
LARGER_FOLDERS = {"core/stretto": 20}
LARGER_FILES: dict[str, int] = {}
# Class -> methods, lines.
LARGER_CLASSES: dict[str, tuple[int, int]] = {}


def main() -> int:
    """Print every size above its limit; the exit status."""
    faults = [*_folders(), *_files()]
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


def _class(node: ast.ClassDef, file: str) -> Iterator[str]:
    methods = sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    most_methods, most_lines = LARGER_CLASSES.get(node.name, (MOST_METHODS, MOST_CLASS_LINES))
    if methods > most_methods or lines > most_lines:
        limit = f"at most {most_methods} and {most_lines}"
        yield f"{file}: {node.name} has {methods} methods and {lines} lines; {limit}"


if __name__ == "__main__":
    sys.exit(main())
