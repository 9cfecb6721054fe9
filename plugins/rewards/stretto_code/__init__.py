"""Reward `code`: runs the program of an answer in the sandbox, and compares its results with the row's tests.

The program never gets an expected value: this process compares. So nothing that a program does to Python, or
writes anywhere, can make a wrong result right. See docs/rewards.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from stretto import Component, Context, Problem, hookimpl
from stretto.component import Importable, NonNegativeFloat, PositiveFloat, PositiveInt
from stretto.config import RunConfig
from stretto.program_runner import ProgramRunner
from stretto.reward import ResultRewardConfig, text_of

__all__ = ["CodeConfig"]

_COMMON = (
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "io",
    "itertools", "json", "math", "operator", "queue", "random", "re", "statistics", "string", "typing",
)  # fmt: skip


class CodeConfig(ResultRewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `code`."""

    timeout_s: PositiveFloat = 300.0
    """Time limit for scoring one group, in seconds, as for every reward. It must allow for the `answer_s` of
    all answers, of which `parallel` run at the same time."""
    column: str = "tests"
    """Column with the tests of a row (docs/rewards.md has their forms)."""
    credit: Literal["all", "share"] = "all"
    """`all`: 1 if the program passes every test, else 0; a program that failed a test runs no further ones.
    `share`: the share of the tests that it passes."""
    time_s: PositiveFloat = 5.0
    """Time limit of one test, in seconds by the clock. A program that exceeds it runs no further tests; these
    count as failed."""
    answer_s: PositiveFloat = 30.0
    """Time limit of all tests of one answer together, in seconds by the clock."""
    memory_mb: PositiveInt = 256
    """Limit of a program's memory in MiB, in addition to that of the warm Python: the address space of each
    process, and the resident memory of all its processes."""
    processes: PositiveInt = 16
    """Maximum number of processes and threads of a program, itself included."""
    output_kb: PositiveInt = 1024
    """Maximum size of a program's output in KiB, standard error included."""
    disk_mb: PositiveInt = 16
    """Maximum size of a program's folder in MiB. The folder is in memory."""
    parallel: PositiveInt = 2
    """Number of programs that each scoring process runs at the same time. A run has `verifier.processes` ×
    `verifier.children` scoring processes."""
    tolerance: NonNegativeFloat = 1e-6
    """Largest relative or absolute difference between a number and an expected number that has a fraction.
    Whole expected numbers are compared exactly."""
    imports: tuple[str, ...] = _COMMON
    """Modules that are imported before programs start, so that programs get them at no cost. Programs may
    import other installed modules too."""
    runner: Importable | None = None
    """Function that makes another program runner (`stretto.program_runner`), such as one with containers, in
    place of stretto's own. It is called with `parallel` and the keys of `runner_options`."""
    runner_options: Mapping[str, Any] = {}
    """Arguments for `runner`."""

    def __post_init__(self) -> None:
        if any(self.limits):
            raise ValueError(
                "answer_cpu_s and answer_memory_mb do not apply to `code`; set `time_s`, `answer_s` and "
                "`memory_mb`"
            )
        if self.runner_options and self.runner is None:
            raise ValueError("runner_options are set, but no `runner`")


def make(config: CodeConfig, context: Context) -> Callable[..., list[dict[str, float]]]:
    """Return the scoring function; it scores all answers of a group at once."""
    from stretto_code.marking import Marker
    from stretto_code.suites import read_suite

    marker = Marker(config, _runner(config, context))

    def code(completions: Sequence[Any], prompts: Sequence[Any], **columns: Any) -> list[dict[str, float]]:
        del prompts  # so that `columns` has the row's columns alone
        row = {name: values[0] for name, values in columns.items() if values}
        if fault := check_row(config, row):
            name = f" of row {row['id']!r}" if "id" in row else ""
            raise ValueError(f"{fault}{name}")
        texts = [*map(text_of, completions)]
        each = ({name: values[index] for name, values in columns.items()} for index in range(len(texts)))
        starts = map(config.start_of_result, texts, each)
        answers = ["" if start is None else text[start:] for text, start in zip(texts, starts, strict=True)]
        return marker.mark(answers, read_suite(row[config.column], row))

    return code


def _runner(config: CodeConfig, context: Context) -> ProgramRunner:
    if config.runner is not None:
        from stretto.user_code.importable import load_importable

        return load_importable(config.runner)(config.parallel, **config.runner_options)
    from stretto_code.programs import SandboxRunner

    return SandboxRunner(context.sandbox, config.parallel, config.imports)


def check(config: CodeConfig, run: RunConfig) -> Iterator[Problem]:
    """Check that the sandbox starts, and that the time limits fit together."""
    if config.runner is None:
        from stretto_code.programs import program_problems

        yield from program_problems(run)
    group_size = getattr(run.algorithm, "group_size", 1)
    needed = -(-group_size // config.parallel) * config.answer_s
    if needed > config.timeout_s:
        yield Problem(
            "reward.timeout_s",
            f"{config.timeout_s:g} s; {group_size} slow answers of `answer_s: {config.answer_s:g}`, "
            f"{config.parallel} at a time, take {needed:g} s, and a group that takes longer than `timeout_s` "
            "is scored again, one answer after the other",
            "warning",
        )


def check_row(config: CodeConfig, row: Mapping[str, Any]) -> str:
    """Return why the tests of a row cannot be read; empty if they can be read."""
    from stretto_code.suites import SuiteError, read_suite

    if config.column not in row:
        return f"no column {config.column!r} with tests; the row's columns: {', '.join(row)}"
    try:
        read_suite(row[config.column], row)
    except SuiteError as error:
        return f"cannot read the tests (column {config.column!r}): {error}"
    return ""


@hookimpl
def stretto_reward() -> Iterator[Component[CodeConfig]]:
    yield Component(
        "code",
        make,
        CodeConfig,
        "1 if the answer's Python program passes the row's tests, in the sandbox",
        check,
        check_row,
    )
