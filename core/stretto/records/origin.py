"""Where a run comes from: `origin.json`, which its first kernel writes, for views alone."""

from __future__ import annotations

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
from stretto.machine.private_file import write_private
from stretto.records.files import read_record

_FILE = "origin.json"
_PACKAGES = ("stretto", "torch", "transformers", "safetensors", "numpy", "nats-py", "peft", "sglang", "vllm")
_INHERITING = ("evaluation.sampling", "variants")
"""Sections whose keys have the values of other sections in place of defaults."""
_GIT_S = 2.0
"""git's folder may be on a slow disk."""
_GPUS = Path("/proc/driver/nvidia/gpus")
"""NVIDIA's driver has a folder for each GPU here."""


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
    """Write where a run comes from: this process, its values, and the dotted keys that its user has set."""
    origin = RunOrigin(
        written=list(written),
        defaults=dict(_defaults(config)),
        host=socket.gethostname(),
        python=platform.python_version(),
        packages=_versions(),
        gpus=_gpu_models(),
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
            is_made = field.default_factory is not msgspec.NODEFAULT
            default = field.default_factory() if is_made else field.default
            yield path, json.dumps(msgspec.to_builtins(default), default=str)


def add_written(folder: Path, keys: Iterable[str]) -> None:
    """Add keys that somebody has set for a resumed run."""
    if (origin := read_origin(folder)) is not None:
        both = dict.fromkeys((*origin.written, *keys))
        _write(folder, msgspec.structs.replace(origin, written=list(both)))


def read_origin(folder: Path) -> RunOrigin | None:
    """Return where a run comes from; None if its kernel was older."""
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
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _gpu_models() -> list[str]:
    found: list[str] = []
    for file in sorted(_GPUS.glob("*/information")):
        with suppress(OSError):
            facts = (line.partition(":") for line in file.read_text(errors="replace").splitlines())
            found += [value.strip() for name, _, value in facts if name == "Model"]
    return found


def _commit() -> str:
    # One process for both. A repository may name a program in fsmonitor.
    git = ("git", "-c", "core.fsmonitor=false")
    command = (*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
