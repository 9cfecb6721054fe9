"""The command line: what it takes, what it refuses, and with which words."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from commands import stretto
from stretto.cli import main
from stretto.cli.output import add_row, fail, figure_table, print_table
from stretto.errors import ConfigError

QUICKSTART = str(Path(__file__).parents[2] / "examples" / "quickstart" / "run.yaml")


def test_it_says_its_version() -> None:
    assert stretto("--version").stdout == f"stretto {version('stretto')}\n"


def test_the_docstring_of_the_command_line_names_every_command() -> None:
    names = typer.main.get_group(main.app).commands
    assert "sweep" in names
    assert [name for name in names if f"`{name}`" not in (main.__doc__ or "")] == []


@pytest.mark.parametrize("arguments", [["--steps=3"], ["--steps", "3"], ["seed=1", "--steps", "3", "out=x"]])
def test_a_key_written_as_an_option_is_refused_with_what_to_write(arguments: list[str]) -> None:
    done = stretto("run", QUICKSTART, *arguments)
    assert done.returncode == 2
    assert "no option '--steps'" in done.stderr
    assert done.stderr.endswith("write steps=3\n")


def test_a_page_for_the_run_of_another_process_is_refused() -> None:
    done = stretto("run", QUICKSTART, "--ui", "--detach", "out=elsewhere")
    assert done.returncode == 2
    assert "--ui: another process owns this run; start it, then stretto ui " in done.stderr


def test_options_that_are_no_keys_are_refused_as_options() -> None:
    done = stretto("evaluate", "somewhere", "--temprature", "0")
    assert done.returncode == 2
    assert "No such option" in done.stderr


def test_the_help_of_evaluations_speaks_of_evaluations() -> None:
    assert "queue." not in stretto("evaluate", "--help").stdout


def test_the_quickstart_can_be_checked_as_a_run_of_no_steps() -> None:
    done = stretto("check", QUICKSTART, "steps=0")
    assert (done.returncode, done.stderr.count("error")) == (0, 0), done.stderr
    assert "evaluation version 0" in done.stdout


def test_tables_and_errors_show_text_of_others_as_it_is_and_escape_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "no [/INST] [b]x :smile: \x1b]0;x\x07"
    table = figure_table("run", said)
    add_row(table, said, "1")
    print_table(table)
    with pytest.raises(SystemExit):
        fail(ConfigError(said), 2)
    printed = capsys.readouterr()
    assert printed.out.count("no [/INST] [b]x :smile: \\x1b]0;x\\x07") == 2
    assert printed.err == "error: no [/INST] [b]x :smile: \\x1b]0;x\\x07\n"
