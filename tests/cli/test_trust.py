"""A run's folder that another user owns is continued only if the user trusts its plugins."""

import os
from pathlib import Path

import pytest
import yaml

from commands import stretto
from stretto.assembly.trust import require_trust
from stretto.errors import ConfigError

STRANGER = 54321  # the id of no user

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with two sets of values, whose plugin says when it is imported."""
    monkeypatch.setenv("TOK", "hunter2")
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    values = {
        "name": "demo",
        "plugins": [f"{tmp_path}/evil.py"],
        "reward": {"use": "function", "function": f"{tmp_path}/score.py:score"},
        "dataset": {"use": "jsonl", "path": "rows.jsonl"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    former = {**values, "plugins": ["${oc.env:TOK}/former.py"]}
    (folder / "config-1.yaml").write_text(yaml.safe_dump(former))
    return folder


def test_ones_own_run_needs_no_trust(folder: Path) -> None:
    require_trust(folder, trusted=False)
    require_trust(folder / "absent", trusted=False)


@pytest.mark.parametrize("part", [".", "config.yaml", "config-1.yaml"])
@as_root
def test_the_plugin_files_of_a_strangers_run_are_listed(folder: Path, part: str) -> None:
    os.chown(folder / part, STRANGER, -1)
    with pytest.raises(ConfigError, match=f"belongs to the user with id {STRANGER}") as caught:
        require_trust(folder, trusted=False)
    files = (f"{folder.parent}/evil.py", f"{folder.parent}/score.py", "${oc.env:TOK}/former.py")
    assert f"plugin files: {', '.join(sorted(files))}. Read them first" in str(caught.value)
    require_trust(folder, trusted=True)


@as_root
def test_a_strangers_config_that_is_nested_too_deeply_is_refused(folder: Path) -> None:
    os.chown(folder, STRANGER, -1)
    (folder / "config-1.yaml").write_text("plugins: " + "[" * 3000 + "]" * 3000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        require_trust(folder, trusted=False)


@as_root
@pytest.mark.parametrize("command", ["resume", "evaluate", "plan"])
def test_no_command_imports_a_strangers_plugins_unasked(folder: Path, command: str) -> None:
    os.chown(folder, STRANGER, -1)
    imported = folder.parent / "imported"
    refusal = stretto(command, str(folder))
    assert refusal.returncode == 2
    assert f"{folder.parent}/evil.py" in refusal.stderr
    assert "--trust-plugins" in refusal.stderr
    assert not imported.exists()
    trusted = stretto(command, str(folder), "--trust-plugins")
    assert "belongs to" not in trusted.stderr
    assert imported.exists() == (command != "evaluate")  # which first looks for a checkpoint
