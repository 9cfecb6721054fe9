"""The pages of docs/ and the README: links hold, and their blocks do what the text says."""

import re
from pathlib import Path

import pytest
import yaml

from stretto.assembly.plugins import Plugins
from stretto.cli.make.schema import fields_of
from stretto.records.figures import FIGURES
from stretto.user_code.importable import load_module

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_hold(page: Path) -> None:
    for target in LINK.findall(prose_of(page)):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors_of(linked), f"{page.name} links to {target}: no such heading"
        in_site = linked.is_relative_to(ROOT / "docs")
        assert page.parent == ROOT or in_site, f"{page.name} links to {target}, which is not in the site"


def test_assistants_find_the_paths_that_their_page_names() -> None:
    page = (ROOT / "AGENTS.md").read_text()
    named = set(re.findall(r"(?<![\w./-])[\w.-]+/[\w./-]*", page))
    assert {"examples/loop.py", "rl/", "schedule/scheduler.py", "engines/", "tests/rl"} <= named
    folders = (ROOT, ROOT / "core" / "stretto", ROOT / "core" / "stretto" / "kernel", ROOT / "plugins")
    made = (".venv/", "runs/", "logs/", "checkpoints/")  # by `make` and by runs
    paths = {path for path in named if not path.startswith(made)}
    assert {path for path in paths if not any((folder / path).exists() for folder in folders)} == set()
    assert len(page.split()) <= 600


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    nav = re.findall(r"[\w-]+\.md", yaml.safe_dump(yaml.safe_load(text)["nav"]))
    assert sorted(nav) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_architecture_names_every_folder_of_the_core() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for package in (ROOT / "core" / "stretto").glob("*/__init__.py"):
        assert f"| `{package.parent.name}/` |" in page


def test_the_site_lists_every_key_figure_and_event() -> None:
    pages = load_module(str(ROOT / "docs" / "generated_pages.py"))
    plugins = Plugins()
    for line in plugins.listing():
        page = pages.component_keys(plugins, line.kind)
        assert f"## `{line.name}`" in page
        for field in fields_of(plugins.get(line.kind, line.name).config):
            assert f"| `{field.name}` |" in page
    assert "| `queue.max_staleness` | int >= 0 | `2` | Maximum staleness" in pages.core_keys()
    assert "| `variants.NAME." in pages.core_keys()
    assert all(f"| `{key}` |" in pages.figure_list() for key in FIGURES)
    assert "| `StepTrained` | `version`, " in pages.event_list()


def test_assistants_get_a_list_of_all_pages() -> None:
    pages = load_module(str(ROOT / "docs" / "generated_pages.py"))
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    text = pages.page_list(nav)
    assert text.startswith("# stretto\n\n> stretto trains language models")
    assert "\n## Begin\n\n- [The first hour](first-hour.html): " in text
    pages_named = set(re.findall(r"\]\(([\w-]+)\.html\)", text))
    assert pages_named == {page.stem for page in (ROOT / "docs").glob("*.md")} - {"README"}
