"""The commands of docs/cluster.md: `from cluster_page import Section`."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).parent.parent.parent / "docs" / "cluster.md"
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>run by|not run): .+? -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Section:
    """What the page says below a heading: the first keys for a run file, and the commands that tests run."""

    def __init__(self, heading: str) -> None:
        [text] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        blocks = list(_BLOCK.finditer(text))
        [first, *_] = [block["text"] for block in blocks if block["language"] == "yaml"]
        self.keys: dict[str, Any] = yaml.safe_load(first)
        self.commands = [
            shlex.join(words)
            for block in blocks
            if block["language"] == "bash" and block["mark"] == "run by"
            for line in block["text"].splitlines()
            if (words := shlex.split(line, comments=True))
        ]

    def write_run_file(self, base: Path, file: Path, changes: Mapping[str, Any]) -> None:
        """Add the keys to a run file, as a reader of the page does, with the values of this machine by dotted
        key; None removes one."""
        document = yaml.safe_load(base.read_text()) | self.keys
        for path, value in changes.items():
            *above, last = path.split(".")
            section = document
            for key in above:
                section = section[key]
            section[last] = value
            if value is None:
                del section[last]
        file.write_text(yaml.safe_dump(document, sort_keys=False))


def filled(command: str, values: Mapping[str, object]) -> list[str]:
    """Return a command as words, with what stands on the page for a reader's own values replaced."""
    for name, value in values.items():
        command = command.replace(name, str(value))
    return shlex.split(command)
