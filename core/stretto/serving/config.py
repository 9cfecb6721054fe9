"""The sections of inference engines that are servers of their own: programs that an inference worker starts
with their own interpreter, or finds running, and speaks HTTP with.

What such an engine does is in `stretto.serving.engine`, how it holds its server in `stretto.serving.server`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from stretto.component import LocalPath, NonNegativeInt, PositiveFloat, PositiveInt, Problem
from stretto.engine import InferenceConfig
from stretto.models.files import text_config

if TYPE_CHECKING:
    from stretto.config import RunConfig

__all__ = ["Flag", "SidecarConfig", "check_sidecar", "context_of_model", "flags"]

Flag = bool | int | float | str | tuple[str, ...]

_MOST_CONTEXT = 4096
_TRY_S = 30.0


class SidecarConfig(InferenceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of engines that are servers. `deterministic` is refused: they do not offer it."""

    python: LocalPath | None = None
    """Interpreter of the environment that the server is installed in, `path/to/venv/bin/python`: its packages
    never meet the trainer's. Each worker starts a server of its own with it."""
    urls: tuple[
        Annotated[
            str, msgspec.Meta(pattern=r"^https?://[^/]+$", description="`http://host:port` without a path")
        ],
        ...,
    ] = ()
    """Instead: servers that run already, `http://host:port`, one a replica; worker `inference-i` takes the
    i-th. No other program may swap their weights."""
    api_key: str | None = None
    """With `urls`: the key that they ask for; say `${oc.env:NAME}`, and the key itself is written nowhere."""
    tensor_parallel: PositiveInt = 1
    """GPUs (without any, processes) that each server splits the model over."""
    slots: PositiveInt = 64
    """Samples that a server decodes at once; the others wait in the worker."""
    context_length: PositiveInt | None = None
    """Tokens that a sample can have, prompt and answer together. None takes what the model was made for, at
    most 4096."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights and cache. In float32 the logprobs agree with a float32 trainer's to about 1e-5."""
    args: dict[str, Flag] = {}  # noqa: RUF012 - a Struct copies it
    """Flags for the server's own command line, by name: `{block-size: 32, enable-metrics: true}`. `true` is a
    flag without a value, `false` leaves out one that the worker would give, a list repeats it."""
    env: dict[str, str] = {}  # noqa: RUF012
    """Environment variables for the server."""
    start_timeout_s: PositiveFloat = 600.0
    """How long a server may take until it answers, at the start and when it is started again."""
    silence_s: PositiveFloat = 120.0
    """A server that has samples to decode and sends nothing for so long is ended and started again."""
    restarts: NonNegativeInt = 3
    """How often within ten minutes a server that ended is started again before the worker gives up."""


def check_sidecar(
    config: SidecarConfig, run: RunConfig, module: str, reserved: Mapping[str, str]
) -> Iterator[Problem]:
    """What is wrong with a section, found without starting a server.

    Args:
        module: what the interpreter must be able to import.
        reserved: flags that the worker gives itself, each with the key to set instead; "" where there is
            none.
    """
    if config.deterministic:
        yield Problem(
            "inference.deterministic",
            f"engine {config.use!r} cannot give the same answers bit for bit; leave it out, or use: torch",
        )
    if config.slots == 1 and run.steps:
        yield Problem("inference.slots", "is 1: answers are sampled one after another", "warning")
    longest = run.sampling.max_tokens
    if config.context_length is not None and longest >= config.context_length:
        yield Problem(
            "inference.context_length",
            f"is {config.context_length}; a prompt and sampling.max_tokens ({longest}) need more",
        )
    if config.gpus and config.tensor_parallel > config.gpus:
        yield Problem(
            "inference.tensor_parallel",
            f"is {config.tensor_parallel}, and a worker has {config.gpus} GPU(s); set inference.gpus",
        )
    if config.urls:
        yield from _check_attached(config)
    elif config.api_key is not None:
        yield Problem("inference.api_key", "is for servers given by urls; a server started here gets its own")
    if config.python is not None:
        yield from _check_interpreter(config.python, module)
    elif not config.urls:
        yield Problem(
            "inference.python",
            f"is missing: expected the interpreter of the environment in which {module} is installed"
            f" (path/to/venv/bin/python), or inference.urls with servers that run already",
        )
    yield from _check_args(config, reserved)


def _check_attached(config: SidecarConfig) -> Iterator[Problem]:
    if config.python is not None:
        yield Problem("inference.urls", "does not go with inference.python: attach to servers or start them")
    if len(config.urls) < config.replicas:
        yield Problem(
            "inference.urls",
            f"names {len(config.urls)} server(s) for {config.replicas} replicas; expected one for each",
        )
    for key in ("args", "env"):
        if getattr(config, key):
            yield Problem(f"inference.{key}", "is for a server started here; those of urls run already")


def _check_interpreter(python: str, module: str) -> Iterator[Problem]:
    if not Path(python).is_file() or not os.access(python, os.X_OK):
        kind = "a folder" if Path(python).is_dir() else "no program that may be run"
        yield Problem("inference.python", f"{python!r} is {kind}; expected path/to/venv/bin/python")
        return
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        tried = subprocess.run([python, "-I", "-c", probe], capture_output=True, timeout=_TRY_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Problem("inference.python", f"{python!r} does not run: {error}", "environment")
        return
    if tried.returncode == 1 and not tried.stderr:
        yield Problem(
            "inference.python", f"{python!r} has no module {module!r}; install it there", "environment"
        )
    elif tried.returncode:
        said = tried.stderr.decode(errors="replace").strip().splitlines()[-1:]
        yield Problem(
            "inference.python", f"{python!r} is no Python interpreter: {' '.join(said)}", "environment"
        )


def _check_args(config: SidecarConfig, reserved: Mapping[str, str]) -> Iterator[Problem]:
    for name in config.args:
        flag = _flag(name)
        if flag in reserved:
            instead = f"; set {reserved[flag]} instead" if reserved[flag] else ""
            yield Problem(f"inference.args.{name}", f"{flag} is given by the worker itself{instead}")


def flags(own: Mapping[str, Flag], given: Mapping[str, Flag]) -> list[str]:
    """Command line of a server's own flags and those of `inference.args`, which win."""
    line: list[str] = []
    for flag, value in (dict(own) | {_flag(name): value for name, value in given.items()}).items():
        values = value if isinstance(value, tuple) else (value,)
        for each in values:
            if each is True:
                line.append(flag)
            elif each is not False:
                line += [flag, str(each)]
    return line


def _flag(name: str) -> str:
    """`block_size`, `block-size` and `--block-size` are one flag."""
    return "--" + name.lstrip("-").replace("_", "-")


def context_of_model(config: SidecarConfig, model: str | None) -> int:
    """Tokens that a sample can have: `context_length`, or what the model was made for, at most 4096."""
    made_for = text_config(model).get("max_position_embeddings", _MOST_CONTEXT)
    return config.context_length or min(int(made_for), _MOST_CONTEXT)
