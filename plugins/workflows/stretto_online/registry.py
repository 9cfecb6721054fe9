"""The HTTP requests with which outside programs start sessions, post rewards and end sessions.

`POST /v1/sessions` needs the worker's token, in a file of the run's folder that only the user can read. It
answers with the next session, whose key opens the policy's API on the same port. Requests about a session
accept its key or the token.
"""

import re
import secrets
from collections import OrderedDict, deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
import msgspec
from aiohttp import web

from stretto import Context
from stretto.agents.api_call import ApiError, read_body
from stretto.agents.endpoint import Endpoint, key_of
from stretto.agents.recorder import CallRecorder
from stretto.errors import ConfigError
from stretto.machine.private_file import write_private
from stretto.reward import is_number
from stretto.workflow import Score
from stretto_online import OnlineConfig

_WAIT_S = 20.0
"""Seconds that the start of a session waits for a sample. The program asks again after an empty answer."""
_MAX_BODY = 64 * 1024  # bytes of a request
_MAX_METRICS = 32  # numbers with a reward, itself included
_METRIC = re.compile(r"[A-Za-z_][\w./-]{0,63}", re.ASCII)
_REMEMBERED = 10_000
"""Number of ended sessions whose ending the worker can still report."""


_POSTED: Any = float | dict[str, float]


class _End(msgspec.Struct):
    error: str | None = None


class AgentSession:
    """One sample as a session of an outside program, from its offer to its end."""

    def __init__(self, row: Mapping[str, Any], recorder: CallRecorder) -> None:
        self.id = f"sess_{secrets.token_hex(8)}"
        self.row = row
        self.recorder = recorder
        self.key = ""
        """The key for the policy's API and for requests about this session."""
        self.score: Score | None = None
        self.fault = ""
        """Why the program gave the session up; empty if it did not."""
        self.ending = "its ticket ended: another session of its group failed, or the run gave it up"
        """Why the session is over, for programs that still ask."""
        self.started = anyio.Event()
        self.ended = anyio.Event()
        self.rewarded = anyio.Event()


class SessionRegistry:
    """The sessions of one rollout worker: those that wait for a program, and those that run."""

    def __init__(self, config: OnlineConfig, context: Context) -> None:
        self._config = config
        self._context = context
        self._file = context.path("sessions", f"{context.worker}.json")
        self._token = secrets.token_urlsafe(24)
        self._opening = anyio.Lock()
        self._opened = False
        self._waiting: deque[AgentSession] = deque()
        self._offered = anyio.Event()
        self._sessions: dict[str, AgentSession] = {}
        self._over: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Id -> (key, ending) of the latest sessions that are over."""
        routes = [
            web.post("/v1/sessions", self._start),
            web.post("/v1/sessions/{id}/reward", self._reward),
            web.post("/v1/sessions/{id}/end", self._end),
        ]
        self.endpoint = Endpoint(config.tool_parser, routes)

    async def open(self) -> None:
        """Listen, and write address and token into the run's folder. Idempotent. OSError for a used port."""
        async with self._opening:
            if self._opened:
                return
            if not self._context.folder:
                raise ConfigError(
                    "the workflow 'online' writes its address into the run's folder, which "
                    f"{self._context.worker} does not see; run the rollout workers where they see it: on the "
                    "kernel's machine, or with `out` on a disk that their machines share"
                )
            await self.endpoint.start(self._config.port or 0)
            self._file.parent.mkdir(mode=0o700, exist_ok=True)
            address = {**_addresses(self.endpoint.base_url), "token": self._token}
            write_private(self._file, msgspec.json.format(msgspec.json.encode(address)) + b"\n")
            self._opened = True

    @contextmanager
    def listed(self, session: AgentSession) -> Generator[None]:
        """Answer requests about a session inside the block. Afterwards, refuse them and name its ending."""
        self._sessions[session.id] = session
        try:
            yield
        finally:
            del self._sessions[session.id]
            if session in self._waiting:
                self._waiting.remove(session)
            self._over[session.id] = (session.key, session.ending)
            if len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)

    async def offer(self, session: AgentSession) -> None:
        """Offer the session to programs, and wait until one of them has started it."""
        self._waiting.append(session)
        self._offered.set()
        self._offered = anyio.Event()
        await session.started.wait()

    async def _start(self, request: web.Request) -> web.Response:
        if not _has_key(request, self._token):
            raise ApiError(
                f"the key is not the token in the run's sessions/{self._file.name}; read the file again, "
                "because a new worker has a new token",
                code="invalid_api_key",
                status=401,
            )
        self.endpoint.admit(request)
        with anyio.move_on_after(_WAIT_S):
            while not self._waiting:
                await self._offered.wait()
        if not self._waiting:
            return web.Response(status=204)
        session = self._waiting.popleft()
        session.started.set()
        return _json(
            {
                "id": session.id,
                "api_key": session.key,
                **_addresses(self.endpoint.base_url),
                "timeout_s": self._config.session_timeout_s,
                "prompt": session.row["prompt"],
                "row": session.row,
            }
        )

    async def _reward(self, request: web.Request) -> web.Response:
        """Record the reward of a session. It can be posted only once."""
        score = _score_in(await _body_of(request))
        session = self._session_of(request)
        if session.score is not None:
            raise ApiError(f"session {session.id} has its reward", code="reward_exists", status=409)
        session.score = score
        session.rewarded.set()
        return _json(_state(session))

    async def _end(self, request: web.Request) -> web.Response:
        """End the calls of a session. The session is complete when it also has a reward."""
        body = await _body_of(request)
        end = read_body(body, _End) if body else _End()
        session = self._session_of(request)
        if end.error is not None:
            session.fault = end.error[:500] or "no reason"
            session.rewarded.set()
        session.ended.set()
        return _json(_state(session))

    def _session_of(self, request: web.Request) -> AgentSession:
        id = request.match_info["id"]
        session = self._sessions.get(id)
        session_key, ending = (session.key, "") if session is not None else self._over.get(id, ("", ""))
        if not _has_key(request, session_key) and not _has_key(request, self._token):
            message = "the key belongs to no such session, and is not the token of this worker"
            raise ApiError(message, code="invalid_api_key", status=401)
        self.endpoint.admit(request)
        if session is None:
            ending = ending or "this worker does not know it; the worker may have restarted"
            raise ApiError(f"session {id} is over: {ending}", code="session_over", status=410)
        return session


def _has_key(request: web.Request, key: str) -> bool:
    """Return whether a request has this key; an empty key never matches. Headers may be no UTF-8."""
    request_key = key_of(request).encode(errors="surrogateescape")
    return bool(key) and secrets.compare_digest(request_key, key.encode())


def _addresses(base_url: str) -> dict[str, str]:
    return {"base_url": base_url, "anthropic_base_url": base_url.removesuffix("/v1")}


def _state(session: AgentSession) -> dict[str, Any]:
    return {
        "id": session.id,
        "calls": session.recorder.calls,
        "rewarded": session.score is not None,
        "ended": session.ended.is_set(),
    }


async def _body_of(request: web.Request) -> bytes:
    if (request.content_length or 0) <= _MAX_BODY and len(body := await request.read()) <= _MAX_BODY:
        return body
    raise ApiError(f"a body may have {_MAX_BODY} bytes", status=413)


def _score_in(body: bytes) -> Score:
    """Return the reward in a body: a number, or an object with `reward` and other numbers."""
    posted: float | dict[str, float] = read_body(body, _POSTED)
    metrics = posted if isinstance(posted, dict) else {"reward": posted}
    if "reward" not in metrics:
        raise ApiError("expected a number, or an object with `reward`", param="reward")
    if len(metrics) > _MAX_METRICS:
        raise ApiError(f"an object may have {_MAX_METRICS} numbers")
    for name, value in metrics.items():
        if not is_number(value):
            raise ApiError(f"{name[:64]!r} is {value}, which is no finite number of float32", param="reward")
        if not _METRIC.fullmatch(name):
            raise ApiError(f"{name[:64]!r} is no metric's name: letters, digits and `_./-`", param="reward")
    return Score(metrics["reward"], {name: value for name, value in metrics.items() if name != "reward"})


def _json(data: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")
