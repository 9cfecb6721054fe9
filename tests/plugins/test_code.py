"""The reward `code`: right, wrong and hostile programs, by what real sandboxes make of them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.conftest import write_run_file

import hostile_programs
from patience import patience
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.errors import ConfigError, RewardError
from stretto.program_runner import Execution, ProgramLimits
from stretto.user_code.scoring import score_group
from stretto_code import CodeConfig, check_row
from stretto_code.comparing import same_text, same_value
from stretto_code.marking import Marker, program_of
from stretto_code.programs import SandboxRunner
from stretto_code.suites import Case, read_suite

TIME_S = 2.0
"""Limit of a hostile program; those that would run for ever take so long."""
LIMITS = ProgramLimits(time_s=20, memory_mb=128, processes=8, output_kb=64, disk_mb=4)
CALLS = [{"call": "add", "args": [2, 3], "expected": 5}, {"call": "add", "args": [20, 22], "expected": 42}]
TEXTS = [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "20 22\n", "stdout": "42\n"}]
ADD = "def add(a, b):\n    return a + b\n"
PRINT_SUM = "a, b = map(int, input().split())\nprint(a + b)\n"


@pytest.fixture(scope="module")
def runner() -> Iterator[SandboxRunner]:
    os.environ["SECRET_OF_THE_RUN"] = "SECRET"
    with closing(SandboxRunner("bubblewrap", 2, ("json", "typing"))) as runner:
        yield runner
    del os.environ["SECRET_OF_THE_RUN"]


def config(**keys: Any) -> CodeConfig:
    limits: dict[str, Any] = {"time_s": 20.0, "memory_mb": 128, "processes": 8, "output_kb": 64, "disk_mb": 4}
    return CodeConfig(use="code", **{**limits, **keys})


def rewards(runner: SandboxRunner, tests: Any, *answers: str, **keys: Any) -> list[float]:
    marks = Marker(config(**keys), runner).mark(answers, read_suite(tests, {}))
    return [mark["reward"] for mark in marks]


# ------------------------------------------------------------------------------------- right and wrong

RIGHT_CALLS = {
    "plain": ADD,
    "in a fence": f"Here it is:\n```python\n{ADD}```\nIt adds.",
    "prints something": "def add(a, b):\n    print('adding', a, b)\n    return a + b",
    "class Solution": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b",
    "annotations of typing": "def add(a: Optional[int], b: List[int]) -> Any: return a + b",
    "a helper and a main": f"{ADD}\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))",
    "lambda": "add = lambda a, b: a + b",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    a: int\n    b: int\n"
    "def add(a, b):\n    p = P(a, b)\n    return p.a + p.b",
    "future": f"from __future__ import annotations\n{ADD}",
    "deep recursion": "import sys\nsys.setrecursionlimit(5000)\ndef add(a, b): return f(1500, a + b)\n"
    "def f(n, x): return x if n == 0 else f(n - 1, x)",
    "a thread with a large stack": "import threading\nthreading.stack_size(2**26)\ndef add(a, b):\n"
    "    r = []\n    t = threading.Thread(target=lambda: r.append(a + b))\n    t.start(); t.join()\n"
    "    return r[0]",
    "a file of its own": "def add(a, b):\n    open('x', 'w').write(str(a + b))\n"
    "    return int(open('x').read())",
    "a process": "import subprocess\ndef add(a, b):\n"
    "    return int(subprocess.run(['expr', str(a), '+', str(b)], capture_output=True).stdout)",
}
WRONG_CALLS = {
    "wrong": "def add(a, b): return a - b",
    "right once": "def add(a, b): return 5",
    "list": "def add(a, b): return [a + b]",
    "other name": "def plus(a, b): return a + b",
    "raises": "def add(a, b): raise ValueError",
    "syntax": "def add(a, b) return a + b",
    "prints": "def add(a, b): print(a + b)",
    "prose": "I would add the numbers.",
    "empty": "",
}
RIGHT_TEXTS = {
    "plain": PRINT_SUM,
    "reads all": "import sys\na, b = sys.stdin.read().split()\nprint(int(a) + int(b))",
    "reads the device": "a, b = open('/dev/stdin').read().split()\nprint(int(a) + int(b))",
    "reads bytes": "import os\na, b = os.read(0, 100).split()\nos.write(1, b'%d' % (int(a) + int(b)))",
    "main": "def main(): print(sum(map(int, input().split())))\nif __name__ == '__main__': main()",
    "exits well": PRINT_SUM + "import sys; sys.exit(0)",
    "prints at the end": PRINT_SUM.replace("print(", "import atexit; atexit.register(print, "),
    "prints in a thread": PRINT_SUM.replace(
        "print(a + b)", "import threading; threading.Thread(target=lambda: print(a + b)).start()"
    ),
    "imports numpy": "import numpy\nprint(numpy.array(input().split(), int).sum())",
}
WRONG_TEXTS = {
    "wrong": PRINT_SUM.replace("a + b", "a * b"),
    "two words": PRINT_SUM.replace("a + b", "a + b, 0"),
    "nothing": "input()",
    "raises after it printed": PRINT_SUM + "1 / 0",
    "exit status": PRINT_SUM + "import sys; sys.exit(1)",
}


PROGRAMS = [
    pytest.param(tests, programs[name], float(right), id=f"{kind} {name}")
    for kind, tests, programs, right in (
        ("right function", CALLS, RIGHT_CALLS, True),
        ("wrong function", CALLS, WRONG_CALLS, False),
        ("right program", TEXTS, RIGHT_TEXTS, True),
        ("wrong program", TEXTS, WRONG_TEXTS, False),
    )
    for name in programs
]


@pytest.mark.parametrize(("tests", "program", "reward"), PROGRAMS)
def test_right_programs_score_1_and_wrong_ones_0(
    runner: SandboxRunner, tests: Any, program: str, reward: float
) -> None:
    large: dict[str, Any] = {"memory_mb": 512} if "thread" in program or "numpy" in program else {}
    assert rewards(runner, tests, program, **large) == [reward]


def test_a_python_that_is_installed_below_tmp_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program's own `/tmp` does not hide it, and the program cannot write to it."""
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "installed.py").write_text("value = 5\n")
    monkeypatch.syspath_prepend(folder)
    program = f"""
import sys
sys.path.insert(0, {str(folder)!r})
import installed
try:
    open({str(folder)!r} + "/mine", "w")
except OSError:
    print(installed.value)
"""
    with closing(SandboxRunner("bubblewrap", 1)) as runner:
        execution = runner.run(program, b"", LIMITS)
    assert (execution.output, execution.errors) == (b"5\n", b"")


def test_credit_may_be_the_share_of_passed_tests(runner: SandboxRunner) -> None:
    answers = (ADD, "def add(a, b): return 5", "def add(a, b): return 6")
    assert rewards(runner, CALLS, *answers, credit="share") == [1.0, 0.5, 0.0]


def test_metrics_say_how_programs_failed(runner: SandboxRunner) -> None:
    answers = ("", "while True: pass", "while True: print(1)", "1 / 0", PRINT_SUM)
    marks = Marker(config(time_s=1.0), runner).mark(answers, read_suite(TEXTS, {}))
    names = ("no_program", "over_time", "over_limit", "crashed", "accuracy")
    assert [[mark[name] for name in names] for mark in marks] == [
        [float(row == column) for column in range(5)] for row in range(5)
    ]


def test_an_answer_has_a_time_limit_for_all_its_tests(runner: SandboxRunner) -> None:
    slow = f"import time; time.sleep(0.4)\n{PRINT_SUM}"
    started = time.monotonic()
    assert rewards(runner, TEXTS * 50, slow, answer_s=1.0) == [0.0]
    assert time.monotonic() - started < patience(5)


# ------------------------------------------------------------------------------------------- hostile


@pytest.fixture(scope="module")
def canary() -> Iterator[Path]:
    """A file that hostile programs should not reach."""
    file = Path.home() / f".stretto-canary-{os.getpid()}"
    file.write_text("SECRET")
    yield file
    assert file.read_text() == "SECRET"
    file.unlink()


ATTACKS = [
    *hostile_programs.QUICK.values(),
    *(pytest.param(program, marks=pytest.mark.slow) for program in hostile_programs.LASTING.values()),
]


@pytest.mark.parametrize("program", ATTACKS, ids=[*hostile_programs.QUICK, *hostile_programs.LASTING])
def test_a_hostile_program_is_contained(runner: SandboxRunner, canary: Path, program: str) -> None:
    """Score a hostile program in both ways, beside a right one, which must not notice."""
    executions: list[Execution] = []

    def run(*asked: Any) -> Execution:
        executions.append(runner.run(*asked))
        return executions[-1]

    recorder: Any = SimpleNamespace(run=run)
    hostile = Marker(config(time_s=TIME_S), recorder)
    with ThreadPoolExecutor(1) as other:
        for tests in (CALLS, TEXTS):
            suite = read_suite(tests, {})
            started = time.monotonic()
            neighbour = other.submit(rewards, runner, TEXTS, PRINT_SUM)
            [mark] = hostile.mark([program], suite)
            took = time.monotonic() - started
            assert mark["reward"] == 0
            assert took < TIME_S * len(tests) + 3
            assert neighbour.result(timeout=patience()) == [1.0]
    assert not [each for each in executions if b"ESCAPED" in each.output or b"SECRET" in each.output]
    assert rewards(runner, CALLS, ADD) == [1.0]


# ------------------------------------------------------------------------------- sandboxes and runners


def test_no_process_of_a_program_is_left(runner: SandboxRunner) -> None:
    rewards(runner, TEXTS, *[hostile_programs.QUICK[name] for name in ("daemon", "zombies", "fork bomb")])
    assert rewards(runner, TEXTS, PRINT_SUM) == [1.0]
    assert below_warm_pythons() == []


def below_warm_pythons() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a supervisor may end while it is looked at
            command = " ".join(each.cmdline())
            if each.name().startswith("python") and "warm_python.py" in command and "guard.py" not in command:
                found += each.children()
    return psutil.wait_procs(found, timeout=patience())[1]  # a supervisor ends just after its answer


def test_a_lost_sandbox_is_replaced(runner: SandboxRunner) -> None:
    for each in psutil.Process().children():
        if "bwrap" in each.name():
            each.kill()
            each.wait(patience())
    assert rewards(runner, CALLS, *[ADD] * 4) == [1.0] * 4


def test_programs_without_a_sandbox_have_limits_all_the_same() -> None:
    programs = (
        ADD,
        "x = [0] * 10**9",
        "while True: pass",
        hostile_programs.QUICK["vfork bomb"],
        hostile_programs.QUICK["one large file"],
        ADD + "import os\nassert not [name for name in os.environ if 'SECRET' in name]",
    )
    with closing(SandboxRunner("unsafe", 1, ("json", "typing"))) as unsafe:
        assert rewards(unsafe, CALLS, *programs, time_s=2.0) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
        assert below_warm_pythons() == []


class PlainRunner:
    """What the reward uses of a `ProgramRunner`: a process for each program, and no sandbox."""

    def __init__(self, parallel: int, python: str) -> None:
        assert parallel == 2
        self._python = python

    def run(self, source: str, stdin: bytes, limits: ProgramLimits) -> Execution:
        argv = [self._python, "-I", "-c", source]
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=limits.time_s, check=False)
        return Execution(ending="exit", status=done.returncode, output=done.stdout, errors=done.stderr)


def composed(folder: Path, **reward: Any) -> Any:
    keys = {"use": "code", "time_s": 20.0, **reward}
    return compose(write_run_file(folder), [f"reward={json.dumps(keys)}"])


def test_another_package_can_run_the_programs(tmp_path: Path) -> None:
    run = composed(
        tmp_path, runner=f"{__file__}:PlainRunner", runner_options={"python": sys.executable}, parallel=2
    )
    reward = Assembly(run, folder="").make("reward")
    row = {"prompt": "Add.", "tests": CALLS}
    scores = score_group(reward, row, (ADD, "def add(a, b): return 5"), {})
    assert [score for score, _ in scores] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"answer_cpu_s": 1.0}, "set time_s"),
        ({"runner_options": {"a": 1}}, "no runner"),
        ({"credit": "some"}, "credit"),
    ],
)
def test_a_wrong_section_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed(tmp_path, **keys)


def test_a_machine_without_a_sandbox_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(RewardError, match="No permissions to create new namespace"):
        SandboxRunner("bubblewrap", 1)


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(RewardError, match="No module named 'nowhere'"):
        SandboxRunner("bubblewrap", 1, ("nowhere",))


# --------------------------------------------------------------------------------- rows and comparison


def test_tests_are_read_in_the_forms_of_data_sets() -> None:
    call, text = Case((5,), "", "add", [2, 3]), Case(("5",), "2 3")
    live_code_bench = [{"input": "2\n3", "output": "5", "testtype": "functional"}]
    for mark in ("\u2028", "\u2029", "\x85"):
        text_call = [{"input": f'"{mark}a"\r\n3', "output": f'"{mark}"', "testtype": "functional"}]
        assert read_suite(text_call, {"fn_name": "add"}) == [Case((mark,), "", "add", [f"{mark}a", 3])]
    lists = {"inputs": [[2, 3]], "outputs": [5], "fn_name": "add"}
    assert read_suite([{"call": "add", "args": [2, 3], "expected": 5}], {}) == [call]
    assert read_suite(json.dumps(live_code_bench), {"fn_name": "add"}) == [call]
    assert read_suite(lists, {}) == read_suite(json.dumps(lists), {}) == [call]
    assert read_suite({"inputs": [[2, 3]], "outputs": [[5]], "fn_name": "add"}, {}) == [
        Case(([5], 5), "", "add", [2, 3])
    ]
    assert read_suite({"inputs": ["2 3"], "outputs": ["5"]}, {}) == [text]
    assert read_suite([{"input": "2 3", "output": "5", "testtype": "stdin"}], {}) == [text]
    assert read_suite([{"stdin": ["2 3"], "stdout": "5"}], {}) == [text]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("[{", "expected JSON"),
        ([], "no tests"),
        (5, "expected a list of tests"),
        ([5], "test 0: expected a map"),
        ([{"stdin": "1"}], "no 'stdout'"),
        ([{"call": "f", "args": []}], "no 'expected'"),
        ([{"call": "f", "kwarg": {"a": 1}, "expected": 2}], "test 0 has 'kwarg'"),
        ('[{"stdin": "1", "stdout": "2", "stdout": "3"}]', "has the key 'stdout' twice"),
        ({"inputs": ["1"]}, "no 'outputs'"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs, but 0 outputs"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "no column `fn_name`"),
        ({"inputs": [1], "outputs": [2], "fn_name": "f"}, "expected a list of arguments"),
        ({"inputs": [1], "outputs": [2]}, "expected text, found 2"),
    ],
)
def test_tests_that_cannot_be_read_are_named(tests: Any, message: str) -> None:
    assert message in check_row(config(), {"tests": tests})
    assert check_row(config(), {"answer": "5"}) == "no column 'tests' with tests; the row's columns: answer"


def test_values_are_compared_as_json() -> None:
    same: list[Any] = [(5, 5), (5.0, 5), (0.1 + 0.2, 0.3), (5, 5.000000001), (10**400, 10**400)]
    same += [([1, [2]], (1, [2])), ({"a": 1}, {"a": 1.0}), ({"1": 1}, {1: 1}), ("a", "a"), (None, None)]
    other: list[Any] = [(0.31, 0.3), (1000000400.0, 1000000007), (5.000000001, 5), (10**400, 1.5), (True, 1)]
    other += [(1, True), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ("5", 5), (None, 0)]
    assert [(one, other) for one, other in same if not same_value(one, other, 1e-6)] == []
    assert [(one, another) for one, another in other if same_value(one, another, 1e-6)] == []


def test_output_is_compared_by_lines_and_words() -> None:
    same = [("5\n", "5"), ("5  \n\n", "5"), ("a b", "a  b"), ("", ""), ("5\r\n6\r\n", "5\n6")]
    same += [("5.0", "5"), ("0.33333333", "0.333333333"), ("1000000007.0", "1000000007"), ("1e3", "1000")]
    same += [("10e399", "1e400")]
    other = [("5\n6", "5"), ("5", "5\n6"), ("\n5", "5"), ("yes", "YES"), ("nan", "1.0"), ("05", "5")]
    other += [("10000000", "10000001"), ("1000000400.0", "1000000007"), ("0.0000001", "0"), ("٣.0", "3")]
    other += [("1e400", "1e999"), ("1e9999999999", "5"), ("5\u20286", "5\n6"), ("5\x0b6", "5\n6")]
    assert [pair for pair in same if not same_text(pair[0], pair[1], 1e-6)] == []
    assert [pair for pair in other if same_text(pair[0], pair[1], 1e-6)] == []


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```\nout\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```rust\na\n```", ""),
        ("```python\na", ""),
        ("```py\n```\n", ""),
        ("```py\n```x\n``` \nb", "```x\n"),
        ("```a```\n```py\na\n```", "a\n"),
        ("1. It adds:\n   ```python\n   if a:\n       b\n   ```\n2. Done.", "if a:\n    b\n"),
        ("- x\n  > ~~~Py title=a\n  > b\n  > ~~~", "b\n"),
        ("<answer>\n```python\na\n```\n</answer>", "a\n"),
        ("````md\n```python\na\n```\n````\n```python\nb\n```", "b\n"),
        ("> ```python\n> a\n\nb", ""),  # only the quote ends
        ("1. x\n   ```py\n   a\n\nb\n", ""),
        ("x = ~~~5", "x = ~~~5"),
    ],
)
def test_the_program_is_the_last_block_of_python(answer: str, program: str) -> None:
    assert program_of(answer) == program


@pytest.mark.parametrize("word", ["{}x", "1.{}x", "{}.5", "1e{}", "1.{}e1"])
def test_a_long_word_costs_little_time(word: str) -> None:
    before = time.process_time()
    for expected in ("5", "5.5"):
        assert not same_text(word.format("1" * 2**20), expected, 1e-6)
    assert time.process_time() - before < 1


@pytest.mark.parametrize(
    "line", ["```x", "```", "`````", "``` py", "> " * 18 + "```", "- " * 30 + "```", ">" * 999 + "```"]
)
def test_many_fences_cost_little_time(line: str) -> None:
    before = time.process_time()
    assert "\n" not in program_of(f"{line}\n" * (200_000 // len(line)))
    assert time.process_time() - before < 1
