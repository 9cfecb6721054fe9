"""A process that makes the components that the kernel does not: `check` starts one.

It is told the run on its standard input and says what is wrong; what plugins print goes to stderr (see
`pipes`). Rewards are tried where they run (see `scoring`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from stretto.assembly.compose import compose_mapping
from stretto.children.protocol import Pipes, Started, try_to_start
from stretto.component import Context, Problem
from stretto.errors import ContractError, StrettoError

__all__ = ["try_to_make"]

_COMMAND = (sys.executable, "-m", __name__)


def try_to_make(
    document: Mapping[str, Any], paths: Sequence[str], context: Context, timeout_s: float
) -> list[Problem]:
    """What is wrong with the components of some sections, found by making each in a process of its own.

    Raises:
        TimeoutError: if that is not known in time.
    """
    started = try_to_start(_COMMAND, msgspec.msgpack.encode((document, paths, context)), timeout_s)
    if started.error:
        return [Problem(path, f"not verified: {started.error}", "warning") for path in paths]
    return msgspec.msgpack.decode(started.data, type=list[Problem])


def _problems(document: Mapping[str, Any], paths: Sequence[str], context: Context) -> Iterator[Problem]:
    composed = compose_mapping(document)
    for path in paths:
        try:
            composed.make(path, context)
        except ContractError as error:
            yield Problem(path, str(error))
        except StrettoError as error:  # an engine may miss here what its machine has
            engine = path == "inference" or path.startswith(("training", "groups."))
            yield Problem(path, str(error), "environment" if engine else "error")


def _main() -> None:
    pipes = Pipes()
    told = pipes.receive() or b""
    document, paths, context = msgspec.msgpack.decode(told, type=tuple[dict[str, Any], list[str], Context])
    pipes.send(Started(data=msgspec.msgpack.encode(list(_problems(document, paths, context)))))
    os._exit(0)  # whatever threads an engine has begun


if __name__ == "__main__":
    _main()
