"""Read prompts and tools from a row's columns, the config keys that datasets of plain tables share, and the
format of the calls that a model's chat template writes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stretto.chat.calls import A_CALL, NAMED, CallFormat, ParserName
from stretto.chat.chat_form import ChatForm
from stretto.dataset import DatasetConfig, Message, OwnTurn, Row, object_of
from stretto.errors import ConfigError, column_error
from stretto.tokenizer import Tokenizer

__all__ = [
    "ColumnsConfig",
    "both_tools",
    "format_named",
    "name_of_tool",
    "prompt_ids",
    "reads_calls",
    "tools_of",
    "with_own_turns",
]


class ColumnsConfig(DatasetConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections of datasets whose rows have columns with any names."""

    prompt_column: str = "prompt"
    """Column that holds the prompt."""
    prompt_template: str | None = None
    """The prompt as a text with column names in braces: `"Question: {question}\\nAnswer:"`. The columns stay
    in the row. Write `{{` and `}}` for braces."""
    chat: bool = False
    """Turn a text prompt into a user message, so that the model's chat template is applied."""
    system_prompt: str | None = None
    """System message that is put before the prompt. A text prompt then becomes a user message."""

    def __post_init__(self) -> None:
        if self.prompt_template is None:
            return
        if self.prompt_column != "prompt":
            raise ValueError("prompt_template and prompt_column are both given; expected one of them")
        list(_parts(self.prompt_template))

    def with_prompt(self, row: Row) -> Row:
        """Return the row with its prompt in the column `prompt`. Raise ConfigError if a column for the
        prompt is missing, a column in the template has neither text nor a number, or the prompt has a system
        message beside `system_prompt`."""
        if self.prompt_template is None:
            column = self.prompt_column if self.prompt_column in row else "conversations"
            if _is_sharegpt(row.get(column)):
                raise ConfigError(_SHAREGPT.format(column=column), path="prompt_column")
            if self.prompt_column not in row:
                raise ConfigError(_no_column(self.prompt_column, row), path="prompt_column")
            rest = {name: value for name, value in row.items() if name != self.prompt_column}
            return {**rest, "prompt": self._as_chat(row[self.prompt_column])}
        parts = [
            text + ("" if column is None else _text(column, row))
            for text, column in _parts(self.prompt_template)
        ]
        return {**row, "prompt": self._as_chat("".join(parts))}

    def _as_chat(self, prompt: Any) -> Any:
        if isinstance(prompt, str) and (self.chat or self.system_prompt is not None):
            prompt = [{"role": "user", "content": prompt}]
        if self.system_prompt is None or not isinstance(prompt, list):
            return prompt
        turns = cast("list[Any]", prompt)
        if any(isinstance(turn, dict) and cast("Row", turn).get("role") == "system" for turn in turns):
            text = "the prompt has a system message of its own; leave system_prompt out"
            raise ConfigError(text, path="system_prompt")
        return [{"role": "system", "content": self.system_prompt}, *turns]


_SHAREGPT = (
    "column {column!r}: a conversation in ShareGPT's form, `from` and `value`; expected messages. This line "
    "of Python converts a row: turns = [{{'role': {{'human': 'user', 'gpt': 'assistant'}}.get(turn['from'], "
    "turn['from']), 'content': turn['value']}} for turn in row.pop({column!r})]; "
    "row |= {{'prompt': turns[:-1], 'completion': turns[-1:]}}"
)


def _is_sharegpt(turns: Any) -> bool:
    first: Any = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, Mapping) and "from" in first and "value" in first


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    hint = "expected columns such as {question}; a brace itself is written {{ or }}"
    try:
        fields = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"prompt_template: {error}; {hint}") from error
    for text, column, format, conversion in fields:
        if column == "" or format or conversion:
            raise ValueError(f"prompt_template: braces that hold no column's name; {hint}")
        yield text, column


def _text(column: str, row: Row) -> str:
    if column not in row:
        raise ConfigError(f"prompt_template: {_no_column(column, row)}")
    value = row[column]
    if not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise ConfigError(f"prompt_template: column {column!r}: expected text or a number, found {kind}")
    return str(value)


def _no_column(column: str, row: Row) -> str:
    return f"no column {column!r}; its columns: {', '.join(row) or 'none'}"


def tools_of(row: Row) -> Sequence[Mapping[str, Any]]:
    """Return the JSON schemas in the column `tools`; ConfigError if it holds something else."""
    tools = row.get("tools") or []
    try:
        tools = json.loads(tools, object_pairs_hook=object_of) if isinstance(tools, str) else tools
    except ValueError:
        tools = None
    except ConfigError as error:
        raise column_error(row, "tools", str(error)) from error
    if isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in cast("list[Any]", tools)):
        return cast("list[Mapping[str, Any]]", tools)
    raise column_error(
        row,
        "tools",
        f"expected a list of JSON schemas of functions, or that as JSON, found {row['tools']!r:.60}",
    )


def name_of_tool(tool: Mapping[str, Any]) -> str:
    """Return the name in a tool's JSON schema; empty if there is none."""
    return str(cast("Mapping[str, Any]", tool.get("function", tool)).get("name", ""))


def both_tools(
    of_row: Sequence[Mapping[str, Any]], of_run: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the tools of a row and of the run. Raise ConfigError if two have the same name."""
    names = [*map(name_of_tool, of_row)]
    if twice := [name for name in map(name_of_tool, of_run) if name in names]:
        raise ConfigError(
            f"the row's column 'tools' and the run both have a tool {twice[0]!r}; leave it out of one of them"
        )
    return [*of_row, *of_run]


def with_own_turns(messages: Any, tokenizer: Tokenizer) -> Any:
    """Mark a row's messages as `OwnTurn` if `dataset.special_tokens` is `tokens`; return a text unchanged."""
    if not isinstance(messages, list) or tokenizer.rows is None or tokenizer.rows.special_tokens != "tokens":
        return messages
    return [OwnTurn(turn) for turn in cast("list[Message]", messages)]


def prompt_ids(row: Row, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return (P,) ids of a row's prompt, with its tools. Raise ConfigError if the template refuses them."""
    return tokenizer.encode_prompt(with_own_turns(row["prompt"], tokenizer), tools=tools_of(row))


def format_named(name: ParserName, form: ChatForm) -> CallFormat:
    """Return the format in which a model's calls are read. `auto` is that of the chat template; `hermes` if
    it shows no calls."""
    return NAMED[name] if name != "auto" else form.calls or NAMED["hermes"]


def reads_calls(format: CallFormat, form: ChatForm) -> bool:
    """Return whether a format reads a call as the chat template writes it."""
    found = format.read(form.call, ())[1]
    return [(call.name, call.arguments, call.fault) for call in found] == [(*A_CALL, "")]
