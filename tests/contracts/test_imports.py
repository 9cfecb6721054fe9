"""The import rules of pyproject.toml are kept, and each of them notices an import that breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("core", *(str(folder.relative_to(ROOT)) for folder in sorted(ROOT.glob("plugins/*"))))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the rules are about."""
    folder = tmp_path_factory.mktemp("checkout")
    for part in ("core", "plugins", ".ci"):
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
    assert "5 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    [
        ("core/stretto/errors.py", "import stretto.config", "imports go down the layers"),
        (
            "core/stretto/models/files.py",
            "def lazily():\n    import stretto.rl.batch",
            "imports go down the layers",
        ),
        ("core/stretto/stray.py", "", "imports go down the layers"),
        (
            "plugins/rewards/stretto_exact/__init__.py",
            "import stretto.assembly.compose",
            "plugins use public modules only",
        ),
        (
            "plugins/commands/stretto_trace/drawing.py",
            "import stretto.records.history",
            "plugins use public modules only",
        ),
        ("core/stretto/kernel/schedule/gate.py", "import stretto_grpo", "core knows no plugin"),
        (
            "plugins/rewards/stretto_exact/__init__.py",
            "import stretto_math",
            "plugins do not know each other",
        ),
        (
            "core/stretto/kernel/schedule/gate.py",
            "import stretto.rl.batch",
            "kernel, observers, assembly, bus, records and samples run without torch",
        ),
    ],
)
def test_a_forbidden_import_is_noticed(checkout: Path, file: str, line: str, rule: str) -> None:
    place = checkout / file
    before = place.read_text() if place.exists() else None
    place.write_text(f"{before or ''}\n{line}\n")
    try:
        done = lint(checkout)
    finally:
        place.unlink() if before is None else place.write_text(before)
    assert done.returncode == 1, done.stdout + done.stderr
    if line:
        assert f"{rule} BROKEN" in done.stdout
    else:
        assert "stray" in done.stdout
