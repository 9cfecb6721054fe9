"""Check how the model's chat template shows a run's rows: its chat form, and rows that it alters."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from stretto.assembly.assembly import Assembly
from stretto.chat.calls import ParserName
from stretto.chat.chat_form import ChatForm, plain_text
from stretto.chat.chats import hidden_tools, is_data, is_shown
from stretto.chat.prompts import both_tools, format_named, reads_calls, tools_of, with_own_turns
from stretto.cli.start.row_check import drawn_rows
from stretto.component import Problem
from stretto.dataset import Dataset, Message
from stretto.environment import EnvironmentConfig
from stretto.errors import ConfigError
from stretto.models.files import known_config, text_config
from stretto.models.tokenizer import fault_of
from stretto.models.vision import is_vision_language
from stretto.tokenizer import Tokenizer
from stretto.tools import ToolsConfig
from stretto.workflow import WorkflowConfig

_MAX_S = 1.0  # time for the rows of a dataset
_SHOWN = 400  # characters of the first prompt
_SHORT = 60  # characters of an answer


def chat_lines(assembly: Assembly) -> Iterator[str]:
    """Yield the model's chat form and the first row's prompt; nothing without a local text model."""
    config = assembly.config
    tokenizer = _tokenizer_of(assembly)
    if tokenizer is None:
        return
    dataset: Dataset = assembly.composed.make("dataset", assembly.trial_context)
    prompt, form = dataset[0]["prompt"], tokenizer.form
    if not isinstance(prompt, str):
        ends = ", ".join(map(repr, form.ends)) or "no token"
        opened = f"opens {form.opened!r}" if form.opened else "opens nothing"
        lead = f", which begins with {form.lead!r}" if form.lead else ""
        tools = "shown" if form.shows_tools else "not shown beside a user's message alone"
        calls = f"with arguments as {form.arguments}" if form.shows_calls else "not shown"
        arguments = ", ".join(f"{key}: {value}" for key, value in config.dataset.template.items()) or "none"
        alone = f"none: of the turns of a supervised row, only the last one has {form.closing!r}"
        written = repr(form.tail + form.closing) if form.writes_end else alone
        yield f"chat form  a turn ends with {ends}; the template writes {written}"
        yield f"           the prompt {opened} of the answer{lead}; content is {_contents(form)}"
        kept = "kept" if form.stored.keeps else "dropped" if form.stored.taken else "not taken back"
        if not (form.stored.shows_reasoning and form.stored.end):
            kept += (
                "; the template itself has no known form of it: it may cut others; rewards find it in tags "
                "such as <think> alone"
            )
        yield f"           system messages are {form.system}; reasoning of earlier answers is {kept}"
        yield f"           tools are {tools}, calls {calls}"
        yield f"           arguments of the template (dataset.template): {arguments}"
    shown, schemas = _shown(dataset[0], tokenizer, assembly.tools)
    ids = tokenizer.encode_prompt(shown, tools=schemas)
    text = tokenizer.decode(ids, special=True)
    yield f"prompt     {text[:_SHOWN]!r}" + (f" … {len(ids)} tokens" if len(text) > _SHOWN else "")


def _contents(form: ChatForm) -> str:
    names = {role: " or ".join(sorted(each, reverse=True)) for role, each in form.content.items() if role}
    by_role = ", ".join(f"{name} ({role})" for role, name in names.items())
    return by_role if len({*names.values()}) > 1 else next(iter(names.values()), "text")


def chat_problems(assembly: Assembly, path: str, dataset: Dataset) -> Iterator[Problem]:
    """Warn of rows whose prompts the model does not read as they are written."""
    try:
        tokenizer = _tokenizer_of(assembly)
    except ConfigError as error:
        yield Problem("model", str(error))
        return
    if tokenizer is None:
        return
    yield from _answer_problems(tokenizer)
    yield from history_problems(assembly.config.workflow, tokenizer.form) if path == "dataset" else ()
    counts, examples, num_read = Counter[tuple[str, str]](), dict[tuple[str, str], tuple[int, str]](), 0
    size: int | None = text_config(assembly.config.model).get("vocab_size")
    answers = _answer_columns(assembly) if path == "dataset" else ()
    for index in drawn_rows(len(dataset), _MAX_S):
        row = dataset[index]
        num_read += 1
        if fault_of(row.get("prompt")):
            continue
        found = [("prompts", *each) for each in _oddities(row, tokenizer, size, assembly.tools)]
        found += [("answers", *each) for each in _odd_answers(row, answers, tokenizer)]
        for kind, what, detail in found:
            counts[kind, what] += 1
            examples[kind, what] = min(examples.get((kind, what), (index, detail)), (index, detail))
    for (kind, what), count in counts.items():
        level = "error" if what == _OUTSIDE or (what == _EMPTY and count == len(dataset)) else "warning"
        index, detail = examples[kind, what]
        example = f"row {index + 1}{detail and f': {detail}'}"
        advice = f"; {_CURES[what]}" if what in _CURES else ""
        yield Problem(path, f"{count:,} of {num_read:,} {kind} {what} ({example}){advice}", level)


def _answer_columns(assembly: Assembly) -> Sequence[str]:
    """Return the columns with answers that are trained: those that the algorithm's section names."""
    if assembly.graph.source.encode is None:
        return ()
    section = msgspec.structs.asdict(assembly.config.algorithm)
    return [str(value) for key, value in section.items() if key.endswith("_column")]


def _odd_answers(
    row: Mapping[str, Any], columns: Iterable[str], tokenizer: Tokenizer
) -> Iterator[tuple[str, str]]:
    """Yield what is trained otherwise than the answers of a supervised row are written."""
    prompt = row["prompt"]
    asked = (prompt if isinstance(prompt, str) else "".join(_texts_of(prompt[-1].get("content")))).strip()
    texts = {column: str(row.get(column)).strip() for column in columns}
    if asked and (repeated := [column for column, text in texts.items() if text.startswith(asked)]):
        yield "begin with their prompt, which the model would read twice", f"column {repeated[0]!r}"
    for column in columns:
        answer = row.get(column)
        if fault_of(answer):
            continue
        turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        for turn in cast("list[dict[str, Any]]", turns):
            for text in _texts_of(turn.get("content")):
                ids = tokenizer.encode_text(text, whole=True)
                if lost := _lost(text, tokenizer.decode(ids, special=True)):
                    yield _LOST, f"column {column!r}: {lost!r}"
            yield from _double_end(turn, tokenizer)


def _double_end(turn: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Yield the end token of a turn that the row and the chat template both write."""
    if turn.get("role") == "assistant" and tokenizer.rows and tokenizer.rows.special_tokens == "tokens":
        for text in _texts_of(turn.get("content"))[-1:]:
            if tokenizer.form.is_closed(text):
                yield (
                    "end with the token that ends a turn, and the chat template adds another",
                    repr(text[-40:]),
                )


def _texts_of(content: Any) -> list[str]:
    """Return the texts of a message's content."""
    parts = cast("list[Any]", content) if isinstance(content, list) else [{"text": content}]
    return [str(part.get("text") or "") for part in parts if isinstance(part, dict)]


def _words_of(message: Message) -> str:
    return "".join(_texts_of(message.get("content")))


def _lost(text: str, decoded: str) -> str:
    """Return the characters of a text that are not in the text of its tokens; at most 20."""
    known = {"\u2581", " ", *_composed(decoded)}  # U+2581 stands for a space
    return "".join(dict.fromkeys(symbol for symbol in _composed(text) if symbol not in known))[:20]


def _answer_problems(tokenizer: Tokenizer) -> Iterator[Problem]:
    """Warn of a template that does not write answers as they are, or that has an end which is none."""
    form, answer = tokenizer.form, 'a "b" & <c>\nd'
    try:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        written = tokenizer.render(chat, add_generation_prompt=False)
    except ConfigError:
        written = answer
    if answer not in plain_text(written):
        yield Problem(
            "model",
            f"the chat template writes the answer {answer!r} as {written[-_SHORT:]!r}: the model learns to "
            "sample it so, and rewards such as `exact` read it so",
            "warning",
        )
    if not (form.has_template and form.writes_end and form.closing):
        return
    [*_, last] = tokenizer.encode_text(f"a{form.closing}", whole=True)
    if not tokenizer.ends_turn(int(last)):
        yield Problem(
            "model",
            f"the chat template ends a turn with {form.closing!r}, but behind a text the tokenizer reads it "
            'as text: turns of rows have no end; add the token with "normalized": false in tokenizer.json',
            "warning",
        )


def history_problems(workflow: WorkflowConfig, form: ChatForm) -> Iterator[Problem]:
    """Tell what the chat template does not take back in a workflow of several turns, and calls that are not
    read."""
    name: ParserName | None = getattr(workflow, "tool_parser", None)
    has_tools = isinstance(workflow, ToolsConfig)
    taken = (form.stored.with_calls if has_tools else "text", form.stored.taken)
    if (name or isinstance(workflow, EnvironmentConfig)) and None in taken:
        what = "calls, or behind a tool's result," if form.stored.taken else "reasoning, quotes or line feeds"
        yield Problem(
            "workflow",
            f"the chat template writes an answer with {what} in no form in which the policy samples it, once "
            "other messages follow: use a model, or `dataset.template`, whose template takes it back",
            "warning" if name and not has_tools else "error",
        )
    if name is None or not form.shows_calls or reads_calls(format_named(name, form), form):
        return
    which = "no parser reads" if name == "auto" else f"{name!r} does not read"
    yield Problem(
        "workflow.tool_parser",
        f"the chat template writes a call as {form.call[-_SHOWN:]!r}, which {which}: such calls would be "
        "text or errors; describe a format that is read in `dataset.system_prompt`, and name its parser here",
        "error" if has_tools and name == "auto" else "warning",
    )


_composed = partial(unicodedata.normalize, "NFC")
_LOST = "have characters that the tokenizer drops or does not know"
_EMPTY = "have no token, and are left out"
_HIDDEN = "have tools that the chat template does not show"
_CURES = {_HIDDEN: "describe them in `system_prompt` of the dataset, in the format of `tool_parser`"}
_OUTSIDE = "have tokens outside of the model's vocabulary: its tokenizer is that of another model"


def _shown(row: dict[str, Any], tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """Return a row's prompt and tools as the run shows them. In a run with tools, a text is a message."""
    prompt = row["prompt"]
    if tools and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return with_own_turns(prompt, tokenizer), both_tools(tools_of(row), tools)


def _oddities(
    row: dict[str, Any], tokenizer: Tokenizer, size: int | None, of_run: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    def write(messages: Sequence[Message]) -> str:
        return plain_text(tokenizer.render(messages, tools=tools))

    def without_tools() -> str:
        return prompt if isinstance(prompt, str) else plain_text(tokenizer.render(prompt))

    try:
        prompt, tools = _shown(row, tokenizer, of_run)
        ids = tokenizer.encode_prompt(prompt, tools=tools)
        text = prompt if isinstance(prompt, str) else write(prompt)
    except ConfigError as error:
        yield "are refused", str(error)
        return
    if row.get("chat_template_kwargs"):
        yield "have a column 'chat_template_kwargs', which is not read: see dataset.template", ""
    if not len(ids):
        yield _EMPTY, ""
    if size is not None and len(ids) and int(ids.max()) >= size:
        yield _OUTSIDE, f"token {int(ids.max())}, vocabulary {size}"
    # Not what the template alone writes: Phi-3.5's special tokens take its line feeds with them.
    own = {*(prompt if isinstance(prompt, str) else "".join(map(_words_of, prompt)))}
    if lost := _lost("".join(filter(own.__contains__, text)), tokenizer.decode(ids, special=True)):
        yield _LOST, repr(lost)
    first = {} if isinstance(prompt, str) or prompt[0]["role"] != "system" else prompt[0]
    described = _words_of(first)
    if hidden := [name for name in hidden_tools(tools, text, without_tools) if name not in described]:
        yield _HIDDEN, ", ".join(hidden)
    if isinstance(prompt, str):
        if token := tokenizer.special_in(prompt):
            yield (
                "are texts with special tokens, as a chat template writes them: they are tokens",
                repr(token),
            )
        return
    header, form = tokenizer.form.header, tokenizer.form.stored
    counted = partial(re.sub, r"\d+", "0")  # some count the turns
    has_header = text.endswith(header) or counted(text).endswith(counted(header))
    if not has_header and prompt[-1].get("role") != "tool":
        yield "open no answer in the chat template: the model has to write the header", repr(header)
    elif not has_header and (rest := form.unopened(form.opened_in(text))):
        yield "end with a tool's result, and open less than behind a user: the model may write", repr(rest)
    yield from _odd_messages(prompt, text, tokenizer, write)


def _odd_messages(
    messages: Sequence[Message], text: str, tokenizer: Tokenizer, write: Callable[[Sequence[Message]], str]
) -> Iterator[tuple[str, str]]:
    if messages[-1].get("role") == "assistant":
        yield "end with a turn of the assistant: the model begins another answer after it", ""
    packed = "".join(text.split())
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        texts = _texts_of(content)
        words, place = "".join(texts), f"message {number}, role {message.get('role')!r}"
        answers = ["".join(each.rpartition("</think>")[2].split()) for each in texts]
        shown = all(each in packed for each in answers) and not is_data(content, text)
        if not shown or not is_shown(messages, number - 1, "content", text, write):
            yield "have a message that the chat template does not show, or not as it is written", place
        is_text = tokenizer.rows is not None and tokenizer.rows.special_tokens == "text"
        if (
            is_text
            and not tokenizer.form.stored.keeps
            and "</think>" in words
            and tokenizer.special_in("</think>")
        ):
            yield "have reasoning whose marks are text (dataset.special_tokens): it is not dropped", place
        yield from _double_end(message, tokenizer)
        if message.get("tool_calls") and not (
            tokenizer.form.shows_calls and is_shown(messages, number - 1, "tool_calls", text, write)
        ):
            yield "have tool calls that the chat template does not show", place
        is_unset = tokenizer.rows is not None and tokenizer.rows.special_tokens is None
        if is_unset and (token := tokenizer.special_in(words)):
            yield (
                "have the text of a special token in a message: it is text there; see dataset.special_tokens",
                f"{place}: {token!r}",
            )


def _tokenizer_of(assembly: Assembly) -> Tokenizer | None:
    """Return the model's tokenizer; None if the model is not on this machine, or reads images."""
    model = assembly.config.model
    if model is None or is_vision_language(known_config(model)):
        return None
    return assembly.tokenizer if has_tokenizer(model) else None


def has_tokenizer(model: str) -> bool:
    """Return whether a folder has a model's tokenizer, or weights, beside which one is expected."""
    return Path(model, "tokenizer.json").exists() or any(Path(model).glob("*.safetensors"))
