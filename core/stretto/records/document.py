"""Read a run's values from `config.yaml` in its folder. Another user may have written the file."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import yaml

from stretto.errors import ConfigError
from stretto.records.files import read_record

_MOST_VALUES = 100_000
_DEEPEST = 100
"""Limits of a document. Kernels write a few hundred values, nested less than ten deep."""
# PyYAML has the fast loader only if it was built with libyaml.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_document(file: Path) -> dict[str, Any]:
    """Return the values in a YAML file, or raise ConfigError. Values of the environment stay references."""
    try:
        text = read_record(file)
        if fault := _fault(yaml.parse(text, Loader=_Loader)):
            raise ConfigError(f"{file} is not a run file: {fault}")
        document = yaml.load(text, Loader=_Loader)  # noqa: S506 (a safe loader)
    # The loader raises ValueError for a number with too many digits.
    except (yaml.YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a run file: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{file} is not a run file: it holds no keys")
    return cast("dict[str, Any]", document)


def _fault(events: Iterable[yaml.Event]) -> str:
    """Return why a document is refused; empty if it is not. Ten lines of aliases can stand for 10⁹ values."""
    known: dict[str, tuple[int, int]] = {}
    """Anchor -> number of its values, and their depth."""
    open_nodes: list[tuple[str | None, int, int]] = [(None, 0, 0)]  # (anchor, values, depth)
    for event in events:
        match event:
            case yaml.CollectionStartEvent():
                open_nodes.append((event.anchor, 1, 1))
                continue
            case yaml.CollectionEndEvent():
                anchor, values, depth = open_nodes.pop()
            case yaml.ScalarEvent():
                anchor, values, depth = event.anchor, 1, 0
            case yaml.AliasEvent():
                if event.anchor not in known:
                    return f"*{event.anchor} is inside of what it repeats, or repeats nothing"
                anchor, (values, depth) = None, known[event.anchor]
            case _:
                continue
        if anchor is not None:
            known[anchor] = values, depth
        outer, sum_of_values, deepest = open_nodes.pop()
        values, depth = sum_of_values + values, max(deepest, depth + 1)
        if values > _MOST_VALUES or depth > _DEEPEST:
            return f"more than {_MOST_VALUES} values, or nested more than {_DEEPEST} deep"
        open_nodes.append((outer, values, depth))
    return ""
