"""Things of the user's own that a run file names: `path.py:name`, or `module:name`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.errors import nearest

__all__ = ["fault_of_importable", "load_importable", "load_module"]


def load_importable(reference: str) -> Any:
    """What a reference names; its module is imported.

    Raises:
        Exception: whatever the module raises, or AttributeError where it has no such name.
    """
    module_name, _, name = reference.rpartition(":")
    is_file = module_name.endswith(".py")
    return getattr(load_module(module_name) if is_file else importlib.import_module(module_name), name)


def load_module(path: str) -> ModuleType:
    """A Python file as a module; it runs once, however often it is asked for.

    Raises:
        Exception: whatever it raises.
    """
    if path not in sys.modules:  # the path is its name, so that no other module is in its way
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
    """Why there is no such thing, or an empty string. A file is read, not run: the kernel imports nobody's
    code."""
    module_name, _, name = reference.rpartition(":")
    if not module_name.endswith(".py"):
        if importlib.util.find_spec(module_name.partition(".")[0]) is None:
            return (
                f"no module {module_name!r} is installed, or on PYTHONPATH; for a file write 'path.py:{name}'"
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


def _top_names(tree: ast.Module) -> list[str]:
    """What a module defines, or imports by name."""
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        *(node.name for node in tree.body if isinstance(node, defined)),
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
