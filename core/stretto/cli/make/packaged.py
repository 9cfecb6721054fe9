"""The examples that are part of the package: `stretto quickstart` and `stretto new` copy them."""

from importlib.resources import files
from pathlib import Path

from stretto.errors import ConfigError

EXAMPLES = "examples"
"""Folder of a checkout with those folders that a wheel has in the package `stretto`."""


def packaged_folder(name: str) -> Path:
    """Return the folder `name` of a wheel's package, or of the checkout's examples."""
    package = Path(str(files("stretto")))
    for folder in (package / name, package.parents[1] / EXAMPLES / name):
        if folder.is_dir():
            return folder
    raise ConfigError(f"the files of {name!r} are missing from this installation (looked below {package})")
