"""Hold the import rules of pyproject.toml (`tool.importlinter`): `python .ci/lint_imports.py`.

import-linter wants every package by name. Here `stretto_*` stands for all plugin packages of the checkout.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run import-linter with the names filled in; its exit status."""
    plugins = sorted(folder.name for folder in ROOT.glob("plugins/*/stretto_*"))
    rules = (
        (ROOT / "pyproject.toml")
        .read_text()
        .replace('"stretto_*"', ", ".join(f'"{name}"' for name in plugins))
    )
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "pyproject.toml")
        config.write_text(rules)
        return lint_imports(config_filename=str(config), cache_dir=folder, no_logo=True)


if __name__ == "__main__":
    sys.exit(main())
