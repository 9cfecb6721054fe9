"""Build sequences from dataset rows, for algorithms that sample nothing: see `stretto.algorithm.read`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from stretto.algorithm import AlgorithmConfig, Encoded
from stretto.component import Problem
from stretto.errors import column_error, nearest
from stretto.models.tokenizer import fault_of

if TYPE_CHECKING:
    from stretto.config import RunConfig
    from stretto.dataset import Row
    from stretto.models.tokenizer import Tokenizer

__all__ = ["PairConfig", "check_pair", "check_temperature", "prompt_and_answer"]


class PairConfig(AlgorithmConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of algorithms that learn from pairs of answers."""

    chosen_column: str = "chosen"
    """Column with the better answer: text, or chat messages of the assistant."""
    rejected_column: str = "rejected"
    """Column with the worse answer."""

    @property
    def columns(self) -> tuple[str, str]:
        """The columns of a pair's first sequence, the chosen one, and of its second, the rejected one."""
        return self.chosen_column, self.rejected_column


def check_pair(config: PairConfig) -> Iterator[Problem]:
    """Yield a problem if both answers come from the same column."""
    if config.chosen_column == config.rejected_column:
        yield Problem("algorithm.rejected_column", f"{config.rejected_column!r} is the chosen column too")


def prompt_and_answer(row: Row, column: str, tokenizer: Tokenizer) -> Encoded:
    """Encode the row's prompt followed by the answer in a column. Only the answer is trained on.

    Args:
        column: name of a column that holds text, or the messages of the assistant's turn.

    Raises:
        ConfigError: if the row lacks a column, holds something else there, or leaves nothing to train on.
    """
    prompt = _text_of(row, "prompt")
    answer = _text_of(row, column)
    for turn in () if isinstance(answer, str) else answer:
        if turn["role"] in ("user", "system"):
            raise column_error(row, column, f"has a turn of the {turn['role']}; expected the answer alone")
    before = tokenizer.encode_prompt(prompt).tolist()
    after = tokenizer.encode_answer(answer).tolist()
    # The first token of a sequence has no logprob: no token comes before it.
    mask = [index >= max(1, len(before)) for index in range(len(before) + len(after))]
    if not any(mask):
        reason = "is one token, and the prompt is empty" if after else "is empty"
        raise column_error(row, column, f"{reason}: no token to train on")
    return Encoded([*before, *after], mask)


def check_temperature(run: RunConfig) -> Iterator[Problem]:
    """Yield a problem if `sampling.temperature` is not 1: training computes logprobs at that temperature,
    but the algorithm needs the model's own likelihoods."""
    if run.sampling.temperature != 1:
        yield Problem(
            "sampling.temperature",
            f"is {run.sampling.temperature:g}; {run.algorithm.use!r} needs the model's own likelihoods, "
            "expected 1",
        )


def _text_of(row: Row, column: str) -> str | Sequence[dict[str, Any]]:
    if column not in row:
        known = ", ".join(row) or "none"
        raise column_error(row, column, f"is not there{nearest(column, row)}; the row's columns: {known}")
    # An empty text is valid here; `prompt_and_answer` checks whether any token is left to train on.
    if fault := fault_of(row[column]):
        raise column_error(row, column, fault)
    return cast("str | Sequence[dict[str, Any]]", row[column])
