"""The import rules of pyproject.toml are kept, and each of them notices an import that breaks it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("core", *(str(folder.relative_to(ROOT)) for folder in sorted(ROOT.glob("plugins/*"))))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    for part in ("core", "plugins", "examples", ".ci"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint(checkout: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(checkout / source) for source in SOURCES)}
    command = [sys.executable, str(checkout / ".ci" / "lint_imports.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_import_rules_hold(checkout: Path) -> None:
    done = lint(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 kept, 0 broken" in done.stdout


PLUGIN = "plugins/rewards/stretto_text_rewards/__init__.py"
WITHOUT_TORCH = "kernel, observers, assembly, bus and records run without torch"
FORBIDDEN = [
    ("imports go down the layers", "core/stretto/errors.py", "import stretto.config"),
    ("imports go down the layers", "core/stretto/models/files.py", "def lazily(): import stretto.rl.batch"),
    ("plugins use public modules only", PLUGIN, "import stretto.assembly.compose"),
    ("core knows no plugin", "core/stretto/kernel/schedule/gate.py", "import stretto_policy_gradients"),
    ("plugins do not know each other", PLUGIN, "import stretto_math"),
    ("the algorithm in one file needs no part of a run", "examples/loop.py", "import stretto.kernel.kernel"),
    (WITHOUT_TORCH, "core/stretto/kernel/schedule/members.py", "import torch"),
]
"""Rule, file, and a line that breaks the rule there."""


def test_forbidden_imports_and_a_module_in_no_layer_are_noticed(checkout: Path) -> None:
    former = {checkout / file: (checkout / file).read_text() for _, file, _ in FORBIDDEN}
    stray = checkout / "core/stretto/stray.py"
    stray.touch()
    try:
        for _, file, line in FORBIDDEN:
            with (checkout / file).open("a") as text:
                text.write(f"\n{line}\n")
        done = lint(checkout)
    finally:
        stray.unlink()
        for file, text in former.items():
            file.write_text(text)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "stray" in done.stdout
    for rule, file, line in FORBIDDEN:
        module = re.sub(r"^(core|plugins/\w+)/", "", file)
        importer = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        about = re.search(rf"^{rule}\n-+\n(.*?)(^[^\n]*\n----|\Z)", done.stdout, re.MULTILINE | re.DOTALL)
        assert about, done.stdout
        assert f" {importer} -> {line.split()[-1]} (l." in about[1], about[0]
