"""The kit finds what is wrong with components that break their contract, and says it in words."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stretto.user_code.importable import load_module

FILE = Path(__file__).with_name("broken.py")


@pytest.mark.slow
def test_the_kit_finds_each_fault_and_no_other(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    subprocess.run(
        # Broken components leave things open, for which pytest would blame a later test.
        [
            *(sys.executable, "-m", "pytest", FILE, "-q", f"--junitxml={report}"),
            *("-p", "no:cacheprovider", "-p", "no:unraisableexception"),
            # All tests of the torch engine would take minutes.
            *("-k", "not Forgetful or keep_cache or drawn_with and temperature and not top and not bias"),
        ],
        check=False,
        stdout=subprocess.DEVNULL,
        cwd=FILE.parents[2],
    )
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        faults = [*case.iter("failure"), *case.iter("error")]
        tests = found.setdefault(case.attrib["classname"].rpartition(".")[2], {})
        tests |= {case.attrib["name"].removeprefix("test_"): fault.text or "" for fault in faults}
    kits = {name: kit for name, kit in vars(load_module(str(FILE))).items() if name.startswith("Test")}
    for name, kit in kits.items():
        assert found[name].keys() == kit.finds.keys(), f"{name}: {found[name]}"
        for test, words in kit.finds.items():
            assert words in found[name][test], f"{name}.{test}: {found[name][test]}"
