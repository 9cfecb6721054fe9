"""OpenAI's HTTP API as data: parse requests, and write answers.

Unknown fields are ignored, as OpenAI's server does, and so are those that would change sampling
(`temperature`, `top_p`, `seed`, penalties, `logit_bias`): the run file sets them. Requests that cannot be met
(other kinds of tools and contents, forced calls, formats) are refused.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from stretto.agents.api_call import (
    MODEL,
    ApiError,
    Event,
    Reply,
    function_tool,
    image_of_url,
    read_body,
    read_item,
    stop_texts,
)
from stretto.agents.recorder import Input
from stretto.component import NonNegativeInt, PositiveInt
from stretto.dataset import Message
from stretto.models.images import ImageFile
from stretto.tokenizer import Tokenizer
from stretto.workflow import Answer

__all__ = ["ChatCall", "CompletionCall", "ResponseCall", "openai_error"]


class _ImageURL(msgspec.Struct):
    url: str


class _Part(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""
    image_url: str | _ImageURL = ""


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _APIToolCall(msgspec.Struct):
    id: str
    function: _CalledFunction
    type: Literal["function"] = "function"


class _ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_APIToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Kind(msgspec.Struct):
    type: str = "text"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


_Stop = str | Annotated[list[str], msgspec.Meta(max_length=16)] | None
_Choices = Annotated[int, msgspec.Meta(ge=1, le=128)] | None


class _ChoicesBody(msgspec.Struct, kw_only=True):
    model: str = MODEL
    n: _Choices = None
    max_tokens: PositiveInt | None = None
    stop: _Stop = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class _ChatBody(_ChoicesBody, kw_only=True):
    messages: Annotated[list[_ChatMessage], msgspec.Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    logprobs: bool | None = None
    top_logprobs: NonNegativeInt | None = None
    response_format: _Kind | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class _CompletionBody(_ChoicesBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: NonNegativeInt | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class _TextOptions(msgspec.Struct):
    format: _Kind | None = None


class _ResponseBody(msgspec.Struct):
    input: str | list[dict[str, Any]]
    model: str = MODEL
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: PositiveInt | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: _TextOptions | None = None
    background: bool | None = None
    conversation: Any = None
    metadata: dict[str, str] | None = None


class _InputMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]


class _InputCall(msgspec.Struct):
    call_id: str
    name: str
    arguments: str


class _InputOutput(msgspec.Struct):
    call_id: str
    output: str | list[_Part]


class _ChoicesCall:
    """What the two calls share whose answers are choices."""

    ends_with_done = True
    _streamed: str
    """Kind of the objects in a stream."""

    def __init__(self, ask: _ChoicesBody, id: str, tokenizer: Tokenizer) -> None:
        self.stop = stop_texts(ask.stop, "stop")
        self.stream = bool(ask.stream)
        self._n, self._model = ask.n, ask.model
        self._tokenizer = tokenizer
        self._id = f"{id}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._with_usage = ask.stream_options is not None and bool(ask.stream_options.include_usage)

    def closing(self, replies: Sequence[Reply]) -> Iterator[Event]:
        """Yield the token counts if the request asked for them."""
        if self._with_usage:
            yield "", {**self._head(self._streamed), "choices": [], "usage": _usage(replies, self._n)}

    def failed(self, error: ApiError) -> Event:
        return "", {"error": openai_error(error)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


class ChatCall(_ChoicesCall):
    """`POST /v1/chat/completions`."""

    _streamed = "chat.completion.chunk"

    def __init__(self, body: bytes, tokenizer: Tokenizer) -> None:
        ask = read_body(body, _ChatBody)
        if ask.functions:
            raise ApiError("'functions' is not supported; send the functions as 'tools'", param="functions")
        if ask.top_logprobs:
            raise ApiError("only logprobs of sampled tokens are available", param="top_logprobs")
        _refuse_format(ask.response_format, "response_format")
        _refuse_template(ask, tokenizer)
        self.images: list[bytes] = []
        messages = [_plain(message, f"messages[{i}]", self.images) for i, message in enumerate(ask.messages)]
        self.inputs: list[Input] = [messages] * (ask.n or 1)
        self.tools = [_function(tool, tool.get("function"), i) for i, tool in enumerate(ask.tools or [])]
        self.reads_tools = _reads_tools(self.tools, ask.tool_choice)
        self.max_tokens = ask.max_completion_tokens or ask.max_tokens
        self._asked_logprobs = ask.logprobs
        super().__init__(ask, "chatcmpl", tokenizer)

    def response(self, replies: Sequence[Reply]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, reply in enumerate(replies):
            calls = _tool_calls(reply)
            message = {"role": "assistant", "content": reply.text or (None if calls else ""), "refusal": None}
            choices.append(
                {
                    "index": index,
                    "message": {**message, **({"tool_calls": calls} if calls else {})},
                    "logprobs": self._logprobs(reply),
                    "finish_reason": _finish_reason(reply),
                }
            )
        return {**self._head("chat.completion"), "choices": choices, "usage": _usage(replies, self._n)}

    def opening(self, prompt_tokens: int) -> Iterator[Event]:
        """Yield the role of each choice."""
        del prompt_tokens
        for index in range(len(self.inputs)):
            yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def piece(self, choice: int, text: str) -> Iterator[Event]:
        """Yield a chunk of text."""
        yield self._chunk(choice, {"content": text})

    def choice_end(self, choice: int, reply: Reply) -> Iterator[Event]:
        """Yield the tool calls, then the finish reason. All logprobs come at the end, in one event."""
        for index, call in enumerate(_tool_calls(reply)):
            yield self._chunk(choice, {"tool_calls": [{"index": index, **call}]})
        yield self._chunk(choice, {}, _finish_reason(reply), self._logprobs(reply))

    def _chunk(
        self, choice: int, delta: Mapping[str, Any], finish_reason: str | None = None, logprobs: Any = None
    ) -> Event:
        choices = [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}]
        return "", {**self._head(self._streamed), "choices": choices}

    def _logprobs(self, reply: Reply) -> dict[str, Any] | None:
        if not self._asked_logprobs:
            return None
        texts = _token_texts(reply.answer, self._tokenizer)
        logprobs = reply.answer.logprobs.tolist()
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


class CompletionCall(_ChoicesCall):
    """`POST /v1/completions`."""

    reads_tools = False
    _streamed = "text_completion"

    def __init__(self, body: bytes, tokenizer: Tokenizer) -> None:
        ask = read_body(body, _CompletionBody)
        for name in ("echo", "suffix"):
            if getattr(ask, name):
                raise ApiError(f"{name!r} is not supported", param=name)
        if (ask.best_of or 1) > (ask.n or 1):
            raise ApiError("'best_of' is not supported: the answer has every sampled choice", param="best_of")
        if ask.logprobs:
            raise ApiError("expected 0: only logprobs of sampled tokens are available", param="logprobs")
        self.tools: list[dict[str, Any]] = []
        self.images: list[bytes] = []
        self.inputs: list[Input] = [prompt for prompt in _prompts(ask.prompt) for _ in range(ask.n or 1)]
        self.max_tokens = ask.max_tokens
        self._asked_logprobs = ask.logprobs
        super().__init__(ask, "cmpl", tokenizer)

    def response(self, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [self._choice(i, reply.text, reply) for i, reply in enumerate(replies)]
        return {**self._head(self._streamed), "choices": choices, "usage": _usage(replies, self._n)}

    def opening(self, prompt_tokens: int) -> Iterator[Event]:
        """Yield no events."""
        del prompt_tokens
        yield from ()

    def piece(self, choice: int, text: str) -> Iterator[Event]:
        """Yield a chunk of text."""
        yield "", {**self._head(self._streamed), "choices": [self._choice(choice, text)]}

    def choice_end(self, choice: int, reply: Reply) -> Iterator[Event]:
        """Yield a choice's last chunk: its finish reason, and the logprobs of all its tokens."""
        yield "", {**self._head(self._streamed), "choices": [self._choice(choice, "", reply)]}

    def _choice(self, index: int, text: str, reply: Reply | None = None) -> dict[str, Any]:
        """Return a choice of a whole answer, or of a chunk. A chunk with `reply` is the choice's last one."""
        return {
            "index": index,
            "text": text,
            "logprobs": None if reply is None else self._logprobs(reply),
            "finish_reason": None if reply is None else reply.answer.finish,
        }

    def _logprobs(self, reply: Reply) -> dict[str, Any] | None:
        if self._asked_logprobs is None:
            return None
        texts = _token_texts(reply.answer, self._tokenizer)
        offsets = np.cumsum([0, *map(len, texts)])[:-1]
        return {
            "tokens": texts,
            "token_logprobs": reply.answer.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": offsets.tolist(),
        }


class ResponseCall:
    """`POST /v1/responses`. `earlier`: id of a response -> messages of its chat; `response` adds an entry."""

    ends_with_done = False

    def __init__(self, body: bytes, earlier: dict[str, list[Message]]) -> None:
        ask = read_body(body, _ResponseBody)
        for name in ("background", "conversation"):
            if getattr(ask, name):
                raise ApiError(f"{name!r} is not supported", param=name)
        _refuse_format(ask.text and ask.text.format, "text.format")
        previous: list[Message] = []
        if ask.previous_response_id is not None:
            if ask.previous_response_id not in earlier:
                message = f"no response {ask.previous_response_id!r} in this agent run"
                raise ApiError(message, param="previous_response_id", code="previous_response_not_found")
            previous = earlier[ask.previous_response_id]
        self.images: list[bytes] = []
        self._messages = _merge_calls([*previous, *_items(ask.input, self.images)])
        system = [] if ask.instructions is None else [{"role": "system", "content": ask.instructions}]
        self.inputs: list[Input] = [[*system, *self._messages]]
        self.tools = [_function(tool, tool, i) for i, tool in enumerate(ask.tools or [])]
        self.reads_tools = _reads_tools(self.tools, ask.tool_choice)
        self.max_tokens = ask.max_output_tokens
        self.stop: list[str] = []
        self.stream = bool(ask.stream)
        self._ask = ask
        self._earlier = earlier
        self._id = f"resp_{secrets.token_hex(12)}"
        self._message_id = f"msg_{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._events = 0
        self._begun = False

    def response(self, replies: Sequence[Reply]) -> dict[str, Any]:
        [reply] = replies
        self._earlier[self._id] = [*self._messages, reply.message]
        truncated = reply.answer.finish == "length" and "tool_calls" not in reply.message
        usage = _usage(replies)
        return {
            **self._head("incomplete" if truncated else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
            "output": [
                *([self._message(reply.text, "completed")] if self._has_message(reply) else []),
                *map(_output_call, _tool_calls(reply)),
            ],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def opening(self, prompt_tokens: int) -> Iterator[Event]:
        """Yield two events: the response is created, and it is in progress."""
        del prompt_tokens
        head = {**self._head("in_progress"), "output": [], "usage": None}
        yield self._event("response.created", response=head)
        yield self._event("response.in_progress", response=head)

    def piece(self, choice: int, text: str) -> Iterator[Event]:
        """Yield the text; before the first text, events that open its message."""
        del choice
        yield from self._open_message()
        yield self._of_message("response.output_text.delta", delta=text, logprobs=[])

    def choice_end(self, choice: int, reply: Reply) -> Iterator[Event]:
        """Yield the end of the message, then each tool call as an item of its own."""
        del choice
        first_index = 0
        if self._begun or self._has_message(reply):
            yield from self._open_message()
            part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
            yield self._of_message("response.output_text.done", text=reply.text, logprobs=[])
            yield self._of_message("response.content_part.done", part=part)
            item = self._message(reply.text, "completed")
            yield self._event("response.output_item.done", output_index=0, item=item)
            first_index = 1
        for index, call in enumerate(_tool_calls(reply), first_index):
            item = _output_call(call)
            place = {"item_id": item["id"], "output_index": index}
            open_item = {**item, "arguments": "", "status": "in_progress"}
            name, arguments, done = item["name"], item["arguments"], "response.function_call_arguments.done"
            yield self._event("response.output_item.added", output_index=index, item=open_item)
            yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
            yield self._event(done, **place, name=name, arguments=arguments)
            yield self._event("response.output_item.done", output_index=index, item=item)

    def closing(self, replies: Sequence[Reply]) -> Iterator[Event]:
        """Yield the whole response."""
        response = self.response(replies)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> Event:
        data = openai_error(error)
        return self._event("error", code=data["code"], message=data["message"], param=data["param"])

    def _head(self, status: str) -> dict[str, Any]:
        ask = self._ask
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": ask.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": ask.instructions,
            "max_output_tokens": ask.max_output_tokens,
            "metadata": ask.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": ask.previous_response_id,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": ask.tool_choice or "auto",
            "tools": ask.tools or [],
            "top_p": None,
        }

    def _has_message(self, reply: Reply) -> bool:
        return bool(reply.text) or "tool_calls" not in reply.message

    def _message(self, text: str, status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        content = [part] if status == "completed" else []
        head = {"id": self._message_id, "type": "message", "role": "assistant"}
        return {**head, "status": status, "content": content}

    def _open_message(self) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            item = self._message("", "in_progress")
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._of_message("response.content_part.added", part=part)

    def _of_message(self, kind: str, **data: Any) -> Event:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **data)

    def _event(self, kind: str, **data: Any) -> Event:
        self._events += 1
        return kind, {"type": kind, "sequence_number": self._events - 1, **data}


# ------------------------------------------------------------------------------- reading requests


def _plain(message: _ChatMessage, location: str, images: list[bytes]) -> Message:
    """Return a message for chat templates, the same for equal messages. Append its images to `images`."""
    # OpenAI's newer models call the role `developer` that templates call `system`.
    role = "system" if message.role == "developer" else message.role
    content = _content(message.content, f"{location}.content", images)
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    if role == "tool" and message.tool_call_id is None:
        raise ApiError(f"{location}: a tool's message needs 'tool_call_id'", param=f"{location}.tool_call_id")
    return plain


def _content(
    content: str | list[_Part] | None, location: str, images: list[bytes]
) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, str]] = []
    for index, part in enumerate(content):
        if part.type in ("image_url", "input_image"):
            url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
            image = ImageFile(image_of_url(url, f"{location}[{index}].image_url"))
            images.append(image.file)
            parts.append({"type": "image", "sha256": image.digest})
        elif part.type in ("text", "input_text", "output_text", "refusal"):
            parts.append({"type": "text", "text": part.text or part.refusal})
        else:
            message = f"{location}: only text and images are supported, not {part.type!r}"
            raise ApiError(message, param=location)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _call(call: _APIToolCall) -> dict[str, Any]:
    """Return a tool call for chat templates. Its arguments are data, or text if they are no JSON object."""
    try:
        arguments = msgspec.json.decode(call.function.arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _function(tool: Mapping[str, Any], function: Any, index: int) -> dict[str, Any]:
    place = f"tools[{index}]"
    if (kind := tool.get("type")) != "function":
        raise ApiError(f"{place}: only functions are supported, not {kind!r}", param=f"{place}.type")
    fields = function if isinstance(function, dict) else {}
    return function_tool(fields.get("name"), fields.get("description"), fields.get("parameters"), place)


def _reads_tools(tools: Sequence[Any], choice: str | Mapping[str, Any] | None) -> bool:
    if choice not in (None, "auto", "none"):
        raise ApiError("a tool call cannot be forced; expected 'auto' or 'none'", param="tool_choice")
    return bool(tools) and choice != "none"


def _refuse_format(kind: _Kind | None, param: str) -> None:
    if kind is not None and kind.type != "text":
        raise ApiError(f"the format {kind.type!r} is not supported; expected 'text'", param=param)


def _refuse_template(ask: _ChatBody, tokenizer: Tokenizer) -> None:
    """Refuse fields of other servers that change how the chat template writes the messages."""
    if ask.continue_final_message or ask.add_generation_prompt is False:
        param = "continue_final_message" if ask.continue_final_message else "add_generation_prompt"
        raise ApiError("the beginning of an answer is not supported; end with a user's message", param=param)
    run_arguments = {} if tokenizer.rows is None else tokenizer.rows.template
    if ask.chat_template_kwargs and any(
        run_arguments.get(key) != value for key, value in ask.chat_template_kwargs.items()
    ):
        raise ApiError(
            f"the run file sets the arguments of the chat template: dataset.template is {run_arguments}",
            param="chat_template_kwargs",
        )


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Input]:
    prompts: list[Any] = [prompt]
    if isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt):
        prompts = prompt
    if not prompts or not all(prompts):
        raise ApiError("a prompt needs at least one token", param="prompt")
    if any(isinstance(item, int) for item in prompts):
        raise ApiError("expected text, token ids, or a list of either", param="prompt")
    return [item if isinstance(item, str) else np.asarray(item, np.int32) for item in prompts]


def _items(items: str | list[dict[str, Any]], images: list[bytes]) -> list[Message]:
    """Return the input items of a response as chat messages. Each tool call becomes its own message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    return [message for i, item in enumerate(items) for message in _item(item, f"input[{i}]", images)]


def _item(item: dict[str, Any], location: str, images: list[bytes]) -> list[Message]:
    match item.get("type", "message"):
        case "message":
            message = read_item(item, _InputMessage, location)
            return [_plain(_ChatMessage(role=message.role, content=message.content), location, images)]
        case "function_call":
            call = read_item(item, _InputCall, location)
            tool_call = _APIToolCall(call.call_id, _CalledFunction(call.name, call.arguments))
            return [{"role": "assistant", "content": "", "tool_calls": [_call(tool_call)]}]
        case "function_call_output":
            output = read_item(item, _InputOutput, location)
            content = _content(output.output, f"{location}.output", images)
            return [{"role": "tool", "content": content, "tool_call_id": output.call_id}]
        case "reasoning":  # other models have these items; the policy's reasoning is part of its text
            return []
        case other:
            raise ApiError(f"{location}: {other!r} is not supported", param=f"{location}.type")


def _merge_calls(messages: Sequence[Message]) -> list[Message]:
    """Move tool calls into the assistant's message before them: the items of one answer are one message."""
    merged: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls and not message["content"] and merged and merged[-1]["role"] == "assistant":
            merged[-1] = {**merged[-1], "tool_calls": [*merged[-1].get("tool_calls", []), *calls]}
        else:
            merged.append(message)
    return merged


# --------------------------------------------------------------------------------- writing answers


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return the error data of OpenAI's server."""
    return {
        "message": str(error),
        "type": "invalid_request_error" if error.status < 500 else "server_error",
        "param": error.param,
        "code": error.code,
    }


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if "tool_calls" in reply.message else reply.answer.finish


def _tool_calls(reply: Reply) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for call in reply.message.get("tool_calls", []):
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        calls.append({**call, "function": {"name": function["name"], "arguments": text}})
    return calls


def _output_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"fc_{call['id']}",
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }


def _usage(replies: Sequence[Reply], n: int | None = None) -> dict[str, int]:
    """Return the token counts of all choices. A prompt that n choices share counts once."""
    prompt = sum(reply.prompt_tokens for reply in replies[:: n or 1])
    sampled = sum(len(reply.answer.tokens) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _token_texts(answer: Answer, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(answer.tokens[i : i + 1], special=True) for i in range(len(answer.tokens))]
