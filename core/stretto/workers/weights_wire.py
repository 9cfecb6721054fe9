"""A worker's end of the wire for questions and answers of weight transports; see `stretto.weights.Wire`."""

from collections.abc import Awaitable, Callable

from stretto.bus.messages.inference import AskWeights, WeightsAnswer
from stretto.workers.context import WorkerContext

_ENVELOPE = 64
"""Maximum number of bytes of a `WeightsAnswer` besides its data."""


class BusWire:
    """The end of one worker: it sends questions, or answers them, over the run's bus."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._handler: Callable[[bytes], Awaitable[bytes]] | None = None

    @property
    def address(self) -> str:
        """The worker's id, and the nonce of this process: a restarted worker has another address."""
        return f"{self._context.worker}/{self._context.nonce}"

    @property
    def limit(self) -> int:
        """Maximum number of bytes of data in one message."""
        return self._context.bus.limit - _ENVELOPE

    def answer(self, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Set the handler that answers questions."""
        self._handler = handler

    async def open(self) -> None:
        """Listen for questions if there is a handler. Called once, after the publisher is made."""
        if self._handler is not None:
            await self._context.bus.serve(
                self._context.subject("weights"), AskWeights, self._answer, forget=True
            )

    async def ask(self, address: str, question: bytes, *, deadline_s: float) -> bytes:
        """Send a request to a trainer and return its reply."""
        worker, _, nonce = address.partition("/")
        subject, bus = self._context.names.worker("trainer", worker, nonce, "weights"), self._context.bus
        answer = await bus.request(subject, AskWeights(question), WeightsAnswer, deadline_s=deadline_s)
        return answer.data

    async def _answer(self, message: AskWeights) -> WeightsAnswer:
        assert self._handler is not None
        return WeightsAnswer(await self._handler(message.question))
