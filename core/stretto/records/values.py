"""The values of a run file by their dotted keys, to show and compare them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast


def dotted_values(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys, such as `training.lr`, and their values as JSON. A list is one value."""
    for key, value in document.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from dotted_values(cast("Mapping[str, Any]", value), path)
        else:
            yield path, json.dumps(value, default=str)


def values_over_time(documents: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Return dotted key -> its value as JSON, with its later values: `0.0003, from step 17 on 0.0001`.
    `documents` are values in order, each with the time from which on they hold, in words."""
    newest = dict(dotted_values(documents[0][1]))
    texts = dict(newest)
    for since, document in documents[1:]:
        former, newest = newest, dict(dotted_values(document))
        for key in former | newest:
            before, value = former.get(key, "null"), newest.get(key, "null")
            if before != value:
                texts[key] = f"{texts.get(key, before)}, {since} {value}"
    return texts
