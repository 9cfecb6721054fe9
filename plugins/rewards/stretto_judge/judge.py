"""The judge: requests with retries, a rate limit, and a cache on disk."""

import asyncio
import hashlib
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stretto import Context
from stretto.errors import RewardError, printable
from stretto.machine.proxies import proxy_of
from stretto.reward import REASONING_IN_TEXT, reasoning_end, text_of
from stretto_judge import JudgeConfig

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # pauses double, so that a busy server gets ever less
_MOST_PAUSE_S = 120.0
"""Longest pause that a server can ask for, in seconds."""
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may succeed."""
_CAUSES = {400: " (is the rubric too long?)", 401: " (key_env)", 404: " (url, or model)"}
"""Status -> usual cause of this refusal."""
_ENDED = {"", "stop", "eos", "eos_token", "end_turn", "stop_sequence"}
"""Servers of several makers give one of these, or none, as `finish_reason` of a reply that has ended."""
_OPEN_CHANNEL = re.compile(r"(?s)<\|channel\|?>(?:analysis|thought)(?!.*(?:<\|channel\|>final|<channel\|>))")
"""Finds reasoning without an end in the channels of gpt-oss and Gemma 4."""
_SCALE = re.compile(r"(?i)[\s*_]*(?:(?:/|out of|of)[\s*_]*(\d+(?:\.\d+)?)|%)")
_MOST_BYTES = 2**20  # of a reply
_MOST_SHOWN = 300  # characters of a reply in a message

_templates = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


class _JudgeMessage(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None
    refusal: str | None = None


class _JudgeChoice(msgspec.Struct):
    message: _JudgeMessage
    finish_reason: str | None = None


class _JudgeReply(msgspec.Struct):
    choices: list[_JudgeChoice]


class _KeptReply(msgspec.Struct):
    """One file of the cache. The request is stored only for human readers."""

    request: dict[str, Any]
    text: str
    complete: bool
    """True. Files of earlier versions, which do not say whether the reply was cut, are not read."""


class _PassingError(Exception):
    """A request failed and may succeed later, after `pause_s` seconds if that is known."""

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


def template_fault(text: str) -> str:
    """Return why a text is no template, or what it lacks; empty if it can be used."""
    try:
        _templates.parse(text)
    except TemplateError as error:
        return f"is no Jinja template: {error}"
    return (
        ""
        if "completion" in text
        else "does not contain {{ completion }}, so the judge would not see the answer"
    )


class Judge:
    """Scores answers, one group after another."""

    def __init__(self, config: JudgeConfig, context: Context) -> None:
        self._config = config
        self._template = _templates.from_string(config.rubric)
        self._pattern = re.compile(config.pattern)
        self._key = os.environ.get(config.key_env, "") if config.key_env else ""
        self._cache = _Cache(_cache_folder(config, context))
        self._rate = _Rate(config.requests_per_minute)

    async def score(
        self, completions: Sequence[Any], prompts: Sequence[Any], **columns: Sequence[Any]
    ) -> list[dict[str, float]]:
        """Return each answer's reward, and as metrics the judge's `score` and whether it was `cached`."""
        slots = asyncio.Semaphore(self._config.concurrency)
        timeout = aiohttp.ClientTimeout(total=self._config.request_s)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as client:

            async def score_one(index: int) -> dict[str, float]:
                row = {name: values[index] for name, values in columns.items()}
                async with slots:
                    return await self._score_one(client, prompts[index], completions[index], row)

            return list(await asyncio.gather(*map(score_one, range(len(completions)))))

    async def _score_one(
        self, client: aiohttp.ClientSession, prompt: Any, completion: Any, row: Mapping[str, Any]
    ) -> dict[str, float]:
        request = self._request(prompt, completion, row)
        name = hashlib.sha256(msgspec.json.encode([self._config.url, request])).hexdigest()
        if (text := self._cache.get(name)) is not None and (score := self._read(text)) is not None:
            return self._reward(score, cached=True)
        reason = ""
        for attempt in range(self._config.attempts):
            pause_s = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
            try:
                text = await self._ask(client, request)
            except _PassingError as error:
                reason, pause_s = str(error), pause_s if error.pause_s is None else error.pause_s
            else:
                if (score := self._read(text)) is not None:
                    self._cache.put(name, _KeptReply(request, text, complete=True))
                    return self._reward(score, cached=False)
                reason, pause_s = f"no valid score in the reply {printable(text[-_MOST_SHOWN:])!r}", 0.0
            if attempt < self._config.attempts - 1:
                await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
        if self._config.unscored is not None:
            return {"reward": self._config.unscored, "unscored": 1.0, "cached": 0.0}
        message = (
            f"the judge gave no score in {self._config.attempts} attempts; the last: {reason} "
            "(`unscored: 0` gives such answers a reward)"
        )
        raise RewardError(message, kind="infrastructure")

    def _request(self, prompt: Any, completion: Any, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            text = self._template.render(
                {**row, "prompt": _prompt_text(prompt), "completion": text_of(completion)}
            )
        except TemplateError as error:
            raise RewardError(
                f"reward.rubric cannot be filled: {error}; the row has {', '.join(row)}; for a "
                "column that rows may lack: {{ name | default('') }}"
            ) from error
        system = [{"role": "system", "content": self._config.system}] if self._config.system else []
        return {
            "model": self._config.model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }

    async def _ask(self, client: aiohttp.ClientSession, request: Mapping[str, Any]) -> str:
        """Return the text of the judge's reply. Raises `_PassingError` if the request may succeed later."""
        await self._rate.wait()
        url = f"{self._config.url.rstrip('/')}/chat/completions"
        try:
            # A judge is often outside this network. `trust_env` would also use logins from .netrc.
            proxy = proxy_of(url)
            async with client.post(url, json=request, allow_redirects=False, proxy=proxy) as response:
                body = await _beginning(response)
                status, after = response.status, response.headers.get("Retry-After", "")
        except TimeoutError as error:
            limit = f"reward.request_s={self._config.request_s:g}"
            raise _PassingError(f"{url} did not answer within {limit}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _PassingError(f"{url}: {str(error) or type(error).__name__}") from error
        if status == 200:
            return self._text_of_reply(body)
        reason = f"{url} answered with status {status}{_CAUSES.get(status, '')}: {self._shown(body)}"
        if status in _PASSING:
            raise _PassingError(reason, min(float(after), _MOST_PAUSE_S) if after.isdecimal() else None)
        raise RewardError(reason)

    def _shown(self, body: bytes) -> str:
        """Return the beginning of a server's reply for a message, without the key: some servers repeat it."""
        text = body.decode(errors="replace")
        return printable((text.replace(self._key, "***") if self._key else text)[:_MOST_SHOWN])

    def _text_of_reply(self, body: bytes) -> str:
        """Return the text of the judge's reply. Raises `_PassingError` if it is cut, or only reasoning."""
        try:
            choice = msgspec.json.decode(body, type=_JudgeReply).choices[0]
        except (msgspec.DecodeError, LookupError) as error:
            fault = f"the reply is no chat completion: {printable(str(error))}: {self._shown(body)}"
            raise _PassingError(fault) from error
        if choice.message.refusal:
            raise _PassingError(
                f"the judge refused: {printable(choice.message.refusal[:_MOST_SHOWN])!r}", 0.0
            )
        text, reason = _content({"content": choice.message.content}), choice.finish_reason or ""
        end = _reasoning_end(text)
        if end is None or not text[end:].strip() or reason.lower() not in _ENDED:
            limit, last = self._config.max_tokens, printable(text[-_MOST_SHOWN:])
            fault = f"finish_reason {reason!r}, reward.max_tokens {limit}"
            raise _PassingError(f"the reply was cut, or is only reasoning ({fault}): {last!r}", 0.0)
        return text

    def _read(self, text: str) -> float | None:
        answer = text[_reasoning_end(text) :]
        low, high = self._config.scale
        try:
            last = [*self._pattern.finditer(answer)][-1]
            score = float(last[1])
        except (IndexError, TypeError, ValueError):
            return None
        of = _SCALE.match(answer, last.end())
        return score if low <= score <= high and (of is None or float(of[1] or 100) == high) else None

    def _reward(self, score: float, *, cached: bool) -> dict[str, float]:
        low, high = self._config.scale
        figures = {"reward": (score - low) / (high - low), "score": score, "cached": float(cached)}
        return figures if self._config.unscored is None else {**figures, "unscored": 0.0}


class _Rate:
    """Spaces requests evenly; no limit if `per_minute` is None."""

    def __init__(self, per_minute: float | None) -> None:
        self._interval_s = 60 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def wait(self) -> None:
        now = time.monotonic()
        start = max(now, self._next)
        self._next = start + self._interval_s
        await asyncio.sleep(start - now)


class _Cache:
    """Stores replies in a folder, one file each. Without a folder, it stores nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, name: str) -> str | None:
        """Return a reply; None if it is not stored, or if its file is damaged."""
        if self._folder is None:
            return None
        try:
            return msgspec.json.decode((self._folder / f"{name}.json").read_bytes(), type=_KeptReply).text
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def put(self, name: str, kept: _KeptReply) -> None:
        """Store a reply. Other processes may store the same reply at the same time."""
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / f".{name}-{os.getpid()}"
        temporary.write_bytes(msgspec.json.encode(kept))
        temporary.replace(self._folder / f"{name}.json")


def _reasoning_end(text: str) -> int | None:
    """Return what `reasoning_end` does, with all tags for reasoning in the text: a judge may be any model."""
    if _OPEN_CHANNEL.search(text):
        return None
    return reasoning_end(text, "".join(f"{tag}{tag[0]}/{tag[1:]}" for tag in REASONING_IN_TEXT.findall(text)))


def _cache_folder(config: JudgeConfig, context: Context) -> Path | None:
    if config.cache is not None:
        return Path(config.cache).expanduser()
    return context.path("judge") if context.folder else None


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        body += chunk
        if len(body) >= _MOST_BYTES:
            break
    return bytes(body[:_MOST_BYTES])


def _prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as text: one message without its role, several with their roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return _content(prompt[0])
    return "\n\n".join(f"{message['role']}: {_content(message)}" for message in prompt)


def _content(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())
