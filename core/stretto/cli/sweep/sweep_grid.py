"""The grid of a sweep: which runs its values make, and their names. No I/O.

A value list is written `key=a,b`. A comma inside brackets, braces or quotes belongs to a value, so that every
value can be any YAML: `sampling.stop=[a, b],[c]`, `'sampling={temperature: 1},{temperature: 0.8}'`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from stretto.errors import ConfigError

_CLOSING = {"[": "]", "{": "}"}
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""")
_BEFORE_QUOTE = ("", *"[{,:")
"""YAML reads a quote as such only at the beginning of a value. `it's` has none."""
_MOST_CHARACTERS = 40
"""Maximum length of a value in a folder's name."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep."""

    name: str
    """Name of its folder, made of the values that differ between the runs: `lr-1e-4_seed-1`."""
    combination: str
    """The same without the seed; empty if only seeds differ."""
    values: Mapping[str, str]
    """Key -> value, of the keys with several values, without the seed."""
    seed: str | None
    """The seed, if the sweep sets it."""
    overrides: tuple[str, ...]
    """All `key=value` of the run."""


def grid(items: Sequence[str], seeds: str | None) -> list[PlannedRun]:
    """Return a run for every combination of values, and for every seed of it.

    Args:
        items: `key=a,b`. A key with a single value has that value in every run.
        seeds: the seeds, `1,2,3`; None if `items` has them, or if there are none.

    Raises:
        ConfigError: if an item cannot be read, a key or a value is there twice, or all runs are the same run.
    """
    lists: dict[str, list[str]] = {}
    for key, values in map(split_values, [*items, *([] if seeds is None else [f"seed={seeds}"])]):
        if key in lists:
            raise ConfigError(f"{key!r} is there twice; list all its values once: {key}=a,b")
        if key == "out":
            raise ConfigError(f"the sweep names the folder of each run; write --out {values[0]}")
        lists[key] = values
    swept = [key for key, values in lists.items() if len(values) > 1 and key != "seed"]
    if not swept and len(lists.get("seed", ())) < 2:
        raise ConfigError(
            "no key has several values, so there is only one run; list values with commas, such as "
            "training.lr=1e-4,3e-4, or seeds: --seeds 1,2,3"
        )
    short = _short_keys(swept)
    runs: list[PlannedRun] = []
    for chosen in product(*lists.values()):
        choice = dict(zip(lists, chosen, strict=True))
        combination = "_".join(f"{short[key]}-{_in_name(choice[key])}" for key in swept)
        seed = choice.get("seed")
        parts = [combination, f"seed-{_in_name(seed)}" if seed is not None else ""]
        runs.append(
            PlannedRun(
                "_".join(part for part in parts if part),
                combination,
                {key: choice[key] for key in swept},
                seed,
                tuple(f"{key}={value}" for key, value in choice.items()),
            )
        )
    return runs


def split_values(item: str) -> tuple[str, list[str]]:
    """Return the key and the values of `key=a,b`.

    Raises:
        ConfigError: if there is no key, if a value is empty or there twice, or if a bracket or a quote is not
            closed.
    """
    key, equals, text = item.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.-]*", key):
        raise ConfigError(f"{item!r} is not of the form dotted.key=value,value", value=item)
    values = [""]
    closing: list[str] = []
    place = 0
    while place < len(text):
        character = text[place]
        part = character
        if character in "\"'" and values[-1].rstrip()[-1:] in _BEFORE_QUOTE:
            quoted = _QUOTED.match(text, place)
            if quoted is None:
                raise ConfigError(f"{item!r}: expected {character} before its end", value=item)
            part = quoted[0]
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character == "," and not closing:
            values.append("")
            part = ""
        values[-1] += part
        place += len(part) or 1
    if closing:
        raise ConfigError(f"{item!r}: expected {closing[-1]} before its end", value=item)
    values = [value.strip() for value in values]
    if "" in values and len(values) > 1:
        raise ConfigError(f"{item!r}: there is an empty value; write null for none", value=item)
    if twice := next((value for value in values if values.count(value) > 1), None):
        raise ConfigError(f"{item!r}: the value {twice} is there twice", value=item)
    return key, values


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the last parts of each key, as many as distinguish it from the others."""
    short: dict[str, str] = {}
    for key in keys:
        parts = key.split(".")
        endings = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        short[key] = next(
            ending
            for ending in endings
            if ending == key or not any(other != key and f".{other}".endswith(f".{ending}") for other in keys)
        )
    return short


def _in_name(value: str) -> str:
    """Return a value as a part of a folder's name. A value that is long or has other characters than letters,
    digits, `.`, `+` and `-` gets a hash, so that two values never have the same name."""
    plain = re.sub(r"[^A-Za-z0-9.+-]+", "-", value).strip("-.")
    if plain == value and len(value) <= _MOST_CHARACTERS:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:6]
    return f"{plain[:_MOST_CHARACTERS]}-{digest}".lstrip("-")
