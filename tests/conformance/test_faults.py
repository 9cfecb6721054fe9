"""The kit finds what is wrong with components that break their contract, and says it in words."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("name", ["broken", "broken_engines"])
def test_the_kit_finds_each_fault_and_no_other(name: str, tmp_path: Path) -> None:
    file, report = FOLDER / f"{name}.py", tmp_path / "report.xml"
    subprocess.run(
        # Broken components leave things open, for which pytest would blame a later test.
        [
            *(sys.executable, "-m", "pytest", file, "-q", f"--junitxml={report}"),
            *("-p", "no:cacheprovider", "-p", "no:unraisableexception"),
        ],
        check=False,
        stdout=subprocess.DEVNULL,
        cwd=FOLDER.parents[1],
    )
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        faults = [*case.iter("failure"), *case.iter("error")]
        tests = found.setdefault(case.attrib["classname"].rpartition(".")[2], {})
        tests |= {case.attrib["name"].removeprefix("test_"): fault.attrib["message"] for fault in faults}
    for test_class, expected in finds(file).items():
        assert found[test_class].keys() == expected.keys(), f"{test_class}: {found[test_class]}"
        for test, words in expected.items():
            assert words in found[test_class][test], f"{test_class}.{test}: {found[test_class][test]}"


def finds(file: Path) -> dict[str, dict[str, str]]:
    """The tests that fail and words of their messages, for each class of the file."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: value.finds for name, value in vars(module).items() if name.startswith("Test")}
