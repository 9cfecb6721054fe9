"""Write the tables of docs/run-file.md from the config structs: `python docs/fill.py`.

Each table stands between `<!-- fields: NAME -->` and `<!-- end -->`. NAME is a struct of `stretto.config`, or
`kind name` of a component. A test fails if filling would change the page.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from stretto import config, engine
from stretto.assembly.plugins import KINDS, Plugins
from stretto.cli.schema import fields_of
from stretto.training import config as training

PAGE = Path(__file__).with_name("run-file.md")
PART = re.compile(r"(<!-- fields: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with every generated part as it should be."""
    return PART.sub(lambda match: match[1] + table(struct_of(match[2])) + match[3], page)


def struct_of(name: str) -> type[msgspec.Struct]:
    """The struct that a part is about."""
    kind, _, component = name.partition(" ")
    for known in KINDS:
        if kind == known:
            return Plugins().get(known, component).config
    return next(getattr(home, name) for home in (config, engine, training) if hasattr(home, name))


def table(struct: type[msgspec.Struct]) -> str:
    """The fields of a struct as a Markdown table."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in fields_of(struct):
        if struct is config.RunConfig and "." in field.name:
            continue  # each section has a part of its own
        cells = (f"`{field.name}`", field.type, f"`{field.default}`", field.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
