"""An engine whose server is `stand_in_server.py`, which "samples" in stated time and needs no GPU."""

import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from patience import patience
from stretto.errors import WeightsError
from stretto.serving.engine import ServerEngine
from stretto.serving.images import ServerText
from stretto.serving.server import Server, ServerCommand, ServerRefused
from stretto.serving.streams import Ask, StreamChunk
from stretto.weights import WeightUpdate

STAND_IN = Path(__file__).with_name("stand_in_server.py")


class _Event(msgspec.Struct):
    tokens: list[int]
    logprobs: list[float]
    finish: Any
    versions: list[str]


class StandInEngine(ServerEngine):
    health = "/health"
    program: tuple[str, ...] = (str(STAND_IN),)
    prompt_tokens = 0
    """So many first tokens of a request are the prompt, whose sum decides the answer."""

    def command(self, port: int, key: str) -> ServerCommand:
        return ServerCommand((sys.executable, *self.program, str(port), key), {})

    async def greet(self, server: Server) -> None:
        await server.get("/state", deadline_s=patience())

    async def stream(self, server: Server, ask: Ask) -> AsyncGenerator[StreamChunk]:
        body = {
            "id": ask.id,
            "tokens": ask.text.tokens,
            "prompt": self.prompt_tokens,
            "max_tokens": ask.max_tokens,
        }
        async for event in server.stream("/generate", body, msgspec.json.Decoder(_Event)):
            yield StreamChunk(event.tokens, event.logprobs, event.finish, "", event.versions)

    async def abort_streams(self, server: Server, ids: Sequence[str]) -> None:
        await server.post("/abort", ids, deadline_s=patience())

    async def prepare_weights(self, server: Server, update: WeightUpdate, folder: Path) -> None:
        """Do nothing: the server loads files as they are."""

    async def load_weights(
        self, server: Server, update: WeightUpdate, folder: Path, *, forget: bool
    ) -> Mapping[str, str]:
        version = update.note.version
        try:
            await server.post(
                "/load", {"folder": str(folder), "version": str(version)}, deadline_s=patience()
            )
        except ServerRefused as error:
            raise WeightsError(error.reason, version=version) from error
        return update.hashes()

    async def free_memory(self, server: Server) -> None:
        await server.post("/free", deadline_s=patience())

    async def take_memory(self, server: Server, part: str) -> None:
        await server.post("/take", part, deadline_s=patience())

    async def score(self, server: Server, text: ServerText) -> list[float]:
        return [-1.0] * (len(text.tokens) - 1)
