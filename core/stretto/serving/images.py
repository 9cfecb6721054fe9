"""The images of texts that are sent to servers.

Each image is sent as a PNG file, so that the server sees the same pixels as the trainer. A server expands
image tokens itself, so it gets one token for each image; the ids that it returns must be the trained ids.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from stretto.errors import RequestError
from stretto.models.images import ImageError, decode

__all__ = ["RequestImages", "ServerImage", "ServerText", "image_runs"]


@dataclass(frozen=True)
class ServerImage:
    """An image in the form that servers accept."""

    digest: str
    """SHA-256 of the image's own file, in hexadecimal digits."""
    url: str
    """Data URL of a PNG file with the decoded pixels."""

    def key(self, salt: str) -> str:
        """Return 16 hexadecimal digits that depend on the image and the salt."""
        return hashlib.sha256(f"{salt}/{self.digest}".encode()).hexdigest()[:16]


class RequestImages:
    """The images of one request, decoded when first needed. `token` stands for a part of an image."""

    def __init__(self, token: int, files: Sequence[bytes], digests: Sequence[str]) -> None:
        self._token = token
        self._files = dict(zip(digests, files, strict=True))
        self._digests = digests
        self._lock = anyio.Lock()
        self._images: list[ServerImage] = []

    async def text(self, tokens: list[int]) -> ServerText:
        """Return a text that begins with a prompt with these images; RequestError for an unreadable one."""
        async with self._lock:
            if not self._images:
                self._images = await anyio.to_thread.run_sync(self._read)
        return ServerText(tokens, _collapse(tokens, self._token, len(self._images)), self._images)

    def _read(self) -> list[ServerImage]:
        try:
            urls = {digest: _url(file) for digest, file in self._files.items()}
        except ImageError as error:
            raise RequestError(f"an image cannot be read: {error}") from error
        return [ServerImage(digest, urls[digest]) for digest in self._digests]


@dataclass(frozen=True, slots=True)
class ServerText:
    """The tokens of a request to a server, with their images."""

    tokens: list[int]
    """The prompt and the answer so far, as they are trained."""
    sent: list[int]
    """The same tokens in the form for servers: one token for each image."""
    images: Sequence[ServerImage] = ()

    def difference(self, found: Sequence[int] | None) -> str:
        """Return how the ids that a server made of `sent` differ from `tokens`; empty if they do not."""
        if found is None:
            return "the server does not say which ids it made of a prompt with images"
        for position, (own, other) in enumerate(zip(self.tokens, found, strict=False)):
            if own != other:
                return f"the server's prompt has token {other} at position {position}, the trained one {own}"
        if len(found) != len(self.tokens):
            return f"the server made {len(found)} tokens of a prompt of {len(self.tokens)}"
        return ""


def image_runs(tokens: NDArray[np.int32], token: int) -> int:
    """Return the number of uninterrupted runs of a token."""
    places = np.flatnonzero(tokens == token)
    return int(np.count_nonzero(np.diff(places) > 1)) + 1 if len(places) else 0


def _collapse(tokens: Sequence[int], token: int, images: int) -> list[int]:
    """Return the tokens with each of the first `images` runs of `token` as one token. Keep later runs: the
    policy has sampled them, and they stand for no image."""
    sent: list[int] = []
    runs = 0
    for previous, current in zip([None, *tokens], tokens, strict=False):
        is_new_run = current == token and previous != token
        runs += is_new_run
        if current != token or is_new_run or runs > images:
            sent.append(current)
    return sent


def _url(file: bytes) -> str:
    png = io.BytesIO()
    decode(file).save(png, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
