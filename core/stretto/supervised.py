"""Sequences made of rows of the dataset, for algorithms that sample nothing: see `stretto.algorithm.read`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from stretto.algorithm import Encoded
from stretto.component import Problem
from stretto.errors import ConfigError, nearest
from stretto.tokenizer import fault_of

if TYPE_CHECKING:
    from stretto.config import RunConfig
    from stretto.dataset import Row
    from stretto.tokenizer import Tokenizer

__all__ = ["check_temperature", "prompt_and_answer"]


def prompt_and_answer(row: Row, column: str, tokenizer: Tokenizer) -> Encoded:
    """The row's prompt, followed by the answer in a column, which is what is trained on.

    Args:
        column: name of a column that holds text, or the messages of the assistant's turn.

    Raises:
        ConfigError: if the row lacks a column, holds something else there, or leaves nothing to train on.
    """
    prompt = _text_of(row, "prompt")
    answer = _text_of(row, column)
    for turn in () if isinstance(answer, str) else answer:
        if turn["role"] in ("user", "system"):
            raise _error(row, column, f"has a turn of the {turn['role']}; expected the answer alone")
    before = tokenizer.encode_prompt(prompt).tolist()
    after = tokenizer.encode_answer(answer).tolist()
    # The first token of a sequence follows nothing: there is no logprob of it.
    mask = [index >= max(1, len(before)) for index in range(len(before) + len(after))]
    if not any(mask):
        found = "is one token, and the prompt is empty" if after else "is empty"
        raise _error(row, column, f"{found}: no token to train on")
    return Encoded([*before, *after], mask)


def check_temperature(run: RunConfig) -> Iterator[Problem]:
    """Logprobs are taken at the temperature of sampling, which is another likelihood than the model's."""
    if run.sampling.temperature != 1:
        yield Problem(
            "sampling.temperature",
            f"is {run.sampling.temperature:g}; {run.algorithm.use!r} is about the model's own likelihoods, "
            "expected 1",
        )


def _text_of(row: Row, column: str) -> str | Sequence[dict[str, Any]]:
    if column not in row:
        known = ", ".join(row) or "none"
        raise _error(row, column, f"is not there{nearest(column, row)}; the row's columns: {known}")
    # An empty text is one; what it leaves to train on is judged from the tokens.
    if fault := fault_of(row[column]):
        raise _error(row, column, fault)
    return cast("str | Sequence[dict[str, Any]]", row[column])


def _error(row: Mapping[str, Any], column: str, message: str) -> ConfigError:
    name = f" of row {row['id']!r}" if "id" in row else ""
    return ConfigError(f"column {column!r}{name}: {message}", path="dataset", value=row.get(column))
