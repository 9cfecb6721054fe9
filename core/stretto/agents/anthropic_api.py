"""Anthropic's Messages API as data: parse requests, and write answers.

A request becomes the messages of chat templates: each `tool_result` is a message of its own, the blocks of an
answer are one message. `thinking` is left out: the policy's reasoning is part of its text. Unknown fields and
those that would change sampling are ignored; requests that cannot be met are refused.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from stretto.agents import api_call
from stretto.agents.recorder import Input
from stretto.component import PositiveInt
from stretto.dataset import Message

__all__ = ["MessageCall", "anthropic_error"]

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
"""HTTP status -> the API's type of error; others: `invalid_request_error`, or `api_error` from 500 on."""


_Blocks = str | list[dict[str, Any]]


class _AnthropicMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: _Blocks


class _TextBlock(msgspec.Struct):
    text: str


class _ToolUseBlock(msgspec.Struct):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResultBlock(msgspec.Struct):
    tool_use_id: str
    content: _Blocks | None = None


class _ToolChoice(msgspec.Struct):
    type: str


class _OutputConfig(msgspec.Struct):
    format: Any = None


class _MessageBody(msgspec.Struct):
    messages: Annotated[list[_AnthropicMessage], msgspec.Meta(min_length=1)]
    model: str = api_call.MODEL
    max_tokens: PositiveInt | None = None
    system: _Blocks | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None
    mcp_servers: list[Any] | None = None


class MessageCall:
    """`POST /v1/messages`, and `POST /v1/messages/count_tokens` with the same body."""

    ends_with_done = False

    def __init__(self, body: bytes) -> None:
        ask = api_call.read_body(body, _MessageBody)
        if ask.output_config is not None and ask.output_config.format is not None:
            raise api_call.ApiError("a format of the output is not supported", param="output_config.format")
        if ask.mcp_servers:
            raise api_call.ApiError("the policy calls no servers; send tools in `tools`", param="mcp_servers")
        if ask.messages[-1].role == "assistant":
            raise api_call.ApiError("the beginning of an answer is not supported; end with a user's message")
        system = _text(ask.system or "", "system")
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for index, message in enumerate(ask.messages):
            self.messages += _plain(message, f"messages[{index}]")
        self.inputs: list[Input] = [self.messages]
        self.images: list[bytes] = []
        self.tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(ask.tools or [])]
        self.reads_tools = _reads_tools(self.tools, ask.tool_choice)
        self.max_tokens = ask.max_tokens
        self.stop = api_call.stop_texts(ask.stop_sequences, "stop_sequences")
        self.stream = bool(ask.stream)
        self._model = ask.model
        self._id = f"msg_{secrets.token_hex(12)}"
        self._text_open = False

    def response(self, replies: Sequence[api_call.Reply]) -> dict[str, Any]:
        [reply] = replies
        text = [{"type": "text", "text": reply.text, "citations": None}] if reply.text else []
        content = [*text, *map(_tool_use, reply.message.get("tool_calls", []))]
        usage = _usage(reply.prompt_tokens, len(reply.answer.tokens))
        return {**self._head(content), **self._ending(reply), "usage": usage}

    def opening(self, prompt_tokens: int) -> Iterator[api_call.Event]:
        """Yield `message_start`, with empty content."""
        ending = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head([]), **ending, "usage": _usage(prompt_tokens, 0)}
        yield _event("message_start", message=message)

    def piece(self, choice: int, text: str) -> Iterator[api_call.Event]:
        """Yield the text; before the first text, the start of its block."""
        del choice
        if not self._text_open:
            self._text_open = True
            block = {"type": "text", "text": "", "citations": None}
            yield _event("content_block_start", index=0, content_block=block)
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def choice_end(self, choice: int, reply: api_call.Reply) -> Iterator[api_call.Event]:
        """Yield the end of the text, then each tool call as a block of its own."""
        del choice
        if self._text_open:
            yield _event("content_block_stop", index=0)
        for index, call in enumerate(reply.message.get("tool_calls", []), int(self._text_open)):
            block = _tool_use(call)
            arguments = msgspec.json.encode(block["input"]).decode()
            yield _event("content_block_start", index=index, content_block={**block, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": arguments}
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)

    def closing(self, replies: Sequence[api_call.Reply]) -> Iterator[api_call.Event]:
        """Yield the stop reason and the token counts."""
        [reply] = replies
        usage = _usage(reply.prompt_tokens, len(reply.answer.tokens))
        yield _event("message_delta", delta=self._ending(reply), usage=usage)
        yield _event("message_stop")

    def failed(self, error: api_call.ApiError) -> api_call.Event:
        return "error", anthropic_error(error)

    def _head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content}

    def _ending(self, reply: api_call.Reply) -> dict[str, str | None]:
        ends = [(at, stop) for stop in self.stop if (at := reply.answer.text.find(stop)) >= 0]
        if "tool_calls" in reply.message:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if ends:
            return {"stop_reason": "stop_sequence", "stop_sequence": min(ends)[1]}
        reason = "max_tokens" if reply.answer.finish == "length" else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def _plain(message: _AnthropicMessage, location: str) -> Iterator[Message]:
    """Yield a message in the form of chat templates. A user's becomes one for each tool result and text."""
    blocks = _blocks(message.content)
    if message.role == "assistant":
        yield _answer(blocks, location)
        return
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{location}.content[{index}]"
        if block.get("type") != "tool_result":
            texts.append(_text([block], place))
            continue
        if texts:
            yield {"role": message.role, "content": "".join(texts)}
            texts = []
        result = api_call.read_item(block, _ToolResultBlock, place)
        content = _text(result.content or "", f"{place}.content")
        yield {"role": "tool", "content": content, "tool_call_id": result.tool_use_id}
    if texts or not blocks:
        yield {"role": message.role, "content": "".join(texts)}


def _answer(blocks: Sequence[dict[str, Any]], location: str) -> Message:
    """Return an assistant's message, equal to the one that the endpoint made of the same answer."""
    text, calls = "", list[dict[str, Any]]()
    for index, block in enumerate(blocks):
        place = f"{location}.content[{index}]"
        match block.get("type"):
            case "tool_use":
                use = api_call.read_item(block, _ToolUseBlock, place)
                function = {"name": use.name, "arguments": use.input}
                calls.append({"id": use.id, "type": "function", "function": function})
            case "thinking" | "redacted_thinking":  # other models have these
                pass
            case _:
                text += _text([block], place)
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _blocks(content: _Blocks) -> Sequence[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(content: _Blocks, location: str) -> str:
    texts: list[str] = []
    for block in _blocks(content):
        if (kind := block.get("type")) != "text":
            raise api_call.ApiError(f"{location}: only text is supported, not {kind!r}", param=location)
        texts.append(api_call.read_item(block, _TextBlock, location).text)
    return "".join(texts)


def _tool(tool: Mapping[str, Any], location: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        message = f"{location}: only tools with an `input_schema` are supported, not {kind!r}"
        raise api_call.ApiError(message, param=f"{location}.type")
    return api_call.function_tool(
        tool.get("name"), tool.get("description"), tool.get("input_schema"), location
    )


def _reads_tools(tools: Sequence[Any], choice: _ToolChoice | None) -> bool:
    kind = "auto" if choice is None else choice.type
    if kind not in ("auto", "none"):
        message = f"a tool call cannot be forced: {kind!r}; expected 'auto' or 'none'"
        raise api_call.ApiError(message, param="tool_choice.type")
    return bool(tools) and kind == "auto"


def anthropic_error(error: api_call.ApiError) -> dict[str, Any]:
    """Return the body of an error as Anthropic's server writes it."""
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": None}


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}


def _usage(prompt_tokens: int, sampled: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt_tokens, "output_tokens": sampled, **cached}


def _event(kind: str, **data: Any) -> api_call.Event:
    return kind, {"type": kind, **data}
