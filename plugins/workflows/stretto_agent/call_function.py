"""call_function.py FILE.py:NAME | MODULE:NAME: calls an agent that is a function, in a process of its own.

The row is read from standard input, as JSON. What the function returns is written to standard output: text as
it is, anything but None as JSON; what it prints goes to standard error. Needs nothing but the standard
library.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load(reference: str) -> Callable[..., Any]:
    """The function; modules beside its file can be imported."""
    module_name, _, name = reference.rpartition(":")
    if not module_name.endswith(".py"):
        return getattr(importlib.import_module(module_name), name)
    sys.path[0] = str(Path(module_name).parent)
    spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def arguments(function: Callable[..., Any], row: dict[str, Any]) -> dict[str, Any]:
    """What the function asks for of all that is offered.

    Raises:
        TypeError: if it asks for something else.
    """
    address = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    offered = {**row, "row": row, **address}
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    for name, parameter in parameters.items():
        if name not in offered and parameter.default is parameter.empty:
            raise TypeError(f"the agent asks for {name!r}; offered: {', '.join(offered)}")
    return {name: offered[name] for name in parameters if name in offered}


async def settled(awaitable: Any) -> Any:
    """The value of what an async function gives."""
    return await awaitable


def main() -> None:
    """Body of the process."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    function = load(sys.argv[1])
    result = function(**arguments(function, json.load(sys.stdin)))
    if inspect.isawaitable(result):
        result = asyncio.run(settled(result))
    if result is not None:
        answer.write(result if isinstance(result, str) else json.dumps(result))
    answer.close()


if __name__ == "__main__":
    main()
