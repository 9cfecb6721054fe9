"""Build sequences from dataset rows, for algorithms that sample nothing: see `stretto.algorithm.read`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import numpy as np

from stretto.algorithm import AlgorithmConfig, Encoded, Group
from stretto.chat.chats import encode_chat
from stretto.chat.prompts import tools_of, with_own_turns
from stretto.component import Context, Problem
from stretto.config import RunConfig
from stretto.dataset import DatasetConfig, Row
from stretto.errors import ConfigError, column_error, nearest
from stretto.models.tokenizer import fault_of
from stretto.tokenizer import Tokenizer

__all__ = [
    "PairConfig",
    "Supervised",
    "check_ids",
    "check_pair",
    "check_temperature",
    "cut_to_fit",
    "prompt_and_answer",
    "tokens_of_row",
]


ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)


class Supervised(Generic[ConfigT]):
    """Base of algorithms that sample nothing: they train on every row."""

    def __init__(self, config: ConfigT, context: Context) -> None:
        del context
        self.config = config

    def keep(self, group: Group) -> bool:
        """Keep every row."""
        del group
        return True


class PairConfig(AlgorithmConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of algorithms that learn from pairs of answers."""

    chosen_column: str = "chosen"
    """Column with the better answer: text, or chat messages of the assistant."""
    rejected_column: str = "rejected"
    """Column with the worse answer."""

    @property
    def columns(self) -> tuple[str, str]:
        """The columns of a pair's two sequences: first the chosen answer, then the rejected one."""
        return self.chosen_column, self.rejected_column


def check_pair(config: PairConfig, run: RunConfig) -> Iterator[Problem]:
    """Yield a problem if both answers come from the same column."""
    del run
    if config.chosen_column == config.rejected_column:
        yield Problem("algorithm.rejected_column", f"{config.rejected_column!r} is the chosen column too")


def prompt_and_answer(row: Row, column: str, tokenizer: Tokenizer) -> Encoded:
    """Encode the row's prompt followed by the answer in a column.

    All of a text answer is trained on. An answer of chat messages begins with a turn of the assistant; all
    turns of the assistant are trained on, as the chat template writes them with the tools in the column
    `tools`. The other turns are context.

    Raise ConfigError if the row lacks a column, if a column has another type, if there is no token to train
    on, or if the chat template drops or changes messages."""
    prompt, answer = _text_of(row, "prompt"), _text_of(row, column)
    if not isinstance(answer, str) and answer[0]["role"] != "assistant":
        role = answer[0]["role"]
        raise column_error(row, column, f"begins with a turn of the {role}; expected the answer alone")
    if isinstance(prompt, str) and isinstance(answer, str):
        answer_ids = tokenizer.encode_answer(answer, prompt=prompt)
        pieces = [(tokenizer.encode_prompt(prompt), False), (answer_ids, True)]
    elif isinstance(prompt, str):
        raise column_error(
            row, column, "has chat messages, and the prompt is text; write both as text or both as messages"
        )
    else:
        turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        _refuse_special_tokens(row, column, turns, tokenizer)
        prompt, turns = with_own_turns(prompt, tokenizer), with_own_turns(turns, tokenizer)
        if any(_is_image(part) for turn in turns for part in turn.get("content") or ()):
            raise column_error(row, column, "has an image; only the prompt may have images")
        try:
            pieces = encode_chat(prompt, turns, tokenizer, tools=tools_of(row))
        except ConfigError as error:
            raise column_error(row, column, str(error)) from error
    tokens = [int(id) for ids, _ in pieces for id in ids]
    mask = [trained for ids, trained in pieces for _ in ids]
    # The first token of a sequence has no logprob: no token comes before it.
    if not any(mask[1:]):
        reason = "is one token, and the prompt is empty" if any(mask) else "is empty"
        raise column_error(row, column, f"{reason}: no token to train on")
    return Encoded(tokens, [False, *mask[1:]])


def check_ids(encoded: Encoded, row: Row, vocabulary: int | None) -> None:
    """Raise ConfigError if a row has ids that a model of `vocabulary` tokens (None: not known) lacks."""
    low, high = min(encoded.tokens, default=0), max(encoded.tokens, default=0)
    if vocabulary is not None and not 0 <= low <= high < vocabulary:
        raise column_error(
            row,
            "tokens",
            f"has ids from {low} to {high}, and the model has {vocabulary}: it is another model's",
        )


def cut_to_fit(encoded: Encoded, rows: DatasetConfig, positions: int | None) -> Encoded:
    """Return the sequence of a row, cut at `dataset.max_tokens`. Raise ConfigError if it is longer than the
    model's `positions` (None: not known), or if the cut leaves no token to train on."""
    tokens, mask = encoded
    length = len(tokens)
    if rows.max_tokens is not None and length > rows.max_tokens:
        tokens, mask = tokens[: rows.max_tokens], mask[: rows.max_tokens]
        if not any(mask):
            raise ConfigError(f"dataset.max_tokens={rows.max_tokens} leaves nothing to train on")
    if positions is not None and len(tokens) > positions:
        raise ConfigError(
            f"a row of {length} tokens, and the model has {positions} positions; dataset.max_tokens cuts "
            "such rows"
        )
    return Encoded(tokens, mask)


def tokens_of_row(row: Row, column: str, tokenizer: Tokenizer) -> Encoded | None:
    """Return the sequence in the columns `tokens` and `loss_mask` of a row; None if the row lacks one.
    Raise ConfigError if they are no valid sequence, or if their text lacks the answer in `column`, which may
    be left out."""
    tokens, mask = row.get("tokens"), row.get("loss_mask")
    if tokens is None or mask is None:
        return None
    if not (_is_ids(tokens) and _is_ids(mask) and len(tokens) == len(mask) and any(mask[1:])):
        raise column_error(
            row,
            "tokens",
            "expected a list of token ids, and in 'loss_mask' as many values that say which are trained: at "
            "least one after the first",
        )
    answer = _text_of(row, column) if column in row else ""
    text = answer if isinstance(answer, str) else str(answer[-1].get("content") or "")
    decoded = (tokenizer.decode(np.asarray(tokens), special=special) for special in (False, True))
    # Without white space: some tokenizers write another one where they decode a part of a text.
    if not any("".join(text.split()) in "".join(each.split()) for each in decoded):
        raise column_error(
            row,
            "tokens",
            f"is not the text of the column {column!r} in this model's tokens; without the columns 'tokens' "
            "and 'loss_mask', the text is encoded",
        )
    return Encoded(tokens, [False, *map(bool, mask[1:])])


def check_temperature(config: AlgorithmConfig, run: RunConfig) -> Iterator[Problem]:
    """Yield a problem if `sampling.temperature` is not 1: the algorithm needs the model's own likelihoods."""
    del config
    if run.sampling.temperature != 1:
        yield Problem(
            "sampling.temperature",
            f"is {run.sampling.temperature:g}; {run.algorithm.use!r} needs the model's own likelihoods, "
            "expected 1",
        )


def _text_of(row: Row, column: str) -> str | Sequence[dict[str, Any]]:
    if column not in row:
        names = ", ".join(row) or "none"
        raise column_error(row, column, f"is not there{nearest(column, row)}; the row's columns: {names}")
    # An empty text is valid here; `prompt_and_answer` checks whether any token is left to train on.
    if fault := fault_of(row[column]):
        raise column_error(row, column, fault)
    return cast("str | Sequence[dict[str, Any]]", row[column])


def _refuse_special_tokens(
    row: Row, column: str, turns: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> None:
    """Raise ConfigError if an answer has a special token's text and `dataset.special_tokens` is not set."""
    if tokenizer.rows is None or tokenizer.rows.special_tokens is not None:
        return
    for turn in turns:
        content = turn.get("content")
        if (
            turn["role"] == "assistant"
            and isinstance(content, str)
            and (token := tokenizer.special_in(content))
        ):
            raise column_error(
                row,
                column,
                f"has {token!r}, a special token, in the content of a message; set dataset.special_tokens to "
                "'text' if the model is to write these characters, or to 'tokens' if it is the token",
            )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, int) for entry in cast("list[Any]", value))


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and cast("Mapping[str, Any]", part).get("type") in ("image", "image_url")
