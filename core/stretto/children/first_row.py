"""A process that reads the first row of a dataset as a vision-language run will. `stretto check` starts it.

It tries the model's processor, which the kernel does not load, on the row's images. It reads the run from its
standard input and writes the fault to its standard output; output of plugins goes to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import msgspec

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose_mapping
from stretto.component import Context
from stretto.errors import ConfigError
from stretto.models.vision import Vision, keep_torch_out
from stretto.user_code.child_process import last_line, run_child

__all__ = ["fault_of_first_row"]


def fault_of_first_row(document: Mapping[str, Any], path: str, context: Context, timeout_s: float) -> str:
    """Read the first row in a child process. Return why the run's model cannot read it; empty if it can.

    Args:
        document: the composed run.
        path: dotted key of the dataset's section in the run.

    Raises:
        TimeoutError: if the child does not end within `timeout_s`.
    """
    setup = msgspec.msgpack.encode((document, path, context))
    done = run_child([sys.executable, "-m", __name__], setup, timeout_s)
    if done.returncode:
        return f"the process that reads it ended with status {done.returncode}: {last_line(done)}"
    return done.stdout.decode()


def _fault(document: Mapping[str, Any], path: str, context: Context) -> str:
    composed = compose_mapping(document)
    assert context.model is not None, "only runs of vision-language models start this process"
    try:
        row = composed.make(path, context)[0]
        tokenizer = Vision(context.model).of(row)
        source = Assembly(composed).graph.source
        if source.encode is None or path != "dataset":
            tokenizer.encode_prompt(row["prompt"])
        else:
            for index in range(source.samples):
                source.encode(row, index, tokenizer)
    except ConfigError as error:
        return str(error)
    return ""


def _main() -> None:
    keep_torch_out()
    setup = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[dict[str, Any], str, Context])
    with redirect_stdout(sys.stderr):
        fault = _fault(*setup)
    sys.stdout.write(fault)


if __name__ == "__main__":
    _main()
