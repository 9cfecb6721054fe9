"""Write the tables of docs/run-file.md from the config structs: `python docs/fill.py`.

Each table stands between `<!-- fields: NAME -->` and `<!-- end -->`. NAME is a struct of the modules below,
or `kind name` of a component. A table leaves out the rows that are the same in the table of a base class, and
links to that table: a key that sections share is listed once. A test fails if filling would change the page.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from stretto import config, dataset, engine, launcher, reward, tracker, workflow
from stretto.assembly.plugins import KINDS, Plugins
from stretto.cli.make.schema import Field, fields_of
from stretto.models import prompts
from stretto.rl import policy_gradient, supervised
from stretto.serving import config as serving
from stretto.training import config as training

PAGE = Path(__file__).with_name("run-file.md")
PART = re.compile(r"(<!-- fields: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
CONTRACTS = (config, dataset, engine, launcher, reward, tracker, workflow)
TOOLKITS = (prompts, policy_gradient, supervised, serving, training)


def filled(page: str) -> str:
    """The page with every generated part as it should be."""
    shared = {struct_of(name): heading for name, heading in headings(page).items() if " " not in name}
    return PART.sub(lambda match: match[1] + part(struct_of(match[2]), shared) + match[3], page)


def headings(page: str) -> dict[str, str]:
    """The heading above each part, by the name of the part."""
    heading, found = "", {}
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif match := re.match(r"<!-- fields: (.+?) -->", line):
            found[match[1]] = heading
    return found


def struct_of(name: str) -> type[msgspec.Struct]:
    """The struct that a part is about."""
    kind, _, component = name.partition(" ")
    for known in KINDS:
        if kind == known:
            return Plugins().get(known, component).config
    return next(getattr(home, name) for home in (*CONTRACTS, *TOOLKITS) if hasattr(home, name))


def part(struct: type[msgspec.Struct], shared: dict[type[msgspec.Struct], str]) -> str:
    """Links to the tables of the base classes, and the fields that are not the same there."""
    bases = [base for base in struct.__mro__[1:] if base in shared]
    same = {field for base in bases for field in fields_of(base)}
    fields = [field for field in fields_of(struct) if field not in same]
    if struct is config.RunConfig:
        fields = [field for field in fields if "." not in field.name]  # each section has a part of its own
    links = ", ".join(f"[{shared[base]}](#{anchor(shared[base])})" for base in reversed(bases))
    also = f"Keys of {links}" + (", and these:\n\n" if fields else ".\n") if links else ""
    return also + (table(fields) if fields else "")


def anchor(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def table(fields: list[Field]) -> str:
    """Fields as a Markdown table."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        cells = (f"`{field.name}`", field.type, f"`{field.default}`", field.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
