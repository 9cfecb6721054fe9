"""The pages of docs/ and the README: links hold, and their blocks do what the text says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from stretto.user_code.importable import load_module

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
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
        assert page.name == "README.md" or in_site, f"{page.name} links to {target}, which is not in the site"


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    nav = re.findall(r"[\w-]+\.md", yaml.safe_dump(yaml.safe_load(text)["nav"]))
    assert sorted(nav) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_troubleshooting_lists_every_message_with_what_to_do() -> None:
    errors = load_module(str(ROOT / "docs" / "fill_errors.py"))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert errors.filled(page) == page, "run `python docs/fill_errors.py`, and fill the empty cells"
    empty = [message for message, todo in errors.ROW.findall(page) if not todo.strip()]
    assert not empty, f"docs/troubleshooting.md does not say what to do about {empty}"


def test_the_lists_of_files_are_those_of_the_docstrings() -> None:
    files = load_module(str(ROOT / "docs" / "fill_files.py"))
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert files.filled(page) == page, "run `python docs/fill_files.py`"


def test_the_list_of_events_is_that_of_the_docstrings() -> None:
    events = load_module(str(ROOT / "docs" / "fill_events.py"))
    page = (ROOT / "docs" / "events.md").read_text()
    assert events.filled(page) == page, "run `python docs/fill_events.py`"
