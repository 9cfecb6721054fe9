"""Compare the tensors in models' files with the classes that trainers load them into, for `stretto check`. A
child process does it, with tensors that have no numbers, because importing torch takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout

import msgspec

from stretto.component import Head, Problem
from stretto.errors import EngineError
from stretto.models.files import tensors_of_model
from stretto.user_code.child_process import last_line, run_child

__all__ = ["tensor_problems"]

_TRY_S = 60.0


def tensor_problems(models: Mapping[str, tuple[str, Head]]) -> Iterator[Problem]:
    """Yield what is wrong with models whose files are here: key of the run file -> (source, head)."""
    here = {path: model for path, model in models.items() if tensors_of_model(model[0])}
    try:
        child = (
            run_child([sys.executable, "-m", __name__], msgspec.json.encode(here), _TRY_S) if here else None
        )
        fault = last_line(child) if child and child.returncode else ""
    except TimeoutError:
        child, fault = None, f"it took longer than {_TRY_S:.0f} s"
    if fault:
        yield Problem("model", f"its tensors are not compared with its class: {fault}", "warning")
    elif child:
        yield from (Problem(**each) for each in msgspec.json.decode(child.stdout))


def _problems_of(path: str, source: str, head: Head) -> Iterator[Problem]:
    from structlog.testing import capture_logs

    from stretto.training.model import load_empty

    with capture_logs() as lines:
        try:
            load_empty(source, head)
        except EngineError as error:
            yield Problem(path, str(error))
    yield from (Problem(path, f"{source!r}: {line['event']}: {line['tensors']}", "warning") for line in lines)


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        _asked = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, tuple[str, Head]])
        _found = [each for path, model in _asked.items() for each in _problems_of(path, *model)]
    sys.stdout.buffer.write(msgspec.json.encode(_found))
