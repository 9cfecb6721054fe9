"""How an answer of the policy goes back into the history, so that the chat template writes it again.

Templates take an answer with reasoning in one of several forms: as it was sampled, with the start that the
prompt contained, or with the reasoning under a key of its own. `stored_form` renders an answer in each of
them, and takes the first that the template writes as the policy samples it, else the first that it writes
without its reasoning.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from stretto.chat.calls import A_CALL, A_TOOL, REPLY, CallFormat, ToolCall
from stretto.dataset import Message, OwnTurn
from stretto.reward import REASONING_IN_TEXT, REASONING_TAG, REASONING_WORDS, leading_end, reasoning_end

__all__ = ["A_QUESTION", "KEYS", "RARE_KEYS", "THOUGHT", "StoredForm", "stored_form"]

Taken = str
"""`text`, as sampled; `opened`, with the start of the answer that is in the prompt; `parts`, as a part of the
content; or the key of the reasoning."""
KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message's reasoning."""
RARE_KEYS = ("thought", "thoughts", "reasoning_text", "rationale", "analysis", "scratchpad")
THOUGHT = "probethought"


@dataclass(frozen=True)
class StoredForm:
    """The form in which a chat template takes back answers."""

    taken: Taken | None = "text"
    """None: the template writes an answer with reasoning in no form in which it was sampled."""
    with_calls: Taken | None = "text"
    """The same for answers with tool calls."""
    calls_as_data: bool = False
    """Whether calls go back as `tool_calls`, not as sampled text."""
    keeps: bool = False
    """Whether a later turn leaves the reasoning in the history."""
    opened: str = ""
    """`ChatForm.opened`."""
    shows_reasoning: bool = False
    """Whether the template writes reasoning anywhere."""
    begin: str = ""
    """What the policy samples before its reasoning; empty if the prompt opens it."""
    ends: tuple[str, str] = ("", "")
    """What it samples between the reasoning and the content, and between the reasoning and a call."""

    def message(self, text: str, opened: str, before: str = "", calls: Sequence[ToolCall] = ()) -> Message:
        """Return the assistant's message of an answer.

        Args:
            text: the sampled text, without the token that ended it.
            opened: the start of the answer that its prompt contains.
            before: the part of the text before the first call.
            calls: its calls.
        """
        as_data = bool(calls) and self.calls_as_data
        body, taken = (before if as_data else text), (self.with_calls if calls else self.taken)
        body = body.removeprefix(self.unopened(opened))
        message: dict[str, Any] = {"role": "assistant", "content": body}
        if taken and taken != "text" and (parts := self.split(body)):
            reasoning, content = parts
            if taken == "opened":
                message["content"] = self.opened + body
            elif taken == "parts":
                thought = {"type": "thinking", "thinking": reasoning}
                message["content"] = [thought, *([{"type": "text", "text": content}] if content else [])]
            else:
                message |= {"content": content, taken: reasoning}
        if as_data:
            message["content"] = message["content"] if str(message["content"]).strip() else ""
            message["tool_calls"] = [call.data for call in calls]
        return OwnTurn(message)

    def split(self, text: str) -> tuple[str, str] | None:
        """Return reasoning and content of an answer; None if it has no reasoning, or tags that are open or
        doubled."""
        begin, end, rest = self.begin.strip(), self.end, text.lstrip()
        if (
            not end
            or not rest.startswith(begin)
            or rest.count(end) != 1
            or (begin and rest.count(begin) != 1)
        ):
            return None
        reasoning, _, content = rest.removeprefix(begin).partition(end)
        pairs = (pair for pair in zip(self._behind, self.ends, strict=True) if content.startswith(pair[0]))
        behind, written = max(pairs, key=lambda pair: len(pair[0]), default=("", ""))
        return reasoning.strip(), content.removeprefix(behind).removeprefix(written[len(written.rstrip()) :])

    def opened_in(self, prompt: str) -> str:
        """Return the part of `opened`, in whole tags, with which a prompt ends."""
        starts = (self.opened[:size] for size in range(len(self.opened), 0, -1))
        return next((each for each in starts if each[-1] in ">]\n" and prompt.endswith(each)), "")

    def unopened(self, opened: str) -> str:
        """Return the rest of `self.opened`, which the policy may write where its prompt opens less: DeepSeek
        V3.1 opens `<think>` behind a user, and nothing behind a tool's result."""
        return self.opened.removeprefix(opened)

    def is_malformed(self, text: str) -> bool:
        """Return whether an answer has a tag of reasoning, and cannot be split there."""
        return any(tag and tag in text for tag in (self.begin.strip(), self.end)) and not self.split(text)

    def reasoning_end(self, text: str, opened: str) -> int | None:
        """Return what `stretto.reward.reasoning_end` does, with the model's own tags: channels, words, and
        special tokens."""
        find = self._own_end if self._has_own_tags else reasoning_end
        return self._content_start(text, find(text, opened))

    def leading_end(self, text: str, opened: str) -> int | None:
        """Return what `stretto.reward.leading_end` does, with the model's own tags."""
        find = self._own_end if self._has_own_tags else leading_end
        return self._content_start(text, find(text, opened))

    def _content_start(self, text: str, end: int | None) -> int | None:
        """Return the place behind the reasoning's end, and what the template writes before the content."""
        if end == 0 and self.begin and self.end and text.lstrip().startswith(self.end):
            end = text.index(self.end) + len(self.end)  # MiniMax-M3 writes an answer without reasoning so
        behind = (len(each) for each in self._behind if end and text.startswith(each, end))
        return end and end + max(behind, default=0)

    def _own_end(self, text: str, opened: str) -> int | None:
        begin, tag, place = self.begin.strip(), self.end, 0
        begins = rf"\s*(?:{re.escape(self._behind[1])}\s*)?{re.escape(begin)}"
        if not begin:  # the prompt opens it
            begins = r"\A" if self.opened and text.startswith(self.unopened(opened)) else "(?!)"
        while found := re.compile(begins).match(text, place):
            if (end := text.find(tag, found.end())) < 0:
                return None
            place = end + len(tag)
            if not self._behind[1]:  # else another block may follow: gpt-oss begins each with a header
                break
        return place

    @property
    def _has_own_tags(self) -> bool:
        tag = (self.begin or self.opened).strip()
        return bool(self.end) and not (REASONING_IN_TEXT if self.begin else REASONING_TAG).fullmatch(tag)

    @property
    def _behind(self) -> list[str]:
        return [each.strip().removeprefix(self.end) for each in self.ends]

    @property
    def end(self) -> str:
        """The tag that ends reasoning, such as `</think>`, or `<|close|>think<|sep|>`."""
        found = _TAG.match(self.ends[0].strip())
        return found[0] if found else ""


_TAGS = r"(?:<[^<>]*>(?:[^\s<>]+<[^<>]*>)?+|\[[^\[\]]+\]|◁[^◁▷]+▷)"
_TAG = re.compile(rf"{_TAGS}|\S+")
_EMPTY = re.compile(rf"(\s*{_TAGS}[^\s<>]*\n?)\s*({_TAGS}\s*)")
"""A block of reasoning without reasoning."""

Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]], bool], str]
"""Messages, tools, whether to open an answer -> the text; empty if the template refuses them."""
A_QUESTION: Message = {"role": "user", "content": "probeask"}
_MORE: Message = {"role": "user", "content": "probemore"}
_PLAIN: Message = {"role": "assistant", "content": REPLY}
_SAID = f"""{REPLY} "a" & 'b'\n<c> é"""
"""A text that JSON and HTML write in another way."""


def stored_form(
    render: Render,
    opened: str,
    lead: str,
    tail: str,
    ends: re.Pattern[str],
    calls: CallFormat | None,
    sampled: str,
    turns: Sequence[Message],
) -> StoredForm:
    """Find the form by rendering answers.

    Args:
        opened, lead, tail, calls: those of `ChatForm`.
        ends: finds the tokens that end an answer.
        sampled: `ChatForm.call`.
        turns: the message with this call and no text, and the tool's result.
    """
    call = ends.split(sampled[calls.read(sampled, ())[0] :])[0].rstrip() if calls else ""
    end = "".join(ends.findall(sampled)[:1])
    plain = _Answered(render, (), _PLAIN, REPLY, opened, tail.strip())
    calling = _Answered(render, (A_TOOL,), turns[0], call, opened, end)
    of_call = calling.shown() if call else None
    shown = plain.shown() or of_call
    # Some templates write an empty block before each answer, and reasoning nowhere.
    empty = lead if _EMPTY.fullmatch(lead) and re.search(REASONING_WORDS, lead, re.IGNORECASE) else ""
    key, begin, between = shown or ("", *_tags_in(opened or empty))
    if ends.search(begin + between):  # engines stop before the policy has answered
        return StoredForm(taken=None, with_calls=None)
    shows, of_both = bool(shown or opened or empty), (between, of_call[2] if of_call else between)
    form = StoredForm(shows_reasoning=shows, opened=opened, begin=begin, ends=of_both)
    keys = (*KEYS, key) if key in RARE_KEYS else KEYS
    # A prompt may close reasoning at once. If it opens reasoning, an answer without it is not complete.
    thinks = shows and not _EMPTY.fullmatch(opened)

    def cases(case: _Answered, end: str, *later: Sequence[Message]) -> list[_Case]:
        """Return an answer without and with reasoning, each before other messages."""
        thoughts = [*[""] * (not thinks or bool(begin)), *([begin + THOUGHT + end] if thinks else [])]
        return [(case, thought, each) for thought in thoughts for each in later]

    alone = cases(replace(plain, message={**_PLAIN, "content": _SAID}, text=_SAID), between, [_MORE])
    found = _best(form, keys, alone)
    form = replace(form, taken=found.taken)
    if behind := [*_behind_a_result(form, plain, turns, thinks=thinks)]:
        found = _best(form, keys, [*alone, *behind])
        form = replace(form, taken=found.taken or form.taken)
    if calls and call and found.taken:
        later = [turns[1]], [turns[1], _PLAIN, _MORE]
        of_calls = cases(calling, of_both[1], *later)
        behind_text = calling.with_text(calls, ends)
        if behind_text and (not thinks or behind_text.shown() == (key, begin, between)):
            of_calls += cases(behind_text, between, *later)
        found = _best(form, keys, of_calls, ToolCall(A_CALL[0], {**A_CALL[1]}, id="call00001"))
    form = replace(form, with_calls=found.taken, calls_as_data=found.calls_as_data)
    written = plain.written([form.message(begin + THOUGHT + between + REPLY, opened), _MORE])
    return replace(form, keeps=THOUGHT in written)


@dataclass(frozen=True)
class _Answered:
    """An answer of probes: a text, or a call."""

    render: Render
    tools: Sequence[Mapping[str, Any]]
    message: Message
    text: str
    """What the policy samples for it, without reasoning."""
    opened: str
    """The start of the answer that its prompt contains."""
    end: str = ""
    """The text or token that ends it. Empty: earlier turns may end in another way."""
    before: str = ""
    """The text before the call."""
    earlier: Sequence[Message] = ()
    """Messages between the question and the answer."""

    def written(self, messages: Sequence[Message], *, opens: bool = False) -> str:
        return self.render([A_QUESTION, *self.earlier, *messages], self.tools, opens)

    @cached_property
    def prompt(self) -> str:
        return self.written([], opens=True)

    def _stands_in(self, written: str, thought: str) -> bool:
        """Return whether a text has the answer as it was sampled, once, behind what the prompt adds to the
        question, or behind what follows the question's words."""
        begun = self.opened + thought.partition(THOUGHT)[0]
        heads = self.prompt.removeprefix(self.written([])), self.prompt.rpartition(A_QUESTION["content"])[2]
        turns = [f"{head}{thought}{self.text}" for head in heads if head and head.endswith(self.opened)]
        return bool(begun) and written.count(begun) == 1 and any(turn in written for turn in turns)

    def behind_prompt(self, message: Message) -> Iterator[str]:
        """Yield what the template writes for a message behind the prompt, and behind what it opens."""
        written = self.written([message])
        for head in filter(written.startswith, (self.prompt, self.prompt.removesuffix(self.opened))):
            yield written[len(head) :]

    @property
    def sampled(self) -> str:
        return next(self.behind_prompt(self.message), "")

    def shown(self) -> tuple[str, str, str] | None:
        """Return the key of the reasoning, and what the policy samples before it and between it and the text.
        None if the template writes no reasoning in a last answer."""
        text = self.message["content"]
        parts = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": text}]
        blocks = [{"type": "thoughts", "text": THOUGHT}, {"type": "response", "text": text}]  # Apertus
        contents = [("content", parts), ("content", {"blocks": blocks})]
        places = [*((key, THOUGHT) for key in KEYS), *contents, *((key, THOUGHT) for key in RARE_KEYS)]
        for key, value in places:
            for written in self.behind_prompt({**self.message, key: value}):
                begin, _, rest = written.partition(THOUGHT)
                between, found, _ = rest.partition(self.text)
                if found:
                    return key, begin, between
        return None

    def with_text(self, calls: CallFormat, ends: re.Pattern[str]) -> "_Answered | None":
        """Return this call with a text before it; None if the template does not write both."""
        both = replace(self, message={**self.message, "content": REPLY})
        _, found, rest = both.sampled.partition(REPLY)
        text = REPLY + ends.split(rest)[0].rstrip()
        before, made = calls.split(text)
        if not found or not made or made[0].fault or not before.startswith(REPLY):
            return None
        return replace(both, text=text, before=before)

    def takes(
        self, form: StoredForm, thought: str, later: Sequence[Message], calls: Sequence[ToolCall]
    ) -> int:
        """Return 2 if the template writes an answer as it was sampled, and what follows it; 1 if without its
        reasoning (there it may have other white space); else 0."""
        message = form.message(thought + self.text, self.opened, thought + self.before, calls)
        written = self.written([message, *later])
        if not all(each["content"] in written for each in later):
            return 0
        sampled = self.prompt + thought + self.text
        if written.startswith(sampled) and written[len(sampled) :].lstrip().startswith(self.end):
            return 2
        # A later user's turn may change the question: some templates write the tools in the last one.
        if not written.startswith(self.prompt) and self._stands_in(written, thought):
            return 2
        if THOUGHT in written or not ("tool_calls" in message or self.text in written):
            return 0
        bare = self.written([self.message, *later])
        return int("".join(written.split()) == "".join(bare.split()))


_Case = tuple[_Answered, str, Sequence[Message]]
"""An answer, its reasoning with its tags, and the messages behind it."""


def _best(form: StoredForm, keys: Iterable[str], cases: Sequence[_Case], *made: ToolCall) -> StoredForm:
    """Return the form in which the template takes all of the cases; `taken` is None if there is none.
    `keys`: those under which it may take reasoning. `made`: the call of the cases."""
    found, most = replace(form, taken=None, with_calls=None), 0
    for taken, as_data in product(("text", "opened", *keys, "parts"), (False, True)[: 1 + len(made)]):
        trial = replace(form, taken=taken, with_calls=taken, calls_as_data=as_data)
        takes = [case.takes(trial, thought, later, made) for case, thought, later in cases]
        # A form that keeps the reasoning goes before one without it.
        if all(takes) and sum(takes) > most:
            found, most = trial, sum(takes)
        if min(takes) == 2:
            break
    return found


def _behind_a_result(
    form: StoredForm, plain: _Answered, turns: Sequence[Message], *, thinks: bool
) -> Iterator[_Case]:
    """Yield answers behind a tool's result, if its prompt opens something else than a user's."""
    case = replace(plain, tools=(A_TOOL,), earlier=turns)
    case = replace(case, opened=form.opened_in(case.prompt))
    if turns[1]["content"] in case.prompt and case.opened != form.opened:
        yield case, case.sampled.partition(REPLY)[0], [_MORE]
        if thinks:
            yield case, form.unopened(case.opened) + form.begin + THOUGHT + form.ends[0], [_MORE]


def _tags_in(opened: str) -> tuple[str, str]:
    """Return what the policy samples around its reasoning, as far as the start of its answer tells."""
    if empty := _EMPTY.fullmatch(opened):
        return empty[1], empty[2]
    if found := re.search(r"([<\[])([\w:-]+[>\]])(\s*)\Z", opened):
        line = "\n" if found[3] else ""
        return "", f"{line}{found[1]}/{found[2]}{line}{line}"
    return "<think>\n", "\n</think>\n\n"
