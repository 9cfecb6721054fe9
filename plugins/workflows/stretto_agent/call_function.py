"""call_function.py FILE.py:NAME | MODULE:NAME: call an agent that is a function, in a separate process.

It reads the row from standard input as JSON, and writes the result to standard output: text unchanged,
anything else except None as JSON. What the function prints goes to standard error. Standard library only.
"""

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
    """Load the function. Its module can import modules in the same folder."""
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
    """Return the arguments that the function has parameters for."""
    address = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    values = {**row, "row": row, **address}
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return values
    for name, parameter in parameters.items():
        if name not in values and parameter.default is parameter.empty:
            raise TypeError(f"the agent has a parameter {name!r}; available: {', '.join(values)}")
    return {name: values[name] for name in parameters if name in values}


async def wait_for(awaitable: Any) -> Any:
    """Await the result of an async function."""
    return await awaitable


def main() -> None:
    """Call the function with the row, and write its result."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    function = load(sys.argv[1])
    result = function(**arguments(function, json.load(sys.stdin)))
    if inspect.isawaitable(result):
        result = asyncio.run(wait_for(result))
    if result is not None:
        output.write(result if isinstance(result, str) else json.dumps(result))
    output.close()


if __name__ == "__main__":
    main()
