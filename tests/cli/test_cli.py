"""The command line: what it takes, what it refuses, and with which words."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from commands import called, stretto
from stretto.cli import main
from stretto.errors import ConfigError
from stretto.records.figures import add_row, figure_table, print_table

QUICKSTART = str(Path(__file__).parents[2] / "examples" / "quickstart" / "run.yaml")


def test_the_docstring_of_the_command_line_names_every_command() -> None:
    names = typer.main.get_group(main.app).commands
    assert "sweep" in names
    assert [name for name in names if f"`{name}`" not in (main.__doc__ or "")] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", QUICKSTART, "--steps=3"], "no option '--steps'.* write steps=3$"),
        (["run", QUICKSTART, "--steps", "3"], "no option '--steps'.* write steps=3$"),
        (["run", QUICKSTART, "seed=1", "--steps", "3", "out=x"], "no option '--steps'.* write steps=3$"),
        (
            ["run", QUICKSTART, "--ui", "--detach", "out=x"],
            "--ui: another process owns this run; start it, then stretto ui ",
        ),
        (["evaluate", "somewhere", "--temprature", "0"], "No such option"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(arguments: list[str], said: str) -> None:
    done = called(*arguments)
    assert done.returncode == 2
    assert re.search(said, done.stderr), done.stderr


def test_it_says_its_version_and_the_help_of_evaluations_speaks_of_evaluations() -> None:
    assert stretto("--version").stdout == f"stretto {version('stretto')}\n"
    assert "queue." not in called("evaluate", "--help").stdout


def test_the_quickstart_can_be_checked_as_a_run_of_no_steps() -> None:
    done = called("check", QUICKSTART, "steps=0")
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
        main.fail(ConfigError(said), 2)
    printed = capsys.readouterr()
    assert printed.out.count("no [/INST] [b]x :smile: \\x1b]0;x\\x07") == 2
    assert printed.err == "error: no [/INST] [b]x :smile: \\x1b]0;x\\x07\n"
