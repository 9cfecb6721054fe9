"""The version of the API that plugins and programs are written for.

The API is every name that plugins may use: `__all__` of the public modules, and the hooks.
`tests/contracts/public_api.txt` lists it with all signatures, so that a review sees each change.

`API_VERSION` is `MAJOR.MINOR`. A release that adds names raises MINOR. A release that removes or renames a
name, or changes it so that code written for it no longer works, raises MAJOR. A name is deprecated in at
least one release before it is removed, and its warning names the replacement.
"""

from __future__ import annotations

import re

__all__ = ["API_VERSION", "mismatch"]

API_VERSION = "1.0"
"""Version of the API of this stretto."""

_VERSION = re.compile(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})")


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
