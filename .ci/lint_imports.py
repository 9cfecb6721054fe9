"""Hold the import rules of pyproject.toml (`tool.importlinter`): `python .ci/lint_imports.py`.

import-linter wants every package by name. Here `stretto_*` stands for all plugin packages of the checkout.
Imports for type checkers break no rule. Still they are arrows from room to room that run up the layers, and
circles of files. Both are printed, and may not become more than `.ci/sizes.toml` says.
"""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run import-linter with the names filled in, and count arrows and circles; the exit status."""
    plugins = sorted(folder.name for folder in ROOT.glob("plugins/*/stretto_*"))
    rules = (
        (ROOT / "pyproject.toml")
        .read_text()
        .replace('"stretto_*"', ", ".join(f'"{name}"' for name in plugins))
    )
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "pyproject.toml")
        config.write_text(rules)
        return lint_imports(config_filename=str(config), cache_dir=folder, no_logo=True) or counts(rules)


def counts(rules: str) -> int:
    """Print the arrows that run up and the circles; 1 if they are more than allowed."""
    graph = grimp.build_graph("stretto", exclude_type_checking_imports=False, cache_dir=None)
    contracts = tomllib.loads(rules)["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    found = {"arrows_up": sorted(arrows_up(graph, layers)), "circles": sorted(map(sorted, circles(graph)))}
    most = tomllib.loads((ROOT / ".ci" / "sizes.toml").read_text())
    status = 0
    for kind, lines in found.items():
        print(f"{kind}: {len(lines)} (at most {most[kind]})", *lines, sep="\n  ")
        status |= len(lines) > most[kind]
    return int(status)


def arrows_up(graph: grimp.ImportGraph, layers: list[str]) -> set[str]:
    """The rooms, or modules at the top, that name one of a higher layer, if only for type checkers."""
    floors = {
        room.strip(): floor for floor, each in enumerate(layers) for room in each.replace("|", ":").split(":")
    }
    return {
        f"{upper} <- {lower}"
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
        if (lower := room_of(module)) in floors and (upper := room_of(imported)) in floors
        if floors[upper] < floors[lower]
    }


def room_of(module: str) -> str:
    """The part of a module's name behind `stretto`; empty for the package itself."""
    return [*module.split("."), ""][1]


def circles(graph: grimp.ImportGraph) -> Iterator[set[str]]:
    """The largest sets of modules of which each imports each, directly or not."""
    left = set(graph.modules)
    while left:
        module = left.pop()
        circle = {module} | graph.find_downstream_modules(module) & graph.find_upstream_modules(module)
        left -= circle
        if len(circle) > 1:
            yield circle


if __name__ == "__main__":
    sys.exit(main())
