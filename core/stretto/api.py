"""The version of the API that plugins and programs are written for, and the deprecation of names.

The API is every name that plugins may use: `__all__` of the public modules, and the hooks.
`tests/contracts/public_api.txt` lists it with all signatures, so that a review sees each change.

`API_VERSION` is `MAJOR.MINOR`. A release that adds names raises MINOR. A release that removes or renames a
name, or changes it so that code written for it no longer works, raises MAJOR. A name is deprecated in at
least one release before it is removed, and its warning names the replacement.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from typing_extensions import deprecated

if TYPE_CHECKING:
    from typing import LiteralString

__all__ = ["API_VERSION", "mismatch", "replaced_by"]

API_VERSION = "1.0"
"""Version of the API of this stretto."""

_VERSION = re.compile(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})")
_T = TypeVar("_T", bound="type[Any] | Callable[..., Any]")


def replaced_by(replacement: str, *, since: str) -> Callable[[_T], _T]:
    """Deprecate a function or a class: a call gives a DeprecationWarning for the caller's line.

        @replaced_by("stretto.reward.score_of", since="1.3")
        def old_name(): ...

    Args:
        replacement: full name of the function or class to use instead.
        since: API version in which the name was deprecated.
    """

    def mark(thing: _T) -> _T:
        text = f"{thing.__module__}.{thing.__qualname__} is deprecated since API {since}; use {replacement}"
        return deprecated(cast("LiteralString", text))(thing)

    return mark


def mismatch(made_for: str) -> str:
    """Return why a plugin that was made for another version of the API may not work here; else empty.
    Raise ValueError if the text is no API version."""
    wanted, current = _parts(made_for), _parts(API_VERSION)
    if wanted[0] < current[0]:
        return (
            f"was made for API {made_for}, and this stretto has {API_VERSION}: names may be gone; look for a "
            "newer version of the plugin"
        )
    if wanted > current:
        return (
            f"was made for API {made_for}, and this stretto has {API_VERSION}: names may be missing; "
            "pip install -U stretto"
        )
    return ""


def _parts(version: str) -> tuple[int, int]:
    match = _VERSION.fullmatch(version)
    if match is None:
        raise ValueError(f"{version!r} is no API version; expected MAJOR.MINOR, such as {API_VERSION!r}")
    return int(match[1]), int(match[2])
