"""Turn text into tokens and back, in processes that never import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio.to_thread
import numpy as np
from anyio.lowlevel import RunVar
from numpy.typing import NDArray

from stretto.chat.calls import A_TOOL
from stretto.chat.chat_form import ChatForm, any_of, form_of, opened_in, sections_of
from stretto.dataset import DatasetConfig, Message
from stretto.errors import ConfigError
from stretto.models.files import end_tokens_in, folder_of_model
from stretto.tokenizer import Tokenizer

if TYPE_CHECKING:
    from stretto.engine import Finish

__all__ = [
    "CLOCK",
    "TOKENIZER_FILES",
    "ByteTokenizer",
    "ModelTokenizer",
    "answer_text",
    "answer_texts",
    "apply_chat_template",
    "body_of",
    "characters_of",
    "fault_of",
    "load_tokenizer",
    "pinned",
    "work_on_text",
]

T = TypeVar("T")

_SHORT = 2**14
"""Number of characters that tokenise in about 20 ms. Longer texts are tokenised in a thread."""
_NEAR = 256
"""Number of characters before a text in which a special token may change the text's first token."""
_TAG_TOKENS = 64
"""Tokens at the end of a prompt in which a tag that opens the answer is looked for."""
_LEAST = 2**20
_MOST = 2**22
"""Bounds, with `_LEAST`, of `Tokenizer.most_characters` where only the model limits the text. Tokenising
`_MOST` characters takes about 6 s and some 500 MB."""
_text_thread: RunVar[anyio.CapacityLimiter] = RunVar("stretto_text_thread")

_DIRECTIVES = "aAbBcdeFGHIjklmMpSuUVwWxXyYZ"
CLOCK = "strftime_now"
"""The function by which chat templates read the date; as a key of `dataset.template`, it sets the date."""


def load_tokenizer(model: str | None, rows: DatasetConfig | None = None) -> Tokenizer:
    """Load the tokenizer of a model folder or hub id; without a model, every byte is a token. `rows`: the
    section `dataset`, with arguments of the chat template. Raise ConfigError if loading fails."""
    return ByteTokenizer() if model is None else ModelTokenizer.load(model, rows)


def apply_chat_template(
    owner: Any,
    model: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    arguments: Mapping[str, Any],
) -> str:
    """Return chat messages as text; see `Tokenizer.render`. Raise ConfigError if the template is missing or
    refuses them. `owner` has the template: a tokenizer or a processor of transformers. `messages` have the
    form that the template reads; `arguments`: other variables for the template."""
    from jinja2 import TemplateError

    # Templates are code: they join text and values of another type, look for keys that are not there, or call
    # themselves without end, as those of Hermes do for a tool that takes null.
    faults = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)

    def write(turns: list[dict[str, Any]], schemas: list[Any] | None) -> str:
        if any("content" in turn and turn["content"] is None for turn in turns):
            return _with_no_content(owner, turns, schemas, add_generation_prompt, arguments)
        return owner.apply_chat_template(
            turns, tools=schemas, tokenize=False, add_generation_prompt=add_generation_prompt, **arguments
        )

    def writes(turns: list[dict[str, Any]], schemas: list[Any] | None) -> bool:
        with suppress(*faults):
            return bool(write(turns, schemas))
        return False

    if owner.chat_template is None:
        raise ConfigError(
            f"the prompt is chat messages, and model {model!r} has no chat template; use an "
            "instruct model, or prompts of plain text"
        )
    turns, schemas = [dict(message) for message in messages], [dict(tool) for tool in tools] or None
    try:
        return write(turns, schemas)
    except faults as error:
        advice = _advice(error, turns, schemas, writes)
        raise ConfigError(
            f"the chat template of {model!r} refuses the messages: {str(error).rstrip('.')}{advice}"
        ) from error


def _advice(
    error: Exception,
    turns: list[dict[str, Any]],
    schemas: list[Any] | None,
    writes: Callable[[list[dict[str, Any]], list[Any] | None], bool],
) -> str:
    """Return what a template that refuses messages would take: only what it does take."""
    from jinja2.exceptions import SecurityError, UndefinedError

    if isinstance(error, SecurityError):
        return "; transformers forbids templates to do this, so it cannot write such messages"
    if isinstance(error, UndefinedError) and (name := re.match(r"'(\w+)' is undefined", str(error))):
        return f"; give `{name[1]}` in `dataset.template`"
    others, later = ([each for each in part if each.get("role") != "system"] for part in (turns, turns[1:]))
    alternating = [*turns[:1], *(b for a, b in pairwise(turns) if a.get("role") != b.get("role"))]
    fewer = {
        "a system message only as the first message": [*turns[:1], *later],
        "no system message": others,
        "no two messages of one role in a row": alternating,
    }
    for what, chat in fewer.items():
        if len(chat) < len(turns) and writes(chat, schemas):
            return f"; it takes {what}"
    return "; it takes them with tools" if not schemas and writes(turns, [A_TOOL]) else ""


def _with_no_content(
    owner: Any,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    opens: bool,
    arguments: Mapping[str, Any],
) -> str:
    """Render messages with content None: `apply_chat_template` drops this key, which templates may test."""
    from transformers.utils.chat_template_utils import render_jinja_template

    [text], _ = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=owner.get_chat_template(None, tools),
        add_generation_prompt=opens,
        **{**owner.special_tokens_map, **arguments},
    )
    return text


def pinned(template: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a chat template (a text, texts by name, or None) whose clock always returns the date in
    `arguments`, so that prompts are the same on all days: a macro replaces the clock."""
    if isinstance(template, dict):
        return {name: pinned(item, arguments) for name, item in cast("dict[str, Any]", template).items()}
    if not isinstance(template, str) or arguments.get(CLOCK) is None:
        return template
    day = date.fromisoformat(str(arguments[CLOCK]))
    directives = [f"%{flag}{item}" for flag in ("", "-") for item in _DIRECTIVES]
    written = "".join(f"|replace('{item}',{day.strftime(item)!r})" for item in directives)
    return f"{{%- macro {CLOCK}(format) -%}}{{{{ format{written} }}}}{{%- endmacro %}}\n{template}"


def fault_of(prompt: Any) -> str:
    """Return the reason why a value is not a valid prompt; an empty string if it is valid."""
    if isinstance(prompt, str):
        return _fault_of_text(prompt)
    turns = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    if turns and all(isinstance(turn, dict) and _is_message(cast("Message", turn)) for turn in turns):
        return ""
    expected = "text or chat messages ([{'role': …, 'content': text or parts}, …])"
    return f"expected {expected}, found {str(prompt)[:60]!r}"


def _fault_of_text(prompt: str) -> str:
    if not prompt.lstrip().startswith("[{"):
        return ""
    try:
        turns = json.loads(prompt)
    except ValueError:
        return ""
    if not all(isinstance(turn, dict) and "role" in turn for turn in cast("list[Any]", turns)):
        return ""
    return f"expected chat messages as a list, found their JSON text {prompt[:60]!r}; read it with json.loads"


def _is_message(turn: Message) -> bool:
    """Return whether a mapping has a role, and a content of text or parts, or tool calls without one."""
    content = turn.get("content")
    has_content = bool(turn.get("tool_calls")) if content is None else isinstance(content, (str, list, tuple))
    return "role" in turn and has_content


def characters_of(content: Any) -> int:
    """Return the number of characters in a prompt: a text, chat messages, or the content of a message."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Mapping):
        part = cast("Mapping[str, Any]", content)
        return characters_of(part.get("content")) + characters_of(part.get("text"))
    return sum(map(characters_of, cast("list[Any]", content))) if isinstance(content, (list, tuple)) else 0


def body_of(tokens: NDArray[np.int32], finish: Finish, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return the tokens of an answer without the token that ended the turn."""
    ended = finish == "stop" and len(tokens) and tokenizer.ends_turn(int(tokens[-1]))
    return tokens[:-1] if ended else tokens


def answer_text(
    prompt: NDArray[np.int32],
    answer: NDArray[np.int32],
    finish: Finish,
    tokenizer: Tokenizer,
    *,
    special: bool = False,
    whole: bool = False,
) -> str:
    """Return the text of an answer that follows its prompt, without the token that ended the turn. If the
    prompt opens a turn, `ChatForm.lead` and `ChatForm.tail` are left out too, unless `whole`.

    `prompt`: (P,) ids. `answer`: (A,) ids. `special`: keep special tokens.
    """
    body, form = body_of(answer, finish, tokenizer), tokenizer.form
    text = tokenizer.decode(body, special=special, after=prompt)
    if whole or not form.opening or not (form.lead or form.tail):
        return text
    if not tokenizer.decode(prompt[-len(form.opening.encode()) :], special=True).endswith(form.opening):
        return text
    full = tokenizer.decode(body, special=True, after=prompt)
    if full.startswith(form.lead):
        text = text.removeprefix(form.lead if special else form.plain_lead)
    if len(body) < len(answer) and full.endswith(form.tail):
        text = text.removesuffix(form.tail if special else form.plain_tail)
    return text


def answer_texts(
    prompt: NDArray[np.int32], answer: NDArray[np.int32], finish: Finish, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return `text`, `opened` and `reasoning_end` of an answer. The arguments are those of `answer_text`."""
    text, whole = (answer_text(prompt, answer, finish, tokenizer, special=each) for each in (False, True))
    last = prompt[-max(_TAG_TOKENS, len(tokenizer.form.header.encode())) :]
    opened = opened_in(tokenizer.decode(last, special=True), tokenizer.form)
    end = tokenizer.form.stored.reasoning_end(whole, opened)
    rest = whole[end:]
    while end and (token := tokenizer.special_in(rest)):  # `text` has no special tokens
        rest = rest.replace(token, "")
    return {"text": text, "opened": opened, "reasoning_end": end and max(0, len(text) - len(rest))}


async def work_on_text(work: Callable[[], T], characters: int) -> T:
    """Return the result of `work` on a text of this many characters. For a long text it runs in a thread, one
    text at a time, so that the event loop continues."""
    if characters <= _SHORT:
        return work()
    try:
        limiter = _text_thread.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(1)
        _text_thread.set(limiter)
    return await anyio.to_thread.run_sync(work, limiter=limiter)


class ByteTokenizer:
    """A tokenizer whose tokens are bytes, for runs of mock engines without a model."""

    def encode_prompt(
        self, prompt: str | Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> NDArray[np.int32]:
        """Return the UTF-8 bytes of the text, or of the messages as `render` writes them."""
        text = prompt if isinstance(prompt, str) else self.render(prompt, tools=tools)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_answer(self, answer: str, *, prompt: str = "") -> NDArray[np.int32]:
        """Return the UTF-8 bytes of the text."""
        return self.encode_prompt(answer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the contents of the messages, each on its own line. Tools are not shown."""
        del tools, add_generation_prompt
        return "".join(f"{message['content']}\n" for message in self.form.prepared(messages, None))

    def encode_text(self, text: str, *, whole: bool = False, after: str = "") -> NDArray[np.int32]:
        """Return the UTF-8 bytes of the text."""
        return self.encode_prompt(text)

    form = ChatForm()
    rows = None

    def special_in(self, text: str) -> str:
        """Return an empty text: no byte is special."""
        return ""

    def ends_turn(self, token: int) -> bool:
        """Return False: no byte ends a turn."""
        return False

    def most_characters(self, tokens: int | None) -> int:
        """Return the number of tokens, because each character has at least one token."""
        return _MOST if tokens is None else tokens

    def decode(
        self, ids: NDArray[np.int32], *, special: bool = False, after: NDArray[np.int32] | None = None
    ) -> str:
        """Return the bytes as text; bytes that are not UTF-8 are replaced."""
        del special, after
        return (ids % 256).astype(np.uint8).tobytes().decode(errors="replace")


def _behind_text(text: str, encode: Callable[[str], Any]) -> list[int]:
    """Return the ids of a text that continues another text, so that no space is put before it."""
    for prefix in ("\n", "a"):  # at least one of these does not merge with the text
        ids, head = encode(prefix + text).ids, encode(prefix).ids
        if ids[: len(head)] == head:
            return ids[len(head) :]
    for prefix in ("\n", "a", ".", "0"):  # `prefix` may get other tokens here, if a token begins after it
        encoding = encode(prefix + text)
        starts = [start for start, _ in encoding.offsets]
        if len(prefix) in starts:
            return encoding.ids[starts.index(len(prefix)) :]
    return encode(text).ids


def _hide(tokenizer: dict[str, Any], special: Iterable[str]) -> None:
    """Rename special tokens in the vocabulary, in place, so that no text becomes one: these models find
    vocabulary pieces in a text before they look for added tokens."""
    model = tokenizer["model"]
    hidden = {*special} - {model.get("unk_token")}
    pieces: Any = model["vocab"]
    vocabulary = {piece for piece, *_ in pieces} if isinstance(pieces, list) else {*pieces}
    if isinstance(pieces, list):
        named = enumerate(cast("list[list[Any]]", pieces))
        model["vocab"] = [
            [f"{_NO_TEXT}{id}" if piece in hidden else piece, score] for id, (piece, score) in named
        ]
    else:
        model["vocab"] = {f"{_NO_TEXT}{id}" if piece in hidden else piece: id for piece, id in pieces.items()}
    added = tokenizer["added_tokens"]
    tokenizer["added_tokens"] = [token for token in added if token["content"] not in hidden & vocabulary]


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
)
_NO_TEXT = "\ufdd0"
"""Begins names that no text contains, because it is no character of Unicode."""
_OF_IMAGES = re.compile("image|vision|video|audio", re.IGNORECASE)
"""Finds the names of special tokens that stand for images."""


class ModelTokenizer:
    """A tokenizer of the `tokenizers` library with its chat template, or with that of a processor."""

    @classmethod
    def load(cls, model: str, rows: DatasetConfig | None) -> ModelTokenizer:
        """See `load_tokenizer`."""
        # AutoTokenizer would import torch.
        from transformers import PreTrainedTokenizerFast

        try:
            return cls(PreTrainedTokenizerFast.from_pretrained(model), model, rows)
        except (OSError, ValueError) as error:
            why = " ".join(str(error).split())  # the library writes it on five lines
            raise ConfigError(
                f"model {model!r} has no tokenizer that can be loaded: {why}; stretto runs no "
                "code of models, so a tokenizer of its own code must be saved as a fast one"
            ) from error

    def __init__(self, tokenizer: Any, model: str, rows: DatasetConfig | None, processor: Any = None) -> None:
        template = {} if rows is None else rows.template
        self._tokenizer = tokenizer
        self._has_images = processor is not None
        self._writer = processor or tokenizer
        self._model = model
        self.rows = rows
        self._arguments = {name: value for name, value in template.items() if name != CLOCK}
        self._writer.chat_template = pinned(self._writer.chat_template, template)
        # Set once what transformers sets at each call: its checks take longer than a short prompt.
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        if getattr(self._backend.model, "dropout", None):  # of BPE: other ids at each call
            self._backend.model.dropout = None
        self._backend.encode_special_tokens = tokenizer.split_special_tokens
        self._added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
        self._added_texts = {id: text for text, id in self._added.items()}
        self._added_tokens = {added.content: added for added in tokenizer.added_tokens_decoder.values()}
        self._begins: dict[str, bool] = {}
        self._special = {text: added for text, added in self._added_tokens.items() if added.special}

    def encode_prompt(
        self, prompt: str | Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> NDArray[np.int32]:
        """See `Tokenizer`."""
        if not isinstance(prompt, str):
            return self.encode_text(self.render(prompt, tools=tools), whole=True)
        ids, before = self._ids(prompt), self._before
        return np.asarray(ids if ids[: len(before)] == before else before + ids, np.int32)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """See `Tokenizer`."""
        messages = self.form.prepared(messages, self._special_texts)
        return self._render(messages, tools, add_generation_prompt)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], opens: bool) -> str:
        return apply_chat_template(
            *(self._writer, self._model, messages, tools),
            add_generation_prompt=opens,
            arguments=self._arguments,
        )

    def encode_text(self, text: str, *, whole: bool = False, after: str = "") -> NDArray[np.int32]:
        """See `Tokenizer`."""
        ids: list[int] = []
        for section, is_text in sections_of(text, self._any_special):
            if whole and not ids:
                ids += self._as_text(section).ids if is_text else self._ids(section)
            else:
                ids += self._text_behind(after, section) if is_text else self._ids_behind(after, section)
            after = section
        return np.asarray(ids, np.int32)

    def _encode(self, text: str) -> Any:
        return self._backend.encode(text, add_special_tokens=False)

    def _ids(self, text: str) -> list[int]:
        return self._encode(text).ids

    def _as_text(self, text: str) -> Any:
        return self._plain_backend.encode(text, add_special_tokens=False)

    def _ids_behind(self, before: str, text: str) -> list[int]:
        """Return the ids of a text that follows `before`. Only the part of `before` from its last added token
        on matters: that token may remove or add a space at the start of the text."""
        if not (self._adds_space or self._strips):
            return self._ids(text)
        last = max((match.start() for match in self._any_added.finditer(before[-_NEAR:])), default=None)
        prefix = before[-_NEAR:][last:] if last is not None else ("\na" if before else self._boundary)
        ids, head = self._ids(prefix + text), self._ids(prefix)
        return ids[len(head) :] if ids[: len(head)] == head else _behind_text(text, self._encode)

    def _text_behind(self, before: str, text: str) -> list[int]:
        """Return the ids of a text that follows `before`; special tokens in the text are text."""
        name = max(filter(before.endswith, self._added), key=len, default="") if before else self._boundary
        text = text.lstrip() if before and name and self._added_tokens[name].rstrip else text
        if not self._adds_space or self._begins_behind(name):
            return self._as_text(text).ids
        return _behind_text(text, self._as_text)

    @cached_property
    def _any_added(self) -> re.Pattern[str]:
        return any_of(self._added)

    @cached_property
    def _strips(self) -> bool:
        """Whether an added token removes white space from the text beside it."""
        return any(token.rstrip or token.lstrip for token in self._added_tokens.values())

    @cached_property
    def _boundary(self) -> str:
        """A special token that does not change the text after it; empty if there is none."""
        return next((name for name, token in self._special.items() if not token.rstrip), "")

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer puts a space before the start of a text, as SentencePiece does."""
        bare = self._ids("a")
        return self._ids("\na")[-len(bare) :] != bare

    def _begins_behind(self, token: str) -> bool:
        """Whether the tokenizer treats the text after this token as the start of a text, as some do."""
        if token not in self._begins:
            added = self._added.get(token)
            self._begins[token] = added is not None and self._ids(f"{token}a") == [added, *self._ids("a")]
        return self._begins[token]

    @cached_property
    def _any_special(self) -> re.Pattern[str]:
        return any_of(self._special)

    @cached_property
    def _before(self) -> list[int]:
        """The tokens that the tokenizer puts before a text, such as BOS."""
        bare = self._ids("a")
        whole: list[int] = self._backend.encode("a", add_special_tokens=True).ids
        starts = range(len(whole) - len(bare) + 1)
        return next((whole[:at] for at in starts if whole[at : at + len(bare)] == bare), [])

    @cached_property
    def _plain_backend(self) -> Any:
        """A copy of the tokenizer that encodes the text of a special token as text."""
        written = json.loads(self._backend.to_str())
        if written["model"]["type"] in ("Unigram", "WordLevel"):
            _hide(written, self._special)
        backend = type(self._backend).from_str(json.dumps(written))
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _special_texts(self) -> re.Pattern[str]:
        """Pattern of the special tokens in a text, without those that are places of images."""
        return any_of(text for text in self._special if not self._has_images or not _OF_IMAGES.search(text))

    @property
    def form(self) -> ChatForm:
        """The model's chat form."""
        return self._form

    @cached_property
    def _form(self) -> ChatForm:
        tokenizer, end = self._tokenizer, self._tokenizer.eos_token_id
        eos, folder = frozenset([] if end is None else [end]), folder_of_model(self._model)
        stops = eos if folder is None else end_tokens_in(folder) or eos
        if self._writer.chat_template is None:
            closing = tokenizer.eos_token or ""
            return ChatForm(end_ids=eos | stops, ends=tuple(map(self._text_of, eos | stops)), closing=closing)
        return form_of(
            self._render,
            added=self._added,
            own_ends=eos,
            model_ends=stops,
            special=self._any_special,
            text_of=self._text_of,
            in_parts=self._has_images,
            parse=self._parse if getattr(tokenizer, "response_template", None) else None,
        )

    def _parse(self, answer: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return self._tokenizer.parse_response(answer, prefix="", tools=list(tools))

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def special_in(self, text: str) -> str:
        """See `Tokenizer`."""
        match = self._special_texts.search(text)
        return match[0] if match else ""

    def ends_turn(self, token: int) -> bool:
        """See `Tokenizer`."""
        return token in self.form.end_ids or token in self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._added[text] for text in self._special)

    def most_characters(self, tokens: int | None) -> int:
        """See `Tokenizer`."""
        if tokens is None:
            return min(_MOST, max(_LEAST, self._longest_token * self._tokenizer.model_max_length))
        return self._longest_token * tokens

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def encode_answer(self, answer: str, *, prompt: str = "") -> NDArray[np.int32]:
        """See `Tokenizer`."""
        ids, form = self.encode_text(answer, after=prompt).tolist(), self.form
        has_turns = form.closing in self._added and form.closing in prompt
        end = self._added[form.closing] if has_turns else self._tokenizer.eos_token_id
        if end is not None and not form.is_closed(answer):
            ids.append(end)
        return np.asarray(ids, np.int32)

    def decode(
        self, ids: NDArray[np.int32], *, special: bool = False, after: NDArray[np.int32] | None = None
    ) -> str:
        """See `Tokenizer`."""
        before = -1 if after is None or not len(after) else int(after[-1])
        begins = before < 0 or self._begins_behind(self._added_texts.get(before, ""))
        word, text = ([], "") if begins else self._word
        return self._tokenizer.decode([*word, *ids.tolist()], skip_special_tokens=not special)[len(text) :]

    @cached_property
    def _word(self) -> tuple[list[int], str]:
        """A token and its text, to decode before others: decoders drop a space before the first token."""
        added = self._added.values()
        for token in sorted({*self._tokenizer.get_vocab().values()}.difference(added)):
            text = self._tokenizer.decode([token])
            if text.strip() and "\ufffd" not in text:
                return [token], text
        return [], ""
