"""Mark answers: find their programs, run them, and compare their results."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

from markdown_it import MarkdownIt
from markdown_it.token import Token

from stretto.program_runner import Execution, ProgramLimits, ProgramRunner
from stretto_code import CodeConfig
from stretto_code.comparing import same_text, same_value
from stretto_code.suites import Case

_PYTHON = ("python", "python3", "py")
# Answers are no HTML: a fence right below `<answer>` counts. Deep nesting costs time, and holds no program.
_MARKDOWN = MarkdownIt("commonmark", {"maxNesting": 12}).disable(
    ["inline", "html_block", "lheading", "reference"]
)
_CALLER = """
import json, os, sys, types

call = json.load(sys.stdin)
sys.stdin = open(os.devnull)
result = os.dup(1)
os.dup2(2, 1)  # what the function prints is no result

solution = sys.modules["solution"] = types.ModuleType("solution")
exec("from typing import *", solution.__dict__)
exec(compile(call["source"], "solution.py", "exec"), solution.__dict__)
name = call["function"]
owner = solution if hasattr(solution, name) or not hasattr(solution, "Solution") else solution.Solution()
value = getattr(owner, name)(*call["args"], **call["kwargs"])


def plain(value):
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    raise TypeError(f"the result is no value of JSON: {type(value).__name__}")


with os.fdopen(result, "w") as file:
    file.write(json.dumps(value, default=plain))
"""
"""Program that makes one call, in its own process, and writes the result to standard output as JSON."""


def program_of(completion: str) -> str:
    """Return the last fenced block of Python in an answer, else its last fenced block without a language.
    Without fences the whole answer is the program. Empty if there is no program."""
    fences = [token for token in _MARKDOWN.parse(f"{completion}\n") if token.type == "fence"]
    if not fences and "```" not in completion:
        return completion.strip()
    blocks = [
        ((token.info.split() or [""])[0].lower(), token.content) for token in fences if _is_closed(token)
    ]
    python = [text for language, text in blocks if language in _PYTHON]
    bare = [text for language, text in blocks if not language]
    return (python or bare or [""])[-1]


def _is_closed(fence: Token) -> bool:
    """Return whether a block has a closing fence. CommonMark also ends it with the text, list or quote."""
    first, end = fence.map or (0, 0)
    return end - first == fence.content.count("\n") + 2


class Marker:
    """Scores answers with a program runner."""

    def __init__(self, config: CodeConfig, runner: ProgramRunner) -> None:
        self._config = config
        self._runner = runner
        self._threads = ThreadPoolExecutor(config.parallel, thread_name_prefix="programs")

    def mark(self, completions: Sequence[str], suite: Sequence[Case]) -> list[dict[str, float]]:
        """Return the scores of the answers to one prompt, in their order."""
        return list(self._threads.map(self._mark, completions, repeat(suite)))

    def _mark(self, completion: str, suite: Sequence[Case]) -> dict[str, float]:
        program = program_of(completion)
        metrics = {"no_program": float(not program), "over_time": 0.0, "over_limit": 0.0, "crashed": 0.0}
        deadline = time.monotonic() + self._config.answer_s
        passed = 0
        for case in suite if program else ():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                metrics["over_time"] = 1.0
                break
            execution = self._run(program, case, min(self._config.time_s, left_s))
            if kind := _fault(execution):
                metrics[kind] = 1.0
            right = not kind and self._is_right(execution.output, case)
            passed += right
            if execution.ending == "time" or (not right and self._config.credit == "all"):
                break
        all_right = float(passed == len(suite))
        reward = all_right if self._config.credit == "all" else passed / len(suite)
        return {"reward": reward, "accuracy": all_right, **metrics}

    def _run(self, program: str, case: Case, time_s: float) -> Execution:
        config = self._config
        limits = ProgramLimits(
            time_s=time_s,
            memory_mb=config.memory_mb,
            processes=config.processes,
            output_kb=config.output_kb,
            disk_mb=config.disk_mb,
        )
        if case.function:
            call = {
                "source": program,
                "function": case.function,
                "args": case.args,
                "kwargs": case.kwargs or {},
            }
            return self._runner.run(_CALLER, json.dumps(call).encode(), limits)
        return self._runner.run(program, case.stdin.encode(errors="replace"), limits)

    def _is_right(self, output: bytes, case: Case) -> bool:
        tolerance = self._config.tolerance
        if not case.function:
            return same_text(output.decode(errors="replace"), case.expected[0], tolerance)
        try:
            value = json.loads(output)
        except (ValueError, RecursionError):
            return False
        return any(same_value(value, expected, tolerance) for expected in case.expected)


def _fault(execution: Execution) -> str:
    """Return the metric that counts this kind of failure; empty if the program ended well."""
    if execution.ending == "exit":
        return "crashed" if execution.status else ""
    return {"time": "over_time", "signal": "crashed"}.get(execution.ending, "over_limit")
