"""Run tests, and those that failed once more, each alone: `python .ci/second_chance.py PYTEST_ARGUMENT...`.

A test that passes the second time is unstable: it is written to `build/ci/unstable.txt` with its first
failure, and does not fail the run, unless `.ci/unstable.txt` has it with one of the last ten commits:
somebody said then that it was mended. A test that fails twice ends the run with its output last.
"""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).resolve().parents[1]
FOUND = ROOT / "build" / "ci" / "unstable.txt"
MENDED = ROOT / ".ci" / "unstable.txt"
MOST = 5
"""More failures than this are no accident: nothing is run again."""
_FAILED = 1


def main() -> int:
    """Run the tests; the exit status."""
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(dir=FOUND.parent))
    report = folder / "first.xml"
    own = ["-o", f"cache_dir={folder}", "-o", "junit_logging=no", f"--junitxml={report}"]
    status = _pytest(*own, *sys.argv[1:])
    if status != _FAILED:
        return status
    tests = sorted(json.loads((folder / "v" / "cache" / "lastfailed").read_text()))
    if len(tests) > MOST:
        return status
    tracebacks = list(_tracebacks(report))
    for test in tests:
        print(f"once more, alone: {test}", flush=True)
        if again := _pytest("-n0", "-p", "no:cacheprovider", test):
            return again
        with FOUND.open("a") as found:
            found.write(f"unstable: {test}\n{_of(test, tracebacks)}\n")
        if commit := _mended(test):
            print(f"{test} is unstable again: .ci/unstable.txt says that it was mended at {commit}")
            return _FAILED
    return 0


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=ROOT).returncode


def _tracebacks(report: Path) -> Iterator[tuple[str, str]]:
    """The name of each failed test, and how it failed."""
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - written by pytest just now
        for failure in (*case.iter("failure"), *case.iter("error")):
            yield case.get("name", ""), failure.text or ""


def _of(test: str, tracebacks: list[tuple[str, str]]) -> str:
    name = test.rpartition("::")[2]
    return "\n".join(text for failed, text in tracebacks if failed == name)


def _mended(test: str) -> str | None:
    """The commit of the last ten with which somebody has mended the test."""
    command = ["git", "rev-list", "-n", "10", "HEAD"]
    commits = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    lines = (line.split("#")[0].split() for line in MENDED.read_text().splitlines())
    for named, commit in (line for line in lines if line):
        if named == test and any(each.startswith(commit) for each in commits):
            return commit
    return None


if __name__ == "__main__":
    sys.exit(main())
