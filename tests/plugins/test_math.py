"""The reward `math`: which answers are right, which rows it can score, and what a hostile answer may cost."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from patience import SOON_S, patience
from stretto import Context
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose_mapping
from stretto.cli.start.checks import problems
from stretto.component import Problem
from stretto.errors import RewardError
from stretto.user_code.limits import AnswerLimits, score_within
from stretto.user_code.protocol import HEAD, Started, framed
from stretto.user_code.reward import COMMAND, ScoringResult, Task, setup_frame
from stretto_math import MathConfig, check_row
from stretto_math import make as make_math

CONTEXT = Context(run="r", name="n", seed=1)
PAIRS = Path(__file__).with_name("math_pairs.txt")


def pairs() -> Iterator[tuple[str, str, float]]:
    gold = ""
    for line in PAIRS.read_text().splitlines():
        line = line.replace("⏎", "\n")
        if line.startswith("gold: "):
            gold = line.removeprefix("gold: ")
        elif line and not line.startswith("#"):
            score, _, completion = line.partition(" ")
            yield gold, completion, float(score)


@pytest.fixture(scope="module")
def math() -> Callable[..., float]:
    score = make_math(MathConfig(use="math"), CONTEXT)

    def accuracy(*texts: str, **columns: str) -> float:
        return score(*texts, **columns)["accuracy"]

    return accuracy


def test_right_and_wrong_answers_are_told_apart(math: Callable[..., float]) -> None:
    given = list(pairs())
    assert len(given) >= 200
    assert 100 <= sum(score for *_, score in given) <= len(given) - 100
    assert [each for each in given if math("", each[1], answer=each[0]) != each[2]] == []


_GOLDS = r"""
2\sqrt{3}; 10^{6}; 1+i; (1,2); [0,1]; \pi; x^2+2x+1; \{1,2\}; \text{A}; A; 72; \frac{14}{3}; p - q; 90^\circ
\left( 3, \frac{\pi}{2} \right); \text{Evelyn}; \$18.90; [-2,7]; 6 - 5i; 2516_8; x \in (-\infty,-2)\cup[3,5)
\begin{pmatrix} -2 \\ 1 \end{pmatrix}; \frac{\sqrt{21}}{5}; 11\sqrt2; 1,-2; \frac{3}{56}; y = 2x + 3; 4!
5.4 \text{ cents}; 1 \pm \sqrt{19}; 2k + 2; -\frac{1}{2} + \frac{i}{2}; 10\%; 3 \le x < 7; \text{even}; \infty
"""
BARE = [gold for line in _GOLDS.strip().splitlines() for gold in line.split("; ")]


BOXED = r"\boxed{{{}}}"


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        *(("{}", answer) for answer in ("{}", BOXED, "So the answer is ${}$.")),
        *((expected, BOXED) for expected in ("$ {} $", r"\( {} \)", "$${}$$", BOXED)),
        (r"It follows that $\boxed{{{}}}$.", BOXED),
    ],
)
def test_an_expected_answer_is_right_itself_in_any_wrapping(
    math: Callable[..., float], expected: str, answer: str
) -> None:
    wrong = [gold for gold in BARE if math("", answer.format(gold), answer=expected.format(gold)) != 1]
    assert not wrong


@pytest.mark.parametrize("gold", ["", "?", "...", r"\frac{1}{", "$$", r"\boxed{}"])
def test_a_row_whose_expected_answer_says_nothing_is_a_failure(math: Callable[..., float], gold: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read the expected answer .* of row 'r7'"):
        math("", "1", answer=gold, id="r7")
    assert "cannot read the expected answer" in check_row(MathConfig(use="math"), {"answer": gold})


# ----------------------------------------------------------------------------------- hostile answers

MB = 2**20


def matrix(brackets: str, row: Sequence[str], rows: int) -> str:
    lines = r"\\".join(["&".join(row)] * rows)
    return rf"\boxed{{\begin{{{brackets}matrix}}{lines}\end{{{brackets}matrix}}}}"


HOSTILE = {
    "a set of 3,000 expressions": r"\boxed{\{" + ",".join(rf"\sqrt{{{n}}}" for n in range(3000)) + r"\}}",
    "a set of 3,000 numbers": r"\boxed{\{" + ",".join(map(str, range(3000))) + r"\}}",
    "a tower of powers": r"\boxed{10^{10^{10}}}",
    "a high tower": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "powers in an exponent": r"\boxed{2^{2^{40}} - 2^{2^{39}}}",
    "a factorial": r"\boxed{1000000000!}",
    "factorials of factorials": r"\boxed{((9!)!)!}",
    "a binomial": r"\boxed{\binom{10^9}{5\cdot 10^8}}",
    "nested braces": r"\boxed{" + "{" * 100_000 + "1" + "}" * 100_000 + "}",
    "nested fractions": r"\boxed{" + r"\frac{1}{1+" * 400 + "1" + "}" * 401,
    "nested roots": r"\boxed{" + r"\sqrt{1+" * 300 + "2" + "}" * 301,
    "nested parentheses": r"\boxed{" + "(" * 20_000 + "x+1" + ")" * 20_000 + "}",
    "nested boxes": r"\boxed{" * 40_000 + "1" + "}" * 40_000,
    "boxes that never close": r"\boxed{1 " * 100_000,
    "a matrix of 300 x 300": matrix("p", ["x^2"] * 300, 300),
    "a determinant": matrix("v", "abcdefghjk", 10),
    "1 MB of digits": r"\boxed{" + "7" * MB + "}",
    "1 MB of words": "the answer is of no use " * (MB // 24),
    "1 MB of announcements": "answer is " * (MB // 10),
    "1 MB of dollars": "$" * MB,
    "1 MB of openings": r"\(" * (MB // 2),
    "1 MB of spaces": "the answer is" + " " * MB + "x",
    "1 MB of one formula": r"\boxed{" + "x+" * (MB // 2) + "1}",
    "1 MB of commas": r"\boxed{" + "," * MB + "}",
    "a long polynomial": r"\boxed{(1+x+y+z)^{500}(1-x-y-z)^{500}}",
    "a sum without end": r"\boxed{\sum_{k=1}^{10^{9}} \frac{\sin k}{k!}}",
    "an integral": r"\boxed{\int_0^1 \sin(\cos(\tan(x^{x^x}))) dx}",
    "a huge exponent": r"\boxed{1e999999999}",
    "an exponent in the base": r"\boxed{(1.000000001)^{10^{15}}}",
}  # fmt: skip


RUN = {"name": "math", "algorithm": "grpo", "training": "mock", "inference": "mock", "steps": 1}


class Scorer:
    """A scoring process, spoken to as a verifier does."""

    def __init__(self, **reward: Any) -> None:
        composed = compose_mapping({**RUN, "dataset": {"use": "jsonl", "path": __file__}, "reward": reward})
        self.process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        document = msgspec.to_builtins(composed.config)
        started = msgspec.msgpack.decode(self._ask(setup_frame(document, CONTEXT)), type=Started)
        assert not started.error

    def score(self, row: dict[str, Any], *completions: str) -> ScoringResult:
        task = Task(msgspec.msgpack.encode(row), completions, msgspec.msgpack.encode({}))
        return msgspec.msgpack.decode(self._ask(msgspec.msgpack.encode(task)), type=ScoringResult)

    def _ask(self, data: bytes) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(framed(7, data))
        self.process.stdin.flush()
        size, number = HEAD.unpack(self.process.stdout.read(HEAD.size))
        assert number == 7
        return self.process.stdout.read(size)

    def usage(self, row: dict[str, Any], *completions: str) -> tuple[ScoringResult, float, float]:
        """The scores, their seconds of processor time, and the most MB that all processes held."""
        main, most, done = psutil.Process(self.process.pid), 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.is_set():
                held = 0
                for each in (main, *main.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        held += each.memory_info().rss
                most = max(most, held)
                time.sleep(SOON_S)

        watcher = threading.Thread(target=watch)
        watcher.start()
        before = sum(main.cpu_times()[:4])  # its own, and those of the forks that it waited for
        try:
            answer = self.score(row, *completions)
        finally:
            done.set()
            watcher.join()
        return answer, sum(main.cpu_times()[:4]) - before, most / MB


@pytest.fixture
def scorer() -> Iterator[Callable[..., Scorer]]:
    started: list[Scorer] = []

    def start(**reward: Any) -> Scorer:
        started.append(Scorer(**reward))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.mark.slow
def test_a_hostile_answer_costs_at_most_2_s_and_64_mib(scorer: Callable[..., Scorer]) -> None:
    process, row = scorer(use="math"), {"prompt": "p", "answer": "1"}
    _, _, before = process.usage(row, r"\boxed{1}", r"\boxed{x+1}")  # SymPy alone takes 190 MB
    dear: dict[str, Any] = {}
    for name, completion in HOSTILE.items():
        answer, seconds, megabytes = process.usage(row, r"\boxed{1}", completion, r"\boxed{1}")
        print(f"{name:32} {seconds:5.2f} s {megabytes:4.0f} MB  {answer.over.get(1, 'scored')}")
        rewards = [reward for reward, _ in answer.scores]
        expected = 1.0 if name in ("nested braces", "nested boxes") else 0.0
        if seconds > 2 or megabytes - before > 70 or rewards not in ([1, 0, 1], [1, expected, 1]):
            dear[name] = (seconds, megabytes, rewards, answer.fault)
    assert not dear


def test_an_answer_beyond_a_limit_scores_0_says_why_and_leaves_the_others_their_scores(
    scorer: Callable[..., Scorer], tmp_path: Path
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "import os\n"
        "def score(prompt, completion):\n"
        "    if completion == 'forever':\n"
        "        while True: pass\n"
        "    if completion == 'huge':\n"
        "        return float(len(bytearray(2**30)))\n"
        "    if completion == 'dies':\n"
        "        os._exit(3)\n"
        "    return {'reward': 2.0, 'length': len(completion)}\n"
    )
    limits = {"answer_cpu_s": 0.2, "answer_memory_mb": 64, "timeout_s": patience(30)}
    process = scorer(use="function", function=f"{file}:score", **limits)
    answer, seconds, megabytes = process.usage({"prompt": "p"}, "a", "forever", "huge", "dies", "b")
    assert [reward for reward, _ in answer.scores] == [2, 0, 0, 0, 2]
    assert answer.over == {
        1: "needs more than 0.2 s of processor time (answer_cpu_s)",
        2: "needs more than 64 MiB of memory",
        3: "ended the process that scored it: exit status 3",
    }
    metrics = [metrics for _, metrics in answer.scores]
    assert [each["over_time"] for each in metrics] == [0, 1, 0, 0, 0]
    assert [each["over_memory"] for each in metrics] == [0, 0, 1, 0, 0]
    assert [each["crashed"] for each in metrics] == [0, 0, 0, 1, 0]
    assert metrics[0]["length"] == 1
    assert seconds < 1
    assert megabytes < 256
    assert not psutil.Process(process.process.pid).children()


def test_a_reward_that_raises_under_limits_is_a_failure_that_names_the_line(
    scorer: Callable[..., Scorer], tmp_path: Path
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def score(prompt, completion):\n    return 1 / (completion != 'b')\n")
    process = scorer(use="function", function=f"{file}:score", answer_cpu_s=1)
    answer = process.score({"prompt": "p"}, "a", "b")
    fault = answer.fault
    assert fault is not None
    assert fault.error.replace("float division", "division") == (
        f"reward raised ZeroDivisionError: division by zero ({file}:2)"
    )
    assert (fault.kind, fault.site) == ("environment", f"ZeroDivisionError {file}:2")
    assert process.score({"prompt": "p"}, "a").scores[0][0] == 1


def test_limits_of_one_answer_are_refused_where_a_call_scores_a_group(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def score(completions):\n    return [0.0] * len(completions)\n")
    reward = {"use": "function", "function": f"{file}:score", "answer_cpu_s": 1}
    problem = problem_of(tmp_path, [{"prompt": "p"}], "reward", reward)
    assert "scores all answers of a group in one call" in problem.message


def test_a_fork_never_returns_into_its_parents_code() -> None:
    ours = os.getpid()

    def score(index: int) -> tuple[float, dict[str, float]]:
        return float(os.getpid() != ours), {}

    assert [each.value for each in score_within(AnswerLimits(cpu_s=5), score, 3)] == [(1.0, {})] * 3

    def fail(index: int) -> tuple[float, dict[str, float]]:
        raise KeyError(index)

    with pytest.raises(RewardError, match="KeyError: 0"):
        score_within(AnswerLimits(cpu_s=5), fail, 1)

    def fail_unspeakably(index: int) -> tuple[float, dict[str, float]]:
        raise ValueError("\ud800")  # UTF-8 cannot say it

    with pytest.raises(RewardError, match=r"ValueError: \\ud800"):
        score_within(AnswerLimits(cpu_s=5), fail_unspeakably, 1)


# ---------------------------------------------------------------------------------------------- rows


def problem_of(folder: Path, rows: list[dict[str, str]], path: str, reward: dict[str, Any]) -> Problem:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {**RUN, "dataset": {"use": "jsonl", "path": str(file)}, "reward": reward}
    [problem] = [each for each in problems(Assembly(compose_mapping(run))) if each.path == path]
    return problem


def test_check_lists_rows_whose_expected_answer_cannot_be_read(tmp_path: Path) -> None:
    readable = BARE[:5]  # a busy machine reads no more of them in the time that the check takes
    rows = [{"prompt": "p", "answer": gold} for gold in (*readable, "?", r"\frac{1}{", "", "Evelyn")]
    problem = problem_of(tmp_path, rows, "dataset", {"use": "math"})
    first = len(readable) + 1
    assert problem.severity == "warning"
    assert problem.message.startswith(f"the reward cannot score 3 of {len(rows)} rows")
    assert f"row {first}: cannot read the expected answer '?' (column 'answer')" in problem.message
    assert f"row {first + 1}: cannot read the expected answer '\\\\frac{{1}}{{'" in problem.message


def test_check_refuses_rows_of_which_none_can_be_scored_and_reads_a_part_of_many(tmp_path: Path) -> None:
    problem = problem_of(tmp_path, [{"prompt": "p", "solution": "1"}] * 30_000, "dataset", {"use": "math"})
    assert problem.severity == "error"
    assert "of 30,000 rows, drawn at random" in problem.message
    assert "no column 'answer'; its columns: solution" in problem.message
