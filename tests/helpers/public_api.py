"""The public API as text: every name with its signature. It is read from the source, so nothing is imported.

`python tests/helpers/public_api.py > tests/contracts/public_api.txt` writes the list that the tests compare
with.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "stretto"
_NOT_FOR_PLUGINS = "plugins use public modules only"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_api() -> str:
    return "\n\n".join("\n".join(_module(path)) for path in public_modules()) + "\n"


def public_modules() -> list[Path]:
    """The files of all modules that plugins may import and that offer names."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rule = next(contract for contract in contracts if contract["name"] == _NOT_FOR_PLUGINS)
    private = {name.removeprefix("stretto.") for name in rule["forbidden_modules"]}
    paths = [path for path in sorted(CORE.rglob("*.py")) if path.relative_to(CORE).parts[0] not in private]
    return [path for path in paths if _names_in(ast.parse(path.read_text()))]


def _module(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    place = path.relative_to(CORE.parent).with_suffix("").parts
    yield f"# {'.'.join(place).removesuffix('.__init__')}"
    names = set(_names_in(tree))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            yield from _class(node)
        elif isinstance(node, _Function) and (node.name in names or _is_hook(node)):
            yield from _function(node, "")
        elif isinstance(node, ast.ImportFrom):
            imported = sorted(alias.asname or alias.name for alias in node.names)
            yield from (f"{name} (of {node.module})" for name in imported if name in names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = (part for target in targets for part in ast.walk(target))  # `A, B = …` is one target
            if any(isinstance(part, ast.Name) and part.id in names for part in parts):
                yield ast.unparse(node)


def _names_in(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def _class(node: ast.ClassDef) -> Iterator[str]:
    yield from (f"@{ast.unparse(decorator)}" for decorator in node.decorator_list)
    bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
    yield f"class {node.name}({bases})" if bases else f"class {node.name}"
    for member in node.body:
        if isinstance(member, _Function) and _is_public(member.name):
            yield from _function(member, "    ")
        elif isinstance(member, ast.AnnAssign) and _is_public(ast.unparse(member.target)):
            yield f"    {ast.unparse(member)}"


def _function(node: _Function, indent: str) -> Iterator[str]:
    yield from (f"{indent}@{ast.unparse(decorator)}" for decorator in node.decorator_list)
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    yield f"{indent}{kind} {node.name}({ast.unparse(node.args)}){result}"


def _is_hook(node: _Function) -> bool:
    return any(ast.unparse(decorator) == "hookspec" for decorator in node.decorator_list)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


if __name__ == "__main__":
    print(public_api(), end="")
