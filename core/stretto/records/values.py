"""The values of a run file by their dotted keys, to show and compare them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast


def dotted_values(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys, such as `training.lr`, and their values as JSON. A list is one value."""
    for key, value in document.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from dotted_values(cast("Mapping[str, Any]", value), path)
        else:
            yield path, json.dumps(value, default=str)
