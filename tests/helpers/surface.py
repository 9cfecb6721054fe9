"""What users can type, as text: options of commands, keys of run files, and the commands in the docs.

`python tests/helpers/surface.py > tests/contracts/surface.txt` writes the list that the tests compare with.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from stretto.assembly.plugins import Plugins
from stretto.cli.main import app
from stretto.cli.make.schema import json_schema

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def surface() -> str:
    lines = {*_options(typer.main.get_command(app), "stretto"), *_keys(), *_documented()}
    return "\n".join(sorted(lines)) + "\n"


def _options(command: Any, path: str) -> Iterator[str]:
    yield path
    for parameter in command.params:
        is_option = parameter.param_type_name == "option"
        yield f"{path} {', '.join(sorted(parameter.opts)) if is_option else parameter.name}"
    if isinstance(command, TyperGroup):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from _options(command.get_command(context, name), f"{path} {name}")


def _keys() -> Iterator[str]:
    schema = json_schema(Plugins())
    for name, table in schema["$defs"].items():
        yield from (f"key {name}.{key}" for key in table.get("properties", {}))


def _documented() -> Iterator[str]:
    """Each command of stretto in README and docs, without what it is given."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in _BLOCK.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = _words(line)
                if words[:1] == ["stretto"]:
                    options = [word.partition("=")[0] for word in words[2:] if re.match(r"--?[a-z]", word)]
                    yield " ".join(["docs: stretto", *words[1:2], *options])


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quoted text of several lines
        return line.split()


if __name__ == "__main__":
    print(surface(), end="")
