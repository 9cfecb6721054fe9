"""One name, one thing: no two classes of core and plugins share a name."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_class_name_stands_for_two_things() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for folder in ("core", "plugins"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    homes[node.name.lstrip("_")].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
