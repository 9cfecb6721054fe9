"""Where a run comes from: `origin.json`. The run's first kernel writes it, and only views read it."""

import json
import platform
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from stretto.errors import ConfigError
from stretto.machine.gpus import listed_gpus
from stretto.machine.private_file import write_private
from stretto.records.files import read_record

_FILE = "origin.json"
_PACKAGES = ("stretto", "torch", "transformers", "safetensors", "numpy", "nats-py", "peft", "sglang", "vllm")
_INHERITING = ("evaluation.sampling", "variants")
"""Sections whose keys default to the values of other sections."""
_GIT_S = 2.0
"""Seconds to wait for git, whose folder may be on a slow disk."""


class RunOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was started with."""

    written: list[str]
    """Dotted keys set in the run file or on the command line."""
    defaults: dict[str, str] = {}
    """Dotted key -> default as JSON."""
    host: str = ""
    python: str = ""
    packages: dict[str, str] = {}
    """Versions of the packages that matter most."""
    gpus: list[str] = []
    commit: str = ""
    """Commit of the working directory, with `+` if files differed; empty outside of git."""


def write_origin(folder: Path, config: msgspec.Struct, written: Iterable[str]) -> None:
    """Write where a run comes from: this process, default values, and the dotted keys that a user set."""
    origin = RunOrigin(
        written=list(written),
        defaults=dict(_defaults(config)),
        host=socket.gethostname(),
        python=platform.python_version(),
        packages=_versions(),
        gpus=[gpu.model for gpu in listed_gpus() if gpu.model],
        commit=_commit(),
    )
    _write(folder, origin)


def _defaults(config: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, str]]:
    for field in msgspec.structs.fields(config):
        path, value = f"{prefix}{field.encode_name}", getattr(config, field.name)
        if path in _INHERITING:
            continue
        if isinstance(value, msgspec.Struct):
            yield from _defaults(value, f"{path}.")
        elif not field.required:
            has_factory = field.default_factory is not msgspec.NODEFAULT
            default = field.default_factory() if has_factory else field.default
            yield path, json.dumps(msgspec.to_builtins(default), default=str)


def add_written(folder: Path, keys: Iterable[str]) -> None:
    """Add the dotted keys that a user has set for a resumed run."""
    if (origin := read_origin(folder)) is not None:
        all_keys = dict.fromkeys((*origin.written, *keys))
        _write(folder, msgspec.structs.replace(origin, written=list(all_keys)))


def read_origin(folder: Path) -> RunOrigin | None:
    """Return where a run comes from; None if an older stretto started it."""
    file = folder / _FILE
    try:
        return msgspec.json.decode(read_record(file), type=RunOrigin)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} does not say where a run comes from: {error}") from error


def _write(folder: Path, origin: RunOrigin) -> None:
    write_private(folder / _FILE, msgspec.json.format(msgspec.json.encode(origin)) + b"\n")


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _commit() -> str:
    # One process finds the commit and the `+`. Without `false`, a repository's fsmonitor may name a program.
    git = ("git", "-c", "core.fsmonitor=false")
    command = (*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()
