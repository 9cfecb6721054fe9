"""Check that the user trusts a run's folder: a continued run imports the code that its config names."""

import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from stretto.assembly.run_file import RunFile, read
from stretto.errors import ConfigError


def require_trust(folder: Path, *, trusted: bool) -> None:
    """Refuse to continue with a run's folder that belongs to another user, unless the user trusts it."""
    configs = sorted(folder.glob("config*.yaml"))
    owners = _strangers(folder, *configs)
    if trusted or not owners:
        return
    files = sorted({file for config in configs for file in _plugin_files(config)})
    raise ConfigError(
        f"{folder} belongs to {owners}. To continue is to run, with your "
        "rights, the programs that its config.yaml names, and to import these plugin files: "
        f"{', '.join(files) or 'none'}. Read them first, then add --trust-plugins"
    )


def _strangers(*paths: Path) -> str:
    """Return the other users who own any of the paths, as text; empty if there are none."""
    owners = {path.stat().st_uid for path in paths if path.exists()} - {os.geteuid()}
    return " and ".join(map(_user, sorted(owners)))


def _plugin_files(config: Path) -> Iterator[str]:
    """Yield the Python files that a config names: its plugins, and functions such as `reward.py:score`."""
    source = RunFile(config, ())
    plain, _ = read(source)
    for text in _texts(plain):
        if file := re.fullmatch(r"(.+\.py)(:\w+)?", text, re.DOTALL):
            yield source.redact(file[1])


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        node = list(cast("dict[str, Any]", node).values())
    if isinstance(node, list):
        for value in cast("list[Any]", node):
            yield from _texts(value)
    elif isinstance(node, str):
        yield node


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name!r}"
    except KeyError:  # a user of another machine
        return f"the user with id {uid}"
