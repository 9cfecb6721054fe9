"""Commands that other packages add to `stretto`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commands import stretto

COMMAND = """
from pathlib import Path
from typing import Annotated
import typer

def command(folder: Annotated[Path, typer.Argument(metavar="RUN")], last: int = 5) -> None:
    \"\"\"Print the newest lines of a run's metrics.\"\"\"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    typer.echo("\\n".join(lines[-last:]))
"""


@pytest.fixture
def with_command(tmp_path: Path) -> dict[str, str]:
    """The environment with an installed package that adds the commands `tail`, `broken` and `run`."""
    site, info = tmp_path / "site", tmp_path / "site" / "acme_tail-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "acme_tail.py").write_text(COMMAND)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tail\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[stretto.command]\ntail = acme_tail:command\nbroken = acme_absent:command\nrun = acme_tail:command\n"
    )
    return {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"}


def test_an_installed_package_adds_a_command(with_command: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("1\n2\n3\n")
    assert stretto("tail", str(tmp_path), "--last", "2", env=with_command).stdout == "2\n3\n"
    listed = stretto("--help", env=with_command).stdout
    assert "Print the newest lines of a run's metrics." in listed
    assert "Train: read the run file" in listed, "stretto's own command goes before"


def test_other_commands_import_no_added_one() -> None:
    program = "import sys; from stretto.cli.main import app; from typer.testing import CliRunner"
    for arguments, absent in (
        (["run", "--help"], ("stretto_trace", "stretto_ui", "stretto_views")),
        (["--help"], ("aiohttp", "pyarrow", "stretto.records.charts", "stretto.records.run_folder")),
    ):
        found = f"[name for name in sys.modules if name.startswith({absent})]"
        run = f"assert CliRunner().invoke(app, {arguments}).exit_code == 0; print({found})"
        command = [sys.executable, "-c", f"{program}; {run}"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_command_that_does_not_load_says_why_and_spares_the_others(with_command: dict[str, str]) -> None:
    reason = (
        "the command 'broken' of acme-tail does not load: ModuleNotFoundError: No module named 'acme_absent'"
    )
    done = stretto("broken", env=with_command)
    assert (done.returncode, done.stderr) == (2, f"error: {reason}\n")
    listed = stretto("--help", env=with_command)
    assert listed.returncode == 0
    assert reason in listed.stdout
