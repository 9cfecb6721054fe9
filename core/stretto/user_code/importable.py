"""Load the user's own functions and classes, which a run file names as `path.py:name` or `module:name`."""

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Collection, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from itertools import takewhile
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from stretto.errors import nearest

__all__ = ["FILES", "fault_of_importable", "load_importable", "load_module", "unknown_parameter"]

_loading = RLock()
"""Held while a file is loaded, so that threads get only complete modules."""


def load_importable(reference: str) -> Any:
    """Import the module of a reference and return the object that the reference names."""
    module_name, _, name = reference.rpartition(":")
    if module_name.endswith(".py"):
        return getattr(load_module(module_name), name)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    return getattr(importlib.import_module(module_name), name)


def load_module(path: str) -> ModuleType:
    """Load a Python file as a module, once for each path.

    The module's name has a digest of its path; a file in a package is a module of the package. The
    folder of the file or package is added to `sys.path`, so that the file may import its neighbours.
    """
    file = Path(path).resolve()
    folders = [*takewhile(lambda folder: (folder / "__init__.py").exists(), file.parents)]
    top = folders[-1] if folders else file
    name = _name_of(top)
    submodules = [folder.name for folder in reversed(folders[:-1])] + [file.stem] if folders else []
    with _loading:
        FILES[name] = top
        if str(top.parent) not in sys.path:
            sys.path.append(str(top.parent))
        return importlib.import_module(".".join([name, *submodules]))


FILES: dict[str, Path] = {}
"""Name of a module -> the file or package of `load_module`."""


def _name_of(top: Path) -> str:
    return f"{top.stem.replace('.', '_')}_{hashlib.sha256(str(top).encode()).hexdigest()[:8]}"


class _Finder(MetaPathFinder):
    """Finds the modules of `load_module` by their names, also in the processes of a pool that the user's code
    starts: these have the same `sys.path`, and load the module of an unpickled object by its name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = FILES.get(fullname)
        if place is None and re.fullmatch(r"\w+_[0-9a-f]{8}", fullname):
            folders = [folder for folder in map(Path, sys.path) if folder.is_dir()]
            inside = (entry.resolve() for folder in folders for entry in folder.iterdir())
            place = next((entry for entry in inside if _name_of(entry) == fullname), None)
        if place is None:
            return None
        if place.is_dir():
            inside = [str(place)]
            return spec_from_file_location(fullname, place / "__init__.py", submodule_search_locations=inside)
        return spec_from_file_location(fullname, place)


sys.meta_path.append(_Finder())


def fault_of_importable(reference: str) -> str:
    """Return why a reference cannot be loaded; empty if it can. It parses a file, and runs no user code."""
    module_name, _, name = reference.rpartition(":")
    if not module_name.endswith(".py"):
        top_package = module_name.partition(".")[0]
        # The processes that load it have the working folder on `sys.path`.
        is_here = Path(top_package).is_dir() or Path(f"{top_package}.py").is_file()
        if not is_here and importlib.util.find_spec(top_package) is None:
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
        names_text = ", ".join(names) or "nothing"
        return f"{module_name} defines no {name!r}{nearest(name, names)}; it has {names_text}"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return f"{module_name}:{node.lineno}: {name!r} is a class; expected a function"
        targets = (
            node.targets if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return f"{module_name}:{node.lineno}: {name!r} is a value; expected a function"
    return ""


def unknown_parameter(reference: str, known: Collection[str]) -> str:
    """Return a function's first parameter that has no default and is not `known`; empty if there is none, or
    if `needed_parameters` cannot tell."""
    return next((name for name in needed_parameters(reference) if name not in known), "")


@cache
def needed_parameters(reference: str) -> tuple[str, ...]:
    """Return the parameters of a function that need an argument. The file is parsed, not run: the
    result is empty for a function of a module, for a class, and for a decorated function."""
    module_name, _, name = reference.rpartition(":")
    tree = ast.parse(Path(module_name).read_text()) if module_name.endswith(".py") else ast.Module([], [])
    for node in tree.body:
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and node.name == name and not node.decorator_list:
            positional = [*node.args.posonlyargs, *node.args.args]
            by_name = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            return (
                *(parameter.arg for parameter in positional[: len(positional) - len(node.args.defaults)]),
                *(parameter.arg for parameter, default in by_name if default is None),
            )
    return ()


def _top_names(tree: ast.Module) -> list[str]:
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
