"""The blocks of the pages and the README: each is run, or a comment above it says why not or which test does.

`<!-- not run: REASON -->` and `<!-- run by: TEST -->` stand on the line before a block. Without a comment

- a page with `bash` blocks runs from top to bottom in a folder that has the quickstart and a `run.yaml`; its
  blocks of other languages that begin with `# NAME` become files there;
- `python` runs, and `yaml` is composed in place of these sections of the quickstart's run file.
"""

from __future__ import annotations  # the blocks inherit it: some annotate with names that they do not import

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from stretto.assembly.compose import compose
from stretto.assembly.plugins import Plugins
from stretto.cli.main import app
from stretto.cli.make.schema import json_schema
from stretto.cli.start.quickstart import copy_quickstart

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "AGENTS.md")
PAGES = [*(ROOT / name for name in ROOT_PAGES), *sorted((ROOT / "docs").glob("*.md"))]
RUN_ELSEWHERE = {"library.md", "testing.md"}
"""Pages whose blocks all are run by tests/runs/test_docs_library.py and tests/conformance/test_page.py."""
SHOWN = {"text", "mermaid", "json", "toml", "sql"}
"""Languages of blocks that show something and are no commands."""
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>not run|run by): (?P<reason>.+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"^(?:\$ )?stretto (?!is\b)\w.*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str
    mark: str = ""
    reason: str = ""

    @property
    def file(self) -> str:
        """The name in the first line, `# NAME.py`; empty if the block is no file."""
        named = re.match(r"# ([\w./-]+\.(?:py|yaml))$", self.text.partition("\n")[0])
        return named[1] if named else ""

    @property
    def is_run(self) -> bool:
        return not self.mark and self.page.name not in RUN_ELSEWHERE


def blocks_of(page: Path) -> list[Block]:
    return [
        Block(page, each["language"], each["text"], each["mark"] or "", each["reason"] or "")
        for each in BLOCK.finditer(page.read_text())
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
TUTORIALS = sorted({block.page for block in BLOCKS if block.language == "bash" and block.is_run})


def name_of(value: object) -> str:
    return value.stem if isinstance(value, Path) else ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    fences = len(re.findall(r"^ *```", page.read_text(), re.MULTILINE))
    assert fences == 2 * len(blocks_of(page)), f"{page.name} has a fence that this test cannot read"
    for block in blocks_of(page):
        begin = f"{page.name}: {block.text[:60]!r}"
        assert block.language, f"{begin} has no language; output is `text`, commands are `bash`"
        if block.mark == "run by":
            assert (ROOT / block.reason).is_file(), f"{begin} is run by {block.reason}, which does not exist"
        known = block.language in SHOWN | {"python", "yaml", "bash", "console"}
        assert known, f"{begin}: no test knows {block.language}"
        assert block.language != "console" or not block.is_run, f"{begin}: which test runs it?"
    outside = BLOCK.sub("", page.read_text())
    assert not re.search(r"^    (stretto|pip|python) ", outside, re.MULTILINE), (
        "commands stand in fenced blocks"
    )


def commands_of(block: Block) -> Iterator[list[str]]:
    for line in COMMAND.findall(block.text):
        words = shlex.split(
            re.sub(r"\[[^\]]*[A-Z=][^\]]*\](?=\s|$)", "", line.removeprefix("$ ")), comments=True
        )
        yield list(takewhile(lambda word: word not in {"|", "&", "&&"}, words[1:]))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_has_arguments_that_exist(page: Path) -> None:
    program: Any = typer.main.get_command(app)
    for block in blocks_of(page):
        for words in commands_of(block):
            command = program.get_command(None, words[0])
            assert command, f"{page.name}: there is no command 'stretto {words[0]}'"
            command.make_context(words[0], words[1:])  # raises a UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory for a page's files, with the quickstart and a short `run.yaml`."""
    monkeypatch.chdir(tmp_path)
    with copy_quickstart(Path("quickstart")):
        pass
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    short = yaml.safe_load((ROOT / "examples" / "quickstart" / "run.yaml").read_text())
    short |= {"steps": 3, "queue": {"batch_size": 4}}
    short["evaluation"]["rows"] = 20
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(short, sort_keys=False))
    return tmp_path


def write_file(block: Block, folder: Path) -> None:
    if block.file:
        (folder / block.file).write_text(block.text)


SECTIONS = [
    block
    for block in BLOCKS
    if block.language == "yaml"
    and block.mark != "run by"
    and "a file of" not in block.reason
    # `stretto run` reads the files of tutorials
    and not (block.file and block.page in TUTORIALS)
]
"""Run files and sections of them; also those that a CPU cannot run, but not files of other programs."""


@pytest.mark.parametrize("block", SECTIONS, ids=lambda block: block.page.stem)
def test_yaml_is_a_run_file_or_sections_of_one(block: Block, folder: Path) -> None:
    for named in re.findall(r"\b\w+\.(?:jsonl|py)\b", block.text):
        (folder / named).touch()  # rows and functions need only exist; plugins are blocks of the page
    for each in blocks_of(block.page):
        if each.language == "python":
            write_file(each, folder)
    written = yaml.safe_load(re.sub(r"python: [\w./-]+", f"python: {sys.executable}", block.text))
    base = {} if "steps" in written else yaml.safe_load((folder / "run.yaml").read_text())
    compose(folder / "composed.yaml", document=base | written)


PROGRAMS = sorted(
    {each.page for each in BLOCKS if each.language == "python" and each.is_run} - set(TUTORIALS)
)


@pytest.mark.parametrize("page", PROGRAMS, ids=name_of)
def test_python_runs(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    for block in blocks_of(page):
        if block.language == "python" and block.is_run:
            exec(compile(block.text, f"{page.name}", "exec"), {"__name__": "page"})


def _by_day_or_night(page: Path) -> Any:
    mark = pytest.mark.slow if page.name in ("README.md", "first-hour.md") else pytest.mark.nightly
    return pytest.param(page, marks=mark)


@pytest.mark.parametrize("page", [*map(_by_day_or_night, TUTORIALS)], ids=name_of)
def test_the_page_runs(page: Path, folder: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    for block in blocks_of(page):
        if not block.is_run:
            continue
        write_file(block, folder)
        if block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{block.text}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def test_the_first_hour_answers_briefly_and_with_a_command_that_runs() -> None:
    page = ROOT / "docs" / "first-hour.md"
    answers = page.read_text().partition("\nNext: ")[0].split("\n## ")[1:]
    assert len(answers) == 11, "ten questions, and what to do about an error"
    for answer in answers:
        title, _, text = answer.partition("\n")
        assert len(BLOCK.sub("", text).split()) <= 80, title
        commands = [each for each in BLOCK.finditer(answer) if each["language"] == "bash"]
        is_error = title == "It ended with an error"
        assert is_error or any(each["mark"] != "not run" for each in commands), title


# ------------------------------------------------------------------------- tables of keys, and the example


def keys_of(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for each in schema.values():
            yield from keys_of(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from keys_of(each)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name.startswith("from-")], ids=name_of)
def test_keys_that_replace_those_of_other_projects_exist(page: Path) -> None:
    known = set(keys_of(json_schema(Plugins())))
    rows = re.findall(r"^\| .+? \| (`.+?) \|", page.read_text(), re.MULTILINE)
    assert len(rows) > 20
    for key in re.findall(r"`([^`]+)`", " ".join(rows)):
        if not key.startswith("stretto "):
            ends = {key.split(".")[0], key.split(".")[-1]}  # names of groups and models stand between them
            assert ends <= known, f"{page.name}: there is no key {key!r}"


def members_of(source: str, name: str) -> dict[str, str]:
    """The members of a class as code, without docstrings and types."""
    found = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    members: dict[str, str] = {}
    for node in found.body:
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
            texts = (ast.Expr, ast.Delete)  # a docstring; `del context`
            node.body = [each for each in node.body if not isinstance(each, texts)]
            members[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            members[ast.unparse(target)] = ast.unparse(node.value) if node.value else ""
    return members


@pytest.mark.parametrize("page", ["README.md", "docs/plugins.md"])
def test_reinforce_is_that_of_the_example(page: str) -> None:
    example = members_of((ROOT / "examples/plugin_package/acme_rl/__init__.py").read_text(), "Reinforce")
    [block] = [each for each in blocks_of(ROOT / page) if "class Reinforce" in each.text]
    shown = members_of(block.text, "Reinforce")
    assert {"models", "__init__", "calls"} <= set(shown)
    assert shown == {name: example[name] for name in shown}
