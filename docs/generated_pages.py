"""The hook of mkdocs that writes the pages made from the source: keys, figures, events, and the API
reference.

- Keys: a page for the sections of the core and one for each kind of component, from the config structs;
  `stretto plugins KIND NAME` shows the same.
- Figures: the keys of `metrics.jsonl` that every run may have, from the table that all views use.
- Events: the events of the journal, from their docstrings.
- API reference: a page for each public part of the package `stretto`. pyproject.toml says which modules
  plugins may not import; all others are public. mkdocstrings fills each page from the docstrings, and imports
  no module.
- `llms.txt`: the pages, each with its first sentence, for assistants (https://llmstxt.org).
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from stretto.assembly.plugins import KINDS, Plugins
from stretto.bus.messages import events
from stretto.cli.make.schema import Field, fields_of
from stretto.component import Kind
from stretto.config import RunConfig, VariantConfig
from stretto.records.figures import FIGURES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "core" / "stretto"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages to the end of the navigation."""
    keys = [{"Sections of the core": "keys/core.md"}, *({kind: f"keys/{kind}.md"} for kind in KINDS)]
    api = [{"Contracts": "api/contracts.md"}, *({f"stretto.{part}": f"api/{part}.md"} for part in toolkits())]
    tables = [{"Figures": "figures.md"}, {"Events of the journal": "journal-events.md"}]
    config.nav = [*(config.nav or []), {"Keys of the run file": keys}, {"Tables": tables}, {"API": api}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the text of the pages, which is in no file."""
    plugins = Plugins()
    texts = {"keys/core.md": core_keys(), "figures.md": figure_list(), "journal-events.md": event_list()}
    texts |= {f"keys/{kind}.md": component_keys(plugins, kind) for kind in KINDS}
    modules = sorted(path for path in PACKAGE.glob("*.py") if not path.stem.startswith("_"))
    intro = "Modules directly in `stretto`. `from stretto import …` has the names that most plugins need."
    texts["api/contracts.md"] = page("Contracts", intro, modules)
    for part in toolkits():
        modules = sorted(path for path in (PACKAGE / part).glob("*.py") if not path.stem.startswith("_"))
        texts[f"api/{part}.md"] = page(f"stretto.{part}", docstring(PACKAGE / part / "__init__.py"), modules)
    texts["llms.txt"] = page_list(config.nav or [])
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    return files


def page_list(nav: Sequence[Mapping[str, Any]]) -> str:
    """The written pages of the navigation by section, each with its first sentence."""
    parts = [f"# stretto\n\n> {first_sentence('README.md')}"]
    for section in nav:
        [(title, entries)] = section.items()
        if isinstance(entries, list):
            written = [
                (name, file) for entry in entries for name, file in entry.items() if (DOCS / file).exists()
            ]
            lines = [f"- [{name}]({Path(file).stem}.html): {first_sentence(file)}" for name, file in written]
            parts += [f"## {title}", "\n".join(lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def first_sentence(file: str) -> str:
    """The first sentence below a page's heading, without links."""
    paragraphs = (DOCS / file).read_text().split("\n\n")
    prose = next(each for each in paragraphs if re.match(r"[\w`\[*]", each))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return re.split(r"(?<=[.:]) (?=[A-Z`])", plain, maxsplit=1)[0]


# ------------------------------------------------------------------------- keys, figures and events


def core_keys() -> str:
    """The keys that no component owns. Of a section with `use`: the keys that all components share."""
    fields = [*fields_of(RunConfig)]
    fields += [
        Field(f"variants.NAME.{each.name}", each.type, each.default, each.meaning)
        for each in fields_of(VariantConfig)
    ]
    return "# Sections of the core\n\n" + keys(fields)


def component_keys(plugins: Plugins, kind: Kind) -> str:
    """The keys of every installed component of a kind."""
    components = [plugins.get(kind, name) for name in plugins.names(kind)]
    parts = [f"## `{each.name}`\n\n{each.summary}\n\n{keys(fields_of(each.config))}" for each in components]
    return "\n\n".join([f"# Keys of `{kind}`", *parts])


def keys(fields: Iterable[Field]) -> str:
    """Fields as a table."""
    rows = [(f"`{each.name}`", each.type, f"`{each.default}`", each.meaning) for each in fields]
    return table(("key", "type", "default", "meaning"), rows)


def figure_list() -> str:
    """The figures of `metrics.jsonl`."""
    rows = [(f"`{key}`", each.label, each.unit, each.meaning) for key, each in FIGURES.items()]
    return "# Figures\n\n" + table(("metric", "name", "unit", "meaning"), rows)


def event_list() -> str:
    """The events of the journal, with what each has."""
    rows = [
        (
            f"`{event.__name__}`",
            ", ".join(f"`{name}`" for name in event.__struct_fields__),
            " ".join((inspect.getdoc(event) or "").partition("\n\n")[0].split()),
        )
        for event in get_args(events.Event)
    ]
    return "# Events of the journal\n\n" + table(("event", "what it has", "meaning"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in [head, *rows])
    first, *others = (f"| {line} |" for line in lines)
    return "\n".join([first, "|---" * len(head) + "|", *others]) + "\n"


# ---------------------------------------------------------------------------------------------- API


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
