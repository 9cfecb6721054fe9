"""Load the user's own functions and classes, which a run file names as `path.py:name` or `module:name`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from stretto.errors import nearest

__all__ = ["fault_of_importable", "load_importable", "load_module", "unknown_parameter"]

_loading = RLock()
"""Held while a file is loaded: another thread gets a module only when it is whole."""


def load_importable(reference: str) -> Any:
    """Import the module of a reference and return the object that the reference names.

    Raises:
        AttributeError: if the module has no such name.
        Exception: any exception that the module raises.
    """
    module_name, _, name = reference.rpartition(":")
    is_file = module_name.endswith(".py")
    return getattr(load_module(module_name) if is_file else importlib.import_module(module_name), name)


def load_module(path: str) -> ModuleType:
    """Load a Python file as a module. The file runs only at the first call with this path.

    Raises:
        Exception: any exception that the file raises.
    """
    with _loading:
        if path not in sys.modules:  # the module's name is its path, so it cannot collide with another module
            spec = importlib.util.spec_from_file_location(path, path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[path] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[path]
                raise
        return sys.modules[path]


def fault_of_importable(reference: str) -> str:
    """Return why a reference cannot be loaded, or an empty string. A file is parsed, not run: the kernel
    imports no user code."""
    module_name, _, name = reference.rpartition(":")
    if not module_name.endswith(".py"):
        if importlib.util.find_spec(module_name.partition(".")[0]) is None:
            return (
                f"no module {module_name!r} is installed or on PYTHONPATH; for a file write 'path.py:{name}'"
            )
        return ""
    try:
        tree = ast.parse(Path(module_name).read_text())
    except SyntaxError as error:
        return f"{module_name}:{error.lineno}: {error.msg}"
    names = _top_names(tree)
    if name not in names:
        known = ", ".join(names) or "nothing"
        return f"{module_name} defines no {name!r}{nearest(name, names)}; it has {known}"
    return ""


def unknown_parameter(reference: str, known: Collection[str]) -> str:
    """Return the first parameter without a default that a function has besides the known ones; empty if there
    is none, or if `needed_parameters` does not know."""
    return next((name for name in needed_parameters(reference) if name not in known), "")


@cache
def needed_parameters(reference: str) -> tuple[str, ...]:
    """Return the parameters of a function that need an argument. The file is parsed, not run: there are none
    for a function of a module, for a class, and for a decorated function."""
    module_name, _, name = reference.rpartition(":")
    tree = ast.parse(Path(module_name).read_text()) if module_name.endswith(".py") else ast.Module([], [])
    for node in tree.body:
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and node.name == name and not node.decorator_list:
            positional = [*node.args.posonlyargs, *node.args.args]
            by_name = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            return (
                *(each.arg for each in positional[: len(positional) - len(node.args.defaults)]),
                *(each.arg for each, default in by_name if default is None),
            )
    return ()


def _top_names(tree: ast.Module) -> list[str]:
    """Return the names that a module defines or imports at its top level."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        *(node.name for node in tree.body if isinstance(node, definitions)),
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
