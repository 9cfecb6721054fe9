"""`stretto new`: what it writes, and what it refuses. tests/contracts/test_templates.py runs the packages."""

import tomllib
from pathlib import Path

import pytest

from commands import called
from stretto.assembly.plugins import KINDS, Plugins
from stretto.cli.make.new import new_model, new_package, next_steps
from stretto.errors import ConfigError, PluginError
from stretto.models.files import known_config
from stretto.models.tokenizer import load_tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_has_its_name_everywhere_and_no_placeholder(kind: str, tmp_path: Path) -> None:
    package = new_package(kind, "two_words", tmp_path / "package", Plugins())
    texts = {path: path.read_text() for path in package.rglob("*") if path.is_file()}
    assert not [path for path, text in texts.items() if "my_" in text or "MyName" in text or "my-" in text]
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["name"] == "stretto-two-words"
    assert project["entry-points"] == {f"stretto.{kind}": {"two_words": "stretto_two_words"}}
    for path in ("README.md", ".github/workflows/test.yml", ".gitignore", "tests/test_two_words.py"):
        assert package / path in texts
    assert "class TwoWords" in texts[package / "stretto_two_words" / "__init__.py"]


def test_it_prints_what_to_do_next_so_that_a_shell_takes_it(tmp_path: Path) -> None:
    assert next_steps("reward", "mine", Path("a folder"))[0] == "cd 'a folder'"
    done = called("new", "tracker", "status_page", cwd=tmp_path)
    assert [line.strip() for line in done.stderr.splitlines()[1:]] == [
        "cd stretto-status-page",
        "pip install -e '.[dev]'",
        "stretto doctor stretto-status-page",
        "pytest",
        "stretto quickstart trial 'trackers=[status_page]' steps=3",
    ]
    assert (tmp_path / "stretto-status-page" / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("rewrd", "mine", "no kind 'rewrd'; did you mean 'reward'"),
        ("reward", "exact", "there is a reward 'exact' already"),
        ("dataset", "math", "there is a module 'stretto_math' already"),
        ("reward", "My-Name", "'My-Name' cannot be the name of a component"),
    ],
)
def test_what_cannot_be_is_refused(kind: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, PluginError), match=message):
        new_package(kind, name, tmp_path / "package", Plugins())
    assert not (tmp_path / "package").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        new_package("reward", "mine", tmp_path, Plugins())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_model_has_a_token_for_each_character(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    new_model(folder, "([{=}])½", seed=0)
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode_text("([{=}])½")
    assert (len(ids), tokenizer.decode(ids)) == (9, "([{=}])½")  # two bytes for the character outside ASCII
    assert known_config(str(folder))["vocab_size"] == 4 + 9
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        new_model(folder, None, seed=0)
