"""Refuse `str.splitlines` on lines of JSON: `python .ci/lint_json_lines.py`.

It also splits at U+2028, U+2029 and U+0085, which a JSON text may contain. A function that reads JSON, or an
expression that names a `.jsonl` file, calls it on `read_bytes()` alone, or uses `split("\\n")`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "plugins", "benchmarks", "examples")


def main() -> int:
    """Print every such call; the exit status."""
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    places = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in faults(file.read_text())]
    print("\n".join(f"{place}: str.splitlines on lines of JSON" for place in places) or "lines of JSON: kept")
    return bool(places)


def faults(text: str) -> Iterator[int]:
    """Yield the line of each such call in the text of a module."""
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    reads = {call for function in functions if _reads_json(function) for call in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "splitlines":
            text = ast.unparse(node.value)
            if not text.endswith("read_bytes()") and (node in reads or ".jsonl" in text):
                yield node.lineno


def _reads_json(function: ast.AST) -> bool:
    return any(name in ast.unparse(function) for name in ("json.loads", "json.decode"))


if __name__ == "__main__":
    sys.exit(main())
