"""The process of `stretto check` that makes the components which the kernel does not make (see
`protocol`)."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from stretto.assembly.compose import compose_mapping
from stretto.component import Context, Problem
from stretto.errors import ContractError, StrettoError
from stretto.user_code.protocol import Pipes, Started, try_to_ask

_COMMAND = (sys.executable, "-m", __name__)


def try_to_make(
    document: Mapping[str, Any], paths: Sequence[str], context: Context, timeout_s: float
) -> list[Problem]:
    """Make the components of some sections in one child process, and return what is wrong with them. Raise
    TimeoutError if the child does not end within `timeout_s`."""
    started, _ = try_to_ask(_COMMAND, msgspec.msgpack.encode((document, paths, context)), (), timeout_s)
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
        except StrettoError as error:  # an engine may need something that only its worker's machine has
            engine = path == "inference" or path.startswith(("training", "groups."))
            yield Problem(path, str(error), "environment" if engine else "error")


def _main() -> None:
    pipes = Pipes()
    setup = pipes.receive() or b""
    document, paths, context = msgspec.msgpack.decode(setup, type=tuple[dict[str, Any], list[str], Context])
    pipes.send(Started(data=msgspec.msgpack.encode(list(_problems(document, paths, context)))))
    os._exit(0)  # do not wait for threads that an engine has started


if __name__ == "__main__":
    _main()
