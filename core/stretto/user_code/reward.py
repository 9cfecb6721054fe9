"""The scoring process, child of a verifier worker. It makes one reward and scores a group for each `Task`."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stretto.assembly.compose import compose_mapping
from stretto.component import Context
from stretto.errors import ConfigError
from stretto.user_code.faults import SampleFault
from stretto.user_code.limits import LIMIT_METRICS, AnswerLimits, score_within
from stretto.user_code.plain_data import decode_row
from stretto.user_code.protocol import serve, try_to_ask
from stretto.user_code.scoring import score_group, scores_groups, unknown_optional

COMMAND = (sys.executable, "-m", "stretto.user_code.reward")


class Task(msgspec.Struct, frozen=True, array_like=True):
    """Answers to one prompt, to be scored."""

    row: bytes
    """The dataset's row: a msgpack map."""
    completions: tuple[str, ...]
    """The answers; empty to see only whether the reward can be called with these columns."""
    columns: bytes
    """Columns with a value for each completion: a msgpack map of lists."""
    trial: bool = False
    """True if `stretto check` sends it."""


class ScoringResult(msgspec.Struct, frozen=True, array_like=True):
    """(reward, metrics) of each completion, or why there are none."""

    scores: tuple[tuple[float, dict[str, float]], ...] = ()
    fault: SampleFault | None = None
    over: dict[int, str] = {}
    """Index -> reason, of completions that score 0 because of a limit or the end of their process."""
    unused: tuple[str, ...] = ()
    """For a trial: optional parameters of the reward that no column gives a value for."""


def setup_frame(document: Mapping[str, Any], context: Context) -> bytes:
    """Return the first frame for a scoring process."""
    return msgspec.msgpack.encode((document, context))


def try_to_score(
    document: Mapping[str, Any], context: Context, tasks: Sequence[Task], timeout_s: float
) -> tuple[str, list[ScoringResult]]:
    """Make the reward of a run and score some tasks in a child process. Return the reason why the reward
    cannot be made, empty if it can, and the results. Raise TimeoutError after `timeout_s`."""
    started, answers = try_to_ask(COMMAND, setup_frame(document, context), tasks, timeout_s)
    return started.error, [msgspec.msgpack.decode(answer, type=ScoringResult) for answer in answers]


class Scorer:
    """The reward, and the limits for scoring one answer."""

    def __init__(self, data: bytes) -> None:
        document, context = msgspec.msgpack.decode(data, type=tuple[dict[str, Any], Context])
        composed = compose_mapping(document)
        self._reward = composed.make("reward", context)
        config = composed.config.reward
        assert config is not None, "a run without a reward has no scoring process"
        self._limits = AnswerLimits(*config.limits)
        if self._limits and scores_groups(self._reward):
            raise ConfigError(
                "reward.answer_cpu_s and reward.answer_memory_mb limit the scoring of one answer, but this "
                "reward scores all answers of a group in one call; remove the limits, or give the reward the "
                "form `score(prompt, completion, **columns)`"
            )

    def answer(self, data: bytes) -> ScoringResult:
        task = msgspec.msgpack.decode(data, type=Task)
        row = decode_row(task.row)
        each = msgspec.msgpack.decode(task.columns, type=dict[str, list[Any]])  # column -> its values
        unused = tuple(unknown_optional(self._reward, [*row, *each])) if task.trial else ()
        if not self._limits or not task.completions:
            scored = tuple(score_group(self._reward, row, task.completions, each))
            return ScoringResult(scored, unused=unused)

        def score(index: int) -> tuple[float, dict[str, float]]:
            columns_of_one = {name: values[index : index + 1] for name, values in each.items()}
            [(reward, metrics)] = score_group(
                self._reward, row, task.completions[index : index + 1], columns_of_one
            )
            return reward, {**dict.fromkeys(LIMIT_METRICS, 0.0), **metrics}

        scores = score_within(self._limits, score, len(task.completions))
        over = {index: each.over for index, each in enumerate(scores) if each.over}
        return ScoringResult(tuple(each.value for each in scores if each.value), over=over, unused=unused)


def main() -> None:
    """Score groups until the input ends."""
    cannot = "the reward cannot be made"
    serve(Scorer, Scorer.answer, lambda fault: ScoringResult(fault=fault), cannot=cannot, name="reward")


if __name__ == "__main__":
    main()
