"""Inference engine `scripted`, a plugin by path: each answer is a function of the prompt's text, at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto import Component, Context, InferenceConfig, hookimpl
from stretto.component import Importable
from stretto.engine import Chunk, Emit, GenerateRequest, Load, SwapReport
from stretto.user_code.importable import load_importable

if TYPE_CHECKING:
    from stretto.weights import WeightUpdate


class ScriptedConfig(InferenceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the inference engine `scripted`."""

    script: Importable
    """From the prompt's text to the answer's."""


class Scripted:
    """One token a byte, logprobs 0."""

    def __init__(self, config: ScriptedConfig, context: Context) -> None:
        del context
        self._script = load_importable(config.script)
        self._version = -1
        self._generated = 0
        self._waiting: list[GenerateRequest] = []

    async def start(self, emit: Emit, tasks: Any) -> None:
        del tasks
        self._emit = emit

    async def stop(self) -> None: ...

    def generate(self, request: GenerateRequest) -> None:
        self._waiting.append(request)
        self._answer()

    def abort(self, request: str) -> None: ...

    async def swap(self, update: WeightUpdate) -> SwapReport:
        self._version = update.note.version
        self._answer()
        return SwapReport(self._version, update.note.digest, 0.0)

    async def logprobs(self, sequences: Sequence[Any]) -> list[Any]:
        raise NotImplementedError

    def load(self) -> Load:
        return Load(
            version=self._version,
            running=0,
            waiting=len(self._waiting),
            slots=64,
            generated_tokens=self._generated,
            busy_s=0.0,
            swaps=0,
            pause_s=0.0,
            pause_max_s=0.0,
        )

    def _answer(self) -> None:
        ready = [request for request in self._waiting if request.min_version <= self._version]
        self._waiting = [request for request in self._waiting if request not in ready]
        if ready:
            chunks = [self._chunk(each, index) for each in ready for index in range(len(each.seeds))]
            self._emit(chunks)

    def _chunk(self, request: GenerateRequest, index: int) -> Chunk:
        prompt = request.prompt_ids.numpy().astype(np.uint8).tobytes().decode()
        tokens = np.frombuffer(self._script(prompt).encode(), np.uint8).astype(np.int32)
        tokens = tokens[: request.sampling.max_tokens]
        self._generated += len(tokens)
        blank, versions = np.zeros(len(tokens), np.float32), np.full(len(tokens), self._version, np.int32)
        return Chunk(request.id, index, 0, tokens, blank, versions, "stop", "")


@hookimpl
def stretto_inference() -> Iterator[Component[ScriptedConfig]]:
    yield Component("scripted", Scripted, ScriptedConfig, "answers by a function", needs_model=False)
