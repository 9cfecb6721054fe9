"""Write the lists of files in docs/architecture.md from the files' docstrings: `python docs/fill_files.py`.

Each list stands between `<!-- files: public -->` or `<!-- files: private -->` and `<!-- end -->`. A test
fails if filling would change the page.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = ROOT / "core" / "stretto"
PAGE = Path(__file__).with_name("architecture.md")
PART = re.compile(r"(<!-- files: (public|private) -->\n).*?(<!-- end -->)", re.DOTALL)
_NOT_FOR_PLUGINS = "plugins use public modules only"
_COLUMN = 28


def filled(page: str) -> str:
    """The page with every list as it should be."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rule = next(contract for contract in contracts if contract["name"] == _NOT_FOR_PLUGINS)
    private = {name.removeprefix("stretto.") for name in rule["forbidden_modules"]}

    def lines(part: str) -> str:
        rooms = [path for path in _entries(CORE) if (path.stem in private) == (part == "private")]
        return "\n".join(line for path in rooms for line in _lines(path, 0))

    return PART.sub(lambda match: f"{match[1]}```text\n{lines(match[2])}\n```\n{match[3]}", page)


def _entries(folder: Path) -> list[Path]:
    """The Python files of a folder, then its packages, each by name."""
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    return [*files, *(path.parent for path in sorted(folder.glob("*/__init__.py")))]


def _lines(path: Path, depth: int) -> Iterator[str]:
    name = f"{'  ' * depth}{path.name}{'/' if path.is_dir() else ''}"
    yield f"{name:<{_COLUMN}} {_purpose(path / '__init__.py' if path.is_dir() else path)}".rstrip()
    if path.is_dir():
        for inner in _entries(path):
            yield from _lines(inner, depth + 1)


def _purpose(file: Path) -> str:
    """The first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?: |$)", paragraph)[0]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
