"""How an answer of the policy goes back into the history, so that the chat template writes it again.

Templates take an answer with reasoning in one of several forms: as it was sampled, with the start that the
prompt contained, or with the reasoning under a key of its own. `stored_form` renders an answer in each of
them, and takes the first that the template writes as the policy samples it, else the first that it writes
without its reasoning.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

from stretto.chat.calls import A_CALL, A_TOOL, REPLY, ToolCall
from stretto.dataset import Message, OwnTurn
from stretto.reward import REASONING_WORDS, reasoning_end

__all__ = ["A_QUESTION", "THOUGHT", "StoredForm", "stored_form"]

Taken = Literal["text", "opened", "reasoning_content", "reasoning", "thinking", "parts"]
"""As sampled; with the start of the answer that is in the prompt; under a key; as a part of the content."""
KEYS: Sequence[Taken] = ("reasoning_content", "reasoning", "thinking")
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
    begin: str = ""
    """What the policy samples before its reasoning; empty if the prompt opens it."""
    ends: tuple[str, str] = ("", "")
    """What it samples between the reasoning and the content, and between the reasoning and a call."""

    def message(self, text: str, before: str = "", calls: Sequence[ToolCall] = ()) -> Message:
        """Return the assistant's message of an answer.

        Args:
            text: the sampled text, without the token that ended it.
            before: the part of it before the first call.
            calls: its calls.
        """
        as_data = bool(calls) and self.calls_as_data
        body, taken = (before if as_data else text), (self.with_calls if calls else self.taken)
        message: dict[str, Any] = {"role": "assistant", "content": body}
        if taken not in ("text", None) and (parts := self.split(body)):
            reasoning, content = parts
            if taken == "opened":
                message["content"] = self.opened + body
            elif taken == "parts":
                thought = {"type": "thinking", "thinking": reasoning}
                message["content"] = [thought, *([{"type": "text", "text": content}] if content else [])]
            else:
                message |= {"content": content, str(taken): reasoning}
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
        for written, behind in zip(self.ends, self._behind, strict=True):
            if content.startswith(behind):
                content = content.removeprefix(behind).removeprefix(written[len(written.rstrip()) :])
                break
        return reasoning.strip(), content

    def is_malformed(self, text: str) -> bool:
        """Return whether an answer has a tag of reasoning, and cannot be split there."""
        return any(tag and tag in text for tag in (self.begin.strip(), self.end)) and not self.split(text)

    def reasoning_end(self, text: str, opened: str) -> int | None:
        """Return what `stretto.reward.reasoning_end` does, with the model's own tags: channels, words, and
        special tokens."""
        end, begin, tag = reasoning_end(text, opened), self.begin.strip(), self.end
        if end is None or not tag or re.fullmatch(r"</[^<>|]+>|\[/[^\[\]]+\]", tag):
            return end
        start = text.rfind(begin) if begin else 0 if opened and opened == self.opened else -1
        if start < 0:
            return end
        if (place := text.find(tag, start + len(begin))) < 0:
            return None
        behind = place + len(tag)
        rest = next((each for each in self._behind if text.startswith(each, behind)), "")
        return max(end, behind + len(rest))

    @property
    def _behind(self) -> list[str]:
        return [each.strip().removeprefix(self.end) for each in self.ends]

    @property
    def end(self) -> str:
        """The tag that ends reasoning, such as `</think>`, or `<|close|>think<|sep|>`."""
        found = _TAG.match(self.ends[0].strip())
        return found[0] if found else ""


_TAGS = r"<[^<>]*>(?:[^\s<>]+<[^<>]*>)?+"
_TAG = re.compile(rf"\[[^\[\]]*\]|{_TAGS}|\S+")
_EMPTY = re.compile(rf"(\s*{_TAGS}[^\s<>]*\n?)\s*({_TAGS}\s*)")
"""A block of reasoning without reasoning."""

Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]], bool], str]
"""Messages, tools, whether to open an answer -> the text; empty if the template refuses them."""
A_QUESTION: Message = {"role": "user", "content": "probeask"}
_MORE: Message = {"role": "user", "content": "probemore"}
_PLAIN: Message = {"role": "assistant", "content": REPLY}


def stored_form(
    render: Render, opened: str, lead: str, ends: re.Pattern[str], call: str, turns: Sequence[Message]
) -> StoredForm:
    """Find the form by rendering answers.

    Args:
        opened, lead: those of `ChatForm`.
        ends: finds the tokens that end an answer.
        call: `stretto.chat.calls.A_CALL`, as the policy samples it, with its end; empty if it cannot be read.
        turns: the message with this call and no text, and the tool's result.
    """
    call, end = ends.split(call)[0].rstrip(), "".join(ends.findall(call)[:1])
    plain, calling = _Answered(render, (), _PLAIN, REPLY), _Answered(render, (A_TOOL,), turns[0], call, end)
    of_call = calling.shown(opened) if call else None
    shown = plain.shown(opened) or of_call
    # Some templates write an empty block before each answer, and reasoning nowhere.
    empty = lead if _EMPTY.fullmatch(lead) and re.search(REASONING_WORDS, lead, re.IGNORECASE) else ""
    begin, between = shown or _tags_in(opened or empty)
    if ends.search(begin + between):  # engines stop before the policy has answered
        return StoredForm(taken=None, with_calls=None)
    form = StoredForm(opened=opened, begin=begin, ends=(between, of_call[1] if of_call else between))
    # A prompt may close reasoning at once. If it opens reasoning, an answer without it is not complete.
    thinks = bool(shown or opened or empty) and not _EMPTY.fullmatch(opened)
    bare = [""] * (not thinks or bool(begin))

    def first(
        case: _Answered, end: str, later: Sequence[Sequence[Message]], *made: ToolCall
    ) -> tuple[Taken | None, bool]:
        thoughts = [*bare, *([begin + THOUGHT + end] if thinks else [])]
        best: tuple[int, Taken | None, bool] = (0, None if thinks else "text", False)
        for taken, as_data in product(("text", "opened", *KEYS, "parts"), (False, True)[: 1 + len(made)]):
            trial = replace(form, taken=taken, with_calls=taken, calls_as_data=as_data)
            messages = [(thought, trial.message(thought + case.text, thought, made)) for thought in thoughts]
            shown = [case.takes(message, thought, each) for thought, message in messages for each in later]
            # A form that keeps the reasoning goes before one without it.
            if all(shown) and sum(shown) > best[0]:
                best = sum(shown), taken, as_data
            if min(shown) == 2:
                break
        return best[1:]

    form = replace(form, taken=first(plain, between, [[_MORE]])[0])
    if call:
        made = ToolCall(A_CALL[0], {**A_CALL[1]}, id="call00001")
        with_calls, as_data = first(calling, form.ends[1], [[turns[1]], [turns[1], _PLAIN, _MORE]], made)
        form = replace(form, with_calls=with_calls, calls_as_data=as_data)
    written = plain.written([form.message(begin + THOUGHT + between + REPLY), _MORE])
    return replace(form, keeps=THOUGHT in written)


@dataclass(frozen=True)
class _Answered:
    """An answer of probes: a text, or a call."""

    render: Render
    tools: Sequence[Mapping[str, Any]]
    message: Message
    text: str
    """What the policy samples for it, without reasoning."""
    end: str = ""
    """The token that ends it. Empty: earlier turns may end in another way."""

    def written(self, messages: Sequence[Message], *, opens: bool = False) -> str:
        return self.render([A_QUESTION, *messages], self.tools, opens)

    @cached_property
    def prompt(self) -> str:
        return self.written([], opens=True)

    def shown(self, opened: str) -> tuple[str, str] | None:
        """Return what the policy samples before its reasoning and between it and the text. None if the
        template writes no reasoning in a last answer."""
        content = self.message["content"]
        parts = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": content}]
        for each in (*({key: THOUGHT} for key in KEYS), {"content": parts}):
            written = self.written([{**self.message, **each}])
            for head in filter(written.startswith, (self.prompt, self.prompt.removesuffix(opened))):
                begin, _, rest = written[len(head) :].partition(THOUGHT)
                between, found, _ = rest.partition(self.text)
                if found:
                    return begin, between
        return None

    def takes(self, message: Message, thought: str, later: Sequence[Message]) -> int:
        """Return 2 if the template writes a message as it was sampled, and what follows it; 1 if without its
        reasoning (there it may have other white space); else 0."""
        written = self.written([message, *later])
        if not all(each["content"] in written for each in later):
            return 0
        sampled = self.prompt + thought + self.text
        if written.startswith(sampled) and written[len(sampled) :].lstrip().startswith(self.end):
            return 2
        if THOUGHT in written or not ("tool_calls" in message or self.text in written):
            return 0
        bare = self.written([self.message, *later])
        return int("".join(written.split()) == "".join(bare.split()))


def _tags_in(opened: str) -> tuple[str, str]:
    """Return what the policy samples around its reasoning, as far as the start of its answer tells."""
    if empty := _EMPTY.fullmatch(opened):
        return empty[1], empty[2]
    if found := re.search(r"([<\[])([\w:-]+[>\]])(\s*)\Z", opened):
        line = "\n" if found[3] else ""
        return "", f"{line}{found[1]}/{found[2]}{line}{line}"
    return "<think>\n", "\n</think>\n\n"
