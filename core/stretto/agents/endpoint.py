"""The policy behind the HTTP APIs of OpenAI and Anthropic, for agents that do not know stretto.

A process has one server, on loopback or on sockets in the sandboxes of agents. A request's key names its
agent run, whose calls become trajectories (`stretto.agents.recorder`). A stream sends tokens once they are
complete characters and cannot begin a stop text or a tool call. A swap of weights only delays the tokens.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import msgspec
import numpy as np
import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from anyio.streams.memory import MemoryObjectSendStream
from numpy.typing import NDArray

from stretto.agents.anthropic_api import MessageCall, anthropic_error
from stretto.agents.api_call import MODEL, APICall, ApiError, Event, Reply
from stretto.agents.openai_api import ChatCall, CompletionCall, ResponseCall, openai_error
from stretto.agents.recorder import CallRecorder, OverLimit, Thread
from stretto.chat.calls import CallFormat, ParserName, ToolCall
from stretto.chat.prompts import format_named
from stretto.dataset import Message
from stretto.errors import ConfigError, EngineError, RequestError, one_job, together
from stretto.models.tokenizer import work_on_text
from stretto.tokenizer import Tokenizer
from stretto.workflow import Answer, OnTokens

__all__ = ["Endpoint", "base_url", "key_of"]

log = structlog.get_logger()

_MAX_BODY = 16 * 2**20
"""Largest body of a request, in bytes: JSON of the longest text that a model reads."""
_MAX_BODY_WITH_IMAGES = 64 * 2**20
"""Largest body for a policy that reads images, in bytes: every request of a chat has all its images."""
_MAX_CONNECTIONS = 256
"""Connections that one socket of `Endpoint.serve_socket` may have. Each needs a file descriptor."""
_MAX_STRANGERS = 64
"""Connections to the port without a valid key so far. If there are more, the oldest one is closed."""
_IDLE_S = 30.0
"""Seconds for which a connection may wait for its next request, or for the rest of a request's head."""
_FULL_S = 0.05
"""Seconds until a socket with the maximum number of connections is checked again."""
_News = tuple[int, "str | Reply"]  # (number of a choice, its next text or its complete reply)
_REFUSALS = (ApiError, OverLimit, ConfigError, EngineError, RequestError)  # errors of a call
_MESSAGES = "/v1/messages"
"""Path of Anthropic's API. Its errors have another form than OpenAI's."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class _AgentRun:
    recorder: CallRecorder
    responses: dict[str, list[Message]] = field(default_factory=dict[str, "list[Message]"])
    """Id of a response -> the chat's messages up to this response."""
    calls: int = 0
    """Number of tool calls so far; the next call's id contains it."""


_MakeCall = Callable[[bytes, _AgentRun], APICall]
_CALLS: Mapping[str, _MakeCall] = {
    "/v1/chat/completions": lambda body, run: ChatCall(body, run.recorder.session.tokenizer),
    "/v1/completions": lambda body, run: CompletionCall(body, run.recorder.session.tokenizer),
    "/v1/responses": lambda body, run: ResponseCall(body, run.responses),
    _MESSAGES: lambda body, run: MessageCall(body),
}
"""Path of each API -> function that makes a call from a request's body."""


def base_url(port: int) -> str:
    """Return the URL for clients of an endpoint at a port of loopback, `/v1` included."""
    return f"http://127.0.0.1:{port}/v1"


def key_of(request: web.Request) -> str:
    """Return the key of a request, as clients of either API send it; empty if the request has no key."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return request.headers.get("x-api-key", token if scheme == "Bearer" else "")


class Endpoint:
    """The server of one process. It serves a port after `start`, and sockets passed to `serve_socket`, until
    `stop`. `routes`: further requests that it serves; their handlers may raise `ApiError`."""

    def __init__(self, tool_parser: ParserName = "auto", routes: Iterable[web.AbstractRouteDef] = ()) -> None:
        self._tool_parser: ParserName = tool_parser
        self._routes = routes
        self._agent_runs: dict[str, _AgentRun] = {}
        self._had_tools = False
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._strangers: dict[RequestHandler, None] = {}
        self._starting = anyio.Lock()
        self.base_url = ""
        """The URL for clients, `/v1` included; empty before the server is started."""

    async def start(self, port: int = 0) -> None:
        """Listen on a port of loopback; 0 for any free one. Idempotent. Raise OSError if the port is used."""
        async with self._starting:
            if not self.base_url:
                await self._made_runner()
                loop = asyncio.get_running_loop()
                self._listener = await loop.create_server(self._take_connection, "127.0.0.1", port)
                self.base_url = base_url(self._listener.sockets[0].getsockname()[1])

    def _take_connection(self) -> RequestHandler:
        assert self._runner is not None
        assert self._runner.server is not None
        self._strangers = {each: None for each in self._strangers if each.transport is not None}
        if len(self._strangers) == _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            assert oldest.transport is not None
            oldest.transport.abort()
        stranger = self._runner.server()
        self._strangers[stranger] = None
        return stranger

    def admit(self, request: web.Request) -> None:
        """Do not count the connection of a request with a valid key as a stranger any more."""
        self._strangers.pop(request.protocol, None)

    async def serve_socket(self, listener: socket.socket) -> None:
        """Serve a listening socket until the caller is cancelled; then close its connections. New connections
        wait while it has the maximum. Raises OSError if this process has too many open files."""
        async with self._starting:
            runner = await self._made_runner()
        assert runner.server is not None
        loop = asyncio.get_running_loop()
        connections: list[asyncio.Transport] = []
        try:
            while True:
                connections = [each for each in connections if not each.is_closing()]
                if len(connections) == _MAX_CONNECTIONS:
                    await anyio.sleep(_FULL_S)
                    continue
                client, _ = await loop.sock_accept(listener)
                transport, _ = await loop.connect_accepted_socket(runner.server, client)
                connections.append(transport)
        finally:
            for connection in connections:
                connection.abort()

    async def _made_runner(self) -> web.AppRunner:
        if self._runner is None:
            app = web.Application(middlewares=[_format_errors], client_max_size=_MAX_BODY)
            app.router.add_get("/v1/models", self._models)
            for path, make in _CALLS.items():
                app.router.add_post(path, partial(self._call, make))
            app.router.add_post(f"{_MESSAGES}/count_tokens", self._count_tokens)
            app.router.add_routes(self._routes)
            # A call is cancelled with its connection: an agent that is gone leaves no work for the engines.
            self._runner = web.AppRunner(
                app, handler_cancellation=True, access_log=None, keepalive_timeout=_IDLE_S
            )
            await self._runner.setup()
        return self._runner

    async def stop(self) -> None:
        """Close the server, and every connection."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner, self.base_url = None, ""

    @asynccontextmanager
    async def serve(self, recorder: CallRecorder) -> AsyncGenerator[str]:
        """Accept the agent's calls inside the block; yield their key. At the end, unfinished calls are
        cancelled and the key becomes invalid."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._agent_runs[key] = _AgentRun(recorder)
        try:
            yield key
        finally:
            del self._agent_runs[key]
            with anyio.CancelScope(shield=True):
                await recorder.close()

    # ------------------------------------------------------------------------------------ handlers

    async def _models(self, request: web.Request) -> web.Response:
        self._agent_run_of(request)
        # One list with the fields of both APIs.
        openai = {"object": "model", "created": 0, "owned_by": "stretto"}
        anthropic = {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
        ends = {"first_id": MODEL, "last_id": MODEL, "has_more": False}
        return _json({"object": "list", "data": [{"id": MODEL, **openai, **anthropic}], **ends})

    async def _call(self, make: _MakeCall, request: web.Request) -> web.StreamResponse:
        agent_run, body = await self._read(request)
        call = await work_on_text(lambda: make(body, agent_run), len(body))
        return await self._answer(request, agent_run, call)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        agent_run, body = await self._read(request)
        session = agent_run.recorder.session
        tokenizer, images = session.tokenizer, session.images
        call = await work_on_text(lambda: MessageCall(body), len(body))
        if images is not None:
            text = await images.render(call.messages, tools=call.tools)
        else:
            text = await work_on_text(lambda: tokenizer.render(call.messages, tools=call.tools), len(body))
        if len(text) > tokenizer.most_characters(None):
            raise ApiError(f"a text of {len(text)} characters, longer than any that the model reads")
        ids = await work_on_text(lambda: tokenizer.encode_text(text, whole=True), len(text))
        return _json({"input_tokens": len(ids)})

    async def _read(self, request: web.Request) -> tuple[_AgentRun, bytes]:
        agent_run = self._agent_run_of(request)
        if agent_run.recorder.session.images is not None:
            request = request.clone(client_max_size=_MAX_BODY_WITH_IMAGES)
        return agent_run, await request.read()

    def _agent_run_of(self, request: web.Request) -> _AgentRun:
        if (agent_run := self._agent_runs.get(key_of(request))) is None:
            raise ApiError("the key belongs to no current agent run", code="invalid_api_key", status=401)
        self.admit(request)
        return agent_run

    async def _answer(self, request: web.Request, agent_run: _AgentRun, call: APICall) -> web.StreamResponse:
        if call.images:
            images = agent_run.recorder.session.images
            if images is None:
                raise ApiError("the policy reads no images")
            images.add(call.images)
        if not call.tools and isinstance(call.inputs[0], list):
            call.tools = [*map(dict, agent_run.recorder.session.row_tools)]
        if call.tools and not self._had_tools:
            self._had_tools = True
            await _warn_of_hidden_tools(agent_run.recorder.session.tokenizer)
        return await agent_run.recorder.run_call(
            self._stream(request, agent_run, call) if call.stream else self._answer_at_once(agent_run, call)
        )

    async def _answer_at_once(self, agent_run: _AgentRun, call: APICall) -> web.Response:
        threads = agent_run.recorder.take(call.inputs, call.tools)
        replies = await together(partial(self._reply, agent_run, call), threads)
        return _json(call.response(replies))

    async def _stream(self, request: web.Request, agent_run: _AgentRun, call: APICall) -> web.StreamResponse:
        """Stream the answer. The response begins with the first token, so earlier refusals have a status."""
        threads = agent_run.recorder.take(call.inputs, call.tools)
        send, receive = anyio.create_memory_object_stream[_News](math.inf)
        replies: dict[int, Reply] = {}

        async def stream_choice(choice: int, thread: Thread, send: MemoryObjectSendStream[_News]) -> None:
            with send:
                visible = self._visible_text(agent_run, call, thread)

                def on_tokens(_: int, tokens: NDArray[np.int32]) -> None:
                    send.send_nowait((choice, visible.add(tokens)))

                reply = await self._reply(agent_run, call, thread, on_tokens)
                send.send_nowait((choice, visible.rest(reply.text)))
                send.send_nowait((choice, reply))

        stream = _EventStream(request)
        try:
            with receive:
                async with one_job() as tasks:
                    for choice, thread in enumerate(threads):
                        tasks.start_soon(stream_choice, choice, thread, send.clone())
                    send.close()
                    async for choice, news in receive:
                        if not stream.begun:
                            await stream.send(call.opening(len(threads[0].prompt)))
                        if isinstance(news, str):
                            await stream.send(call.piece(choice, news) if news else ())
                        else:
                            replies[choice] = news
                            await stream.send(call.choice_end(choice, news))
            await stream.send(call.closing([replies[choice] for choice in range(len(threads))]))
        except _REFUSALS as error:
            if not stream.begun:
                raise
            await stream.send([call.failed(_api_error(error))])
        return await stream.end(with_done=call.ends_with_done)

    # ------------------------------------------------------------------------------------ answers

    async def _reply(
        self, agent_run: _AgentRun, call: APICall, thread: Thread, on_tokens: OnTokens | None = None
    ) -> Reply:
        answer = await agent_run.recorder.reply(
            thread, max_tokens=call.max_tokens, stop=call.stop, on_tokens=on_tokens
        )
        stops = (*agent_run.recorder.session.sampling.stop, *call.stop)
        message: Message = {"role": "assistant", "content": _text_before(thread.text_of(answer), stops)}
        before, calls = self._calls_in(agent_run, call, answer, thread) if call.reads_tools else ("", [])
        if calls:
            message |= {"content": before, "tool_calls": [each.data for each in calls]}
        thread.record_answer(message, before, calls)
        return Reply(answer, len(thread.prompt), message)

    def _format(self, agent_run: _AgentRun) -> CallFormat:
        return format_named(self._tool_parser, agent_run.recorder.session.tokenizer.form)

    def _calls_in(
        self, agent_run: _AgentRun, call: APICall, answer: Answer, thread: Thread
    ) -> tuple[str, list[ToolCall]]:
        """Return the text before an answer's calls, and the calls with ids. No calls if one cannot be read:
        as with other servers, the message is then the sampled text."""
        text = thread.text_of(answer, special=True)
        end = agent_run.recorder.session.tokenizer.form.stored.leading_end(text, thread.opened)
        before, calls = self._format(agent_run).split(text, end, call.tools)
        if any(each.fault for each in calls):
            return "", []
        for number, each in enumerate(calls):
            agent_run.calls += 1
            # Nine letters and digits: templates of Mistral models accept nothing else.
            calls[number] = msgspec.structs.replace(each, id=each.id or f"call{agent_run.calls:05}")
        return before, calls

    def _visible_text(self, agent_run: _AgentRun, call: APICall, thread: Thread) -> _VisibleText:
        session = agent_run.recorder.session
        form = session.tokenizer.form
        tail = form.tail if call.reads_tools else form.plain_tail
        lead, tail = (form.lead, tail) if isinstance(thread.input, list) else ("", "")
        marks = (*session.sampling.stop, *call.stop, *form.ends)
        if call.reads_tools:
            marks += self._format(agent_run).marks  # some are special tokens, so decode these too
        reader = _AnswerReader(session.tokenizer, thread, lead, special=call.reads_tools)
        return _VisibleText(reader, marks, tail)


class _AnswerReader:
    """Decodes tokens as they arrive: complete characters only, without the lead of the answer."""

    def __init__(self, tokenizer: Tokenizer, thread: Thread, lead: str, *, special: bool) -> None:
        self._tokenizer = tokenizer
        self._thread = thread
        self._lead = lead
        """The lead with which the answer may still begin; empty once this is decided."""
        self._special = special
        self._context_tokens = self._tokens = np.empty(0, np.int32)
        """The last tokens whose text was complete, and the tokens after them, which are decoded together: a
        token's text depends on the tokens before it."""
        self._num_returned = 0
        """Characters of `_tokens` that `add` has returned."""

    def add(self, tokens: NDArray[np.int32]) -> str:
        """Return the new complete text. An incomplete character waits for the rest of its tokens."""
        if not len(tokens):
            return ""
        self._tokens = np.concatenate([self._tokens, tokens])
        if self._lead:
            return self._begin()
        context = self._context_tokens
        text = self._decode(np.concatenate([context, self._tokens]))[len(self._decode(context)) :]
        complete = text.rstrip("\ufffd")
        new = complete[self._num_returned :]
        self._num_returned += len(new)
        if complete == text:
            self._context_tokens, self._tokens, self._num_returned = self._tokens, self._tokens[:0], 0
        return new

    def _begin(self) -> str:
        """Return the first text, once it is clear whether the answer begins with the lead."""
        tokens, lead = self._tokens, self._lead
        begun = self._tokenizer.decode(tokens, special=True, after=self._thread.prompt).rstrip("\ufffd")
        if len(begun) < len(lead) and lead.startswith(begun):
            return ""
        self._tokens, self._lead = tokens[:0], ""
        text = self.add(tokens)
        if not begun.startswith(lead):
            return text
        return text.removeprefix(lead if self._special else self._tokenizer.form.plain_lead)

    def _decode(self, tokens: NDArray[np.int32]) -> str:
        return self._tokenizer.decode(tokens, special=self._special, after=self._thread.prompt)


class _VisibleText:
    """The part of a growing answer that the agent may see: up to the first mark, and without an end that may
    begin a mark or the tail of the whole answer."""

    def __init__(self, reading: _AnswerReader, marks: Sequence[str], tail: str) -> None:
        self._reading = reading
        self._marks = [mark for mark in marks if mark]
        self._unsent = [*self._marks, *([tail] if tail else [])]
        self._text = ""
        self._sent = 0

    def add(self, tokens: NDArray[np.int32]) -> str:
        self._text += self._reading.add(tokens)
        ends = [at for mark in self._marks if (at := self._text.find(mark, self._sent)) >= 0]
        new = self._text[self._sent : min(ends, default=len(self._text) - self._uncertain())]
        self._sent += len(new)
        return new

    def rest(self, answer: str) -> str:
        # If an engine was lost, its replacement may have sampled another answer.
        return answer[self._sent :] if answer.startswith(self._text[: self._sent]) else ""

    def _uncertain(self) -> int:
        text = self._text[self._sent :]
        longest = min(len(text), max(map(len, self._unsent), default=0))
        ends = (text[-size:] for size in range(longest, 0, -1))
        return next((len(end) for end in ends if any(mark.startswith(end) for mark in self._unsent)), 0)


class _EventStream:
    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        self.begun = False

    async def send(self, events: Iterable[Event]) -> None:
        if not self.begun:
            self.begun = True
            await self._response.prepare(self._request)
        data = b"".join(
            (f"event: {kind}\n".encode() if kind else b"") + b"data: " + msgspec.json.encode(body) + b"\n\n"
            for kind, body in events
        )
        if data:
            await self._response.write(data)

    async def end(self, *, with_done: bool) -> web.StreamResponse:
        await self._response.write_eof(b"data: [DONE]\n\n" if with_done else b"")
        return self._response


async def _warn_of_hidden_tools(tokenizer: Tokenizer) -> None:
    """Warn if the template shows no tools: `stretto check` does not know whether an agent sends any."""
    form = await work_on_text(lambda: tokenizer.form, 0)
    if form.has_template and not form.shows_tools:
        log.warning("the policy does not see the tools of agents: its chat template does not show them")


def _text_before(text: str, marks: Iterable[str]) -> str:
    return text[: min((at for mark in marks if (at := text.find(mark)) >= 0), default=len(text))]


@web.middleware
async def _format_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _REFUSALS as error:
        refusal = _api_error(error)
    except web.HTTPException as error:
        refusal = ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status)
    body = (
        anthropic_error(refusal) if request.path.startswith(_MESSAGES) else {"error": openai_error(refusal)}
    )
    # Waiting does not help against any of these errors, so ask clients not to retry.
    return _json(body, status=refusal.status, headers={"x-should-retry": "false"})


def _api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case OverLimit():
            return ApiError(str(error), code=error.code)
        case EngineError():
            return ApiError(str(error), code="engine_error", status=500)
        case _:
            return ApiError(str(error))


def _json(data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data), status=status, headers=headers, content_type="application/json"
    )
