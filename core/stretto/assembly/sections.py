"""The sections of a run that choose a component, and where their keys were written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.component import Kind
from stretto.errors import ConfigError

__all__ = [
    "GROUP_NAME",
    "LIST_SECTIONS",
    "NAMED_SECTIONS",
    "SECTIONS",
    "VARIANT_NAME",
    "VARIANT_SECTIONS",
    "KeySource",
    "kind_of",
    "names_component",
]

# Sections that choose a component: dotted key -> kind.
SECTIONS: dict[str, Kind] = {
    "algorithm": "algorithm",
    "training": "training",
    "inference": "inference",
    "workflow": "workflow",
    "reward": "reward",
    "dataset": "dataset",
    "launcher": "launcher",
    "weights": "weights",
    "evaluation.dataset": "dataset",
}
LIST_SECTIONS: dict[str, Kind] = {"trackers": "tracker"}
# Sections with any number of named components.
NAMED_SECTIONS: dict[str, Kind] = {"groups": "training"}
GROUP_NAME = r"[a-z][a-z0-9_]*"
# Sections of a variant that choose a component, below `variants.NAME`.
VARIANT_SECTIONS: dict[str, Kind] = {"workflow": "workflow", "reward": "reward"}
VARIANT_NAME = r"[a-z][a-z0-9_]{0,31}"

_NAMED_KEY = re.compile(rf"groups\.{GROUP_NAME}|variants\.{VARIANT_NAME}\.({'|'.join(VARIANT_SECTIONS)})")


_PARTS = ".parts."
"""Between the key of a section and the name of one of its parts (see `stretto.component.ComponentParts`)."""


def names_component(path: str) -> bool:
    """Whether the section at a dotted key chooses a component."""
    owner, part, name = path.rpartition(_PARTS)
    if part:
        return names_component(owner) and re.fullmatch(GROUP_NAME, name) is not None
    return path in SECTIONS or _NAMED_KEY.fullmatch(path) is not None


def kind_of(path: str) -> Kind:
    """Return the kind of the component that the section at a dotted key chooses."""
    path = path.partition(_PARTS)[0]
    if path.startswith("variants."):
        return VARIANT_SECTIONS[path.rpartition(".")[2]]
    return SECTIONS.get(path) or (LIST_SECTIONS | NAMED_SECTIONS)[path.partition(".")[0]]


class KeySource:
    """Where a run's keys were written, for messages. Runs that were composed before, such as the one that a
    worker gets from the kernel, have this class."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.raw: Mapping[str, Any] = {}
        """The run file with the overrides merged in, before interpolations are resolved."""

    def is_overridden(self, path: str) -> bool:
        """Whether an override set this key, or a section around it."""
        del path
        return False

    def place(self, path: str) -> str:
        """Return where a key was written: `run.yaml:14: training.lr`, or `override training.lr`."""
        return f"{self.file}: {path}"

    def component_in_file(self, path: str) -> str:
        """Return the component that the file chooses for a section, without the overrides; empty if none."""
        del path
        return ""

    def error(self, path: str, message: str, value: Any = None) -> ConfigError:
        """Return the error that something is wrong with a key."""
        return ConfigError(f"{self.place(path)}: {message}", path=path, value=value)
