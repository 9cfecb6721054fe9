"""The public API is the one that `public_api.txt` lists."""

import importlib
from pathlib import Path

import pytest

import stretto
from public_api import CORE, public_api, public_modules
from stretto.api import API_VERSION, mismatch

GOLDEN = Path(__file__).with_name("public_api.txt")


def test_the_public_api_is_the_listed_one() -> None:
    assert public_api() == GOLDEN.read_text(), (
        "the public API has changed. If that is meant: python tests/helpers/public_api.py > "
        "tests/contracts/public_api.txt, and raise API_VERSION as RELEASING.md says"
    )


def test_the_list_has_every_name_that_a_module_offers() -> None:
    parts = {part.splitlines()[0]: part for part in GOLDEN.read_text().split("\n\n")}
    for path in public_modules():
        name = ".".join(path.relative_to(CORE.parent).with_suffix("").parts).removesuffix(".__init__")
        for offered in importlib.import_module(name).__all__:
            assert offered in parts[f"# {name}"], f"{name}.{offered}"


def test_the_list_shows_a_change_of_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text
    former, now = "def nearest(word", "def nearest(w"

    def read_changed(path: Path) -> str:
        return read(path).replace(former, now)

    monkeypatch.setattr(Path, "read_text", read_changed)
    assert "def nearest(w: str" in public_api()
    assert public_api() != read(GOLDEN)


def test_an_api_version_is_compared_with_that_of_this_stretto() -> None:
    major, minor = map(int, API_VERSION.split("."))
    assert stretto.API_VERSION == API_VERSION
    assert mismatch(API_VERSION) == ""
    assert "names may be missing; pip install -U stretto" in mismatch(f"{major}.{minor + 1}")
    assert "names may be missing" in mismatch(f"{major + 1}.0")
    assert "names may be gone" in mismatch(f"{major - 1}.9")
    for wrong in ("1", "1.0.0", "one", "1.x", "", "01.0"):
        with pytest.raises(ValueError, match=r"is no API version; expected MAJOR\.MINOR"):
            mismatch(wrong)
