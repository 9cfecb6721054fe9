"""The packaged quickstart: a tiny model, its rows and its run files, copied into a user's folder."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from stretto.cli.make.packaged import EXAMPLES, packaged_folder
from stretto.cli.start.folders import is_free
from stretto.errors import ConfigError

_IN_CHECKOUT = f"{EXAMPLES}/quickstart"
_SCHEMA_LINE = "# yaml-language-server:"
# Files and folders beside run.yaml to which run.yaml refers.
_REFERENCES = ("model", "train.jsonl", "heldout.jsonl")
# Files that make_model.py writes; a checkout may have them, the wheel does not.
_GENERATED = ("demonstrations.jsonl", "untrained", "__pycache__")


@contextmanager
def copy_quickstart(folder: Path) -> Generator[Path]:
    """Copy the quickstart into a folder and yield its run file. An error in the block removes the copy."""
    _expect_room(folder)
    is_new = not folder.exists()
    try:
        _copy(packaged_folder("quickstart"), folder)
        yield folder / "run.yaml"
    except BaseException:
        for path in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _expect_room(folder: Path) -> None:
    if not is_free(folder):
        run_file = folder / "run.yaml"
        hint = f"; to run it again: stretto run {run_file}" if run_file.is_file() else ""
        raise ConfigError(f"{str(folder)!r} exists and is not an empty folder{hint}", value=str(folder))
    for name in _REFERENCES:
        if Path(name).exists():
            raise ConfigError(
                f"the working directory has {name!r}, which the quickstart's run file would use in place of "
                "its own; start in another folder",
                value=name,
            )


def _copy(source: Path, folder: Path) -> None:
    try:
        shutil.copytree(
            source,
            folder,
            ignore=shutil.ignore_patterns(*_GENERATED),
            copy_function=_copy_file,
            dirs_exist_ok=True,
        )
    except OSError as error:
        raise ConfigError(f"cannot write to {str(folder)!r}: {error}", value=str(folder)) from error


def _copy_file(source: str, target: str) -> str:
    """Copy one file. Make run files and the script refer to files beside them, not to the checkout."""
    if source.endswith((".yaml", ".py")):
        lines = Path(source).read_text(encoding="utf-8").splitlines(keepends=True)
        text = "".join(line for line in lines if not line.startswith(_SCHEMA_LINE))
        Path(target).write_text(text.replace(f"{_IN_CHECKOUT}/", ""), encoding="utf-8")
        return target
    return shutil.copyfile(source, target)
