"""The hook of mkdocs that writes the API reference: a page for each public part of the package `stretto`.

pyproject.toml says which modules plugins may not import; all others are public. mkdocstrings fills each page
from the docstrings, and imports no module.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "core" / "stretto"
CONTRACTS = "api/contracts.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages to the end of the navigation."""
    entries = [{"Contracts": CONTRACTS}, *({f"stretto.{part}": f"api/{part}.md"} for part in toolkits())]
    config.nav = [*(config.nav or []), {"API reference": entries}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the text of the pages, which is in no file."""
    modules = sorted(path for path in PACKAGE.glob("*.py") if not path.stem.startswith("_"))
    intro = "Modules directly in `stretto`. `from stretto import …` has the names that most plugins need."
    texts = {CONTRACTS: page("Contracts", intro, modules)}
    for part in toolkits():
        modules = sorted(path for path in (PACKAGE / part).glob("*.py") if not path.stem.startswith("_"))
        texts[f"api/{part}.md"] = page(f"stretto.{part}", docstring(PACKAGE / part / "__init__.py"), modules)
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    return files


def toolkits() -> list[str]:
    """The public folders of the package."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    rules = {rule["name"]: rule for rule in settings["importlinter"]["contracts"]}
    private = rules["plugins use public modules only"]["forbidden_modules"]
    folders = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    return [name for name in folders if f"stretto.{name}" not in private]


def page(title: str, intro: str, modules: list[Path]) -> str:
    """A page with the modules that say what they offer."""
    offered = [path for path in modules if "__all__ = " in path.read_text()]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in offered]
    return "\n\n".join([f"# {title}", intro, *(f"::: {name}" for name in names)]) + "\n"


def docstring(path: Path) -> str:
    """The docstring of a module."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""
