"""`stretto new`: write a plugin package for one component, from a template that works as it is."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from stretto.assembly.contracts import CONTRACTS
from stretto.assembly.plugins import KINDS, Plugins
from stretto.cli.make.packaged import packaged_folder
from stretto.cli.start.folders import is_free
from stretto.component import Kind
from stretto.errors import ConfigError, PluginError, nearest
from stretto.user_code.importable import load_module

MODEL = "model"
"""`stretto new model` writes a model, not a package."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def new_package(kind: str, name: str, folder: Path | None, plugins: Plugins) -> Path:
    """Write the package `stretto-NAME` into a new or empty folder, by default here, and return the folder."""
    known = _known_kind(kind)
    _expect_free_name(known, name, plugins)
    target = folder or Path(_distribution(name))
    if not is_free(target):
        raise ConfigError(f"{str(target)!r} exists and is not an empty folder; choose another: --folder")
    words = _words(known, name)
    try:
        for source, place in _files(known):
            file = target / _fill(place, words)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_fill(source.read_text(encoding="utf-8"), words), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {str(target)!r}: {error}") from error
    return target


def new_model(folder: Path, characters: str | None, seed: int) -> None:
    """Write an untrained model of the quickstart's size, with a token for each character (default: ASCII)."""
    if characters == "":
        raise ConfigError("--characters is empty; expected the characters of your prompts and answers")
    if not is_free(folder):
        raise ConfigError(f"{str(folder)!r} exists and is not an empty folder; choose another name")
    try:
        import torch

        maker = load_module(str(packaged_folder("quickstart") / "make_model.py"))
    except ModuleNotFoundError as error:
        raise PluginError(f"a model needs {error.name}: pip install 'stretto[torch]'") from error
    torch.manual_seed(seed)
    maker.write_model(folder, maker.PRINTABLE if characters is None else characters)


def next_steps(kind: str, name: str, folder: Path) -> list[str]:
    """Return the commands that install, examine, test and try a new package."""
    return [
        shlex.join(["cd", str(folder)]),
        "pip install -e '.[dev]'",
        f"stretto doctor {_distribution(name)}",
        "pytest",
        f"stretto quickstart trial {_words(_known_kind(kind), name)['my_override']} steps=3",
    ]


def _known_kind(kind: str) -> Kind:
    for known in KINDS:
        if known == kind:
            return known
    kinds = (*KINDS, MODEL)
    raise PluginError(f"no kind {kind!r}{nearest(kind, kinds)}; kinds: {', '.join(kinds)}")


def _expect_free_name(kind: Kind, name: str, plugins: Plugins) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a component: expected a small letter, then small letters, "
            "digits and underscores, because the name is part of a module's",
            value=name,
        )
    if name in plugins.names(kind):
        raise PluginError(f"there is a {kind} {name!r} already; choose another name")
    module = f"stretto_{name}"
    if importlib.util.find_spec(module) is not None:
        raise ConfigError(f"there is a module {module!r} already; choose another name", value=name)


def _files(kind: Kind) -> Iterator[tuple[Path, str]]:
    """Yield the template's files and their places in the package: files for all kinds, then the kind's."""
    templates = packaged_folder("templates")
    for part in (templates / "package", templates / kind):
        for path in sorted(part.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, str(path.relative_to(part))


def _fill(text: str, words: dict[str, str]) -> str:
    for placeholder, word in words.items():
        text = text.replace(placeholder, word)
    return text


def _words(kind: Kind, name: str) -> dict[str, str]:
    contract = CONTRACTS[kind]
    is_list = kind == "tracker"
    return {
        "my_name": name,
        "my-name": name.replace("_", "-"),
        "MyName": "".join(part.capitalize() for part in name.split("_")),
        "my_kind": kind,
        "my_override": shlex.quote(f"trackers=[{name}]" if is_list else f"{kind}={name}"),
        "my_section": f"trackers: [{{use: {name}}}]" if is_list else f"{kind}: {{use: {name}}}",
        "my_contract": f"{contract.__module__}.{contract.__name__}",
    }


def _distribution(name: str) -> str:
    return f"stretto-{name.replace('_', '-')}"
