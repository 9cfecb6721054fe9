"""Reward `function`: a function of the user's own, by file or by module."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stretto import Component, Context, Problem, RewardConfig, hookimpl
from stretto.component import Importable
from stretto.config import RunConfig
from stretto.errors import nearest

__all__ = ["FunctionConfig"]


class FunctionConfig(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `function`."""

    function: Importable
    """`path.py:name` or `module:name`. Either form of `stretto.reward`, TRL's included."""


def make(config: FunctionConfig, context: Context) -> Callable[..., Any]:
    """The user's function itself. The child process that calls it imports its module."""
    del context
    module_name, _, name = config.function.rpartition(":")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    return getattr(module, name)


def check(config: FunctionConfig, run: RunConfig) -> Iterator[Problem]:
    """A file is read, not run: the kernel imports nobody's reward."""
    del run
    module_name, _, name = config.function.rpartition(":")
    if module_name.endswith(".py"):
        try:
            tree = ast.parse(Path(module_name).read_text())
        except SyntaxError as error:
            yield Problem("reward.function", f"{module_name}:{error.lineno}: {error.msg}")
            return
        names = [
            *(node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))),
            *(
                target.id
                for node in tree.body
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            ),
            *(
                alias.asname or alias.name
                for node in tree.body
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            ),
        ]
        if name not in names:
            known = ", ".join(names) or "nothing"
            yield Problem(
                "reward.function", f"{module_name} defines no {name!r}{nearest(name, names)}; it has {known}"
            )
    elif importlib.util.find_spec(module_name.partition(".")[0]) is None:
        yield Problem(
            "reward.function",
            f"no module {module_name!r} is installed, or on PYTHONPATH; for a file write 'path.py:{name}'",
        )


@hookimpl
def stretto_reward() -> Iterator[Component[FunctionConfig]]:
    """The component of this package."""
    yield Component("function", make, FunctionConfig, "a Python function of your own", check)
