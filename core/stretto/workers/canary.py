"""The canary in a trainer: a fixed text, and its logprobs under the lead model of each version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stretto.array import Array
from stretto.config import RunConfig
from stretto.engine import TrainingEngine
from stretto.models.files import fetch_config
from stretto.models.vision import is_vision_language
from stretto.weights import Canary

if TYPE_CHECKING:
    from stretto.rl.batch import Batch

__all__ = ["Probe", "probe_of"]


class Probe:
    """The canary's text. Its tokens are (S, L) int32."""

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        self._tokens = tokens

    def score(self, engine: TrainingEngine) -> Canary:
        """Return the text with its logprobs. All ranks of the group call it; only rank 0's result counts."""
        logprobs = engine.forward(self._batch(), temperature=1.0).numpy().reshape(self._tokens.shape)
        return Canary(Array.of(self._tokens), Array.of(logprobs[:, 1:], np.float32))

    def _batch(self) -> Batch:
        import torch

        from stretto.rl.batch import Batch

        sequences, length = self._tokens.shape
        return Batch([length] * sequences, {"tokens": torch.from_numpy(self._tokens.reshape(-1)).long()}, {})


def probe_of(config: RunConfig) -> Probe | str:
    """Return the run's canary, the same in every process; or why there is none. The text is empty if the run
    file has no canary."""
    canary, model = config.inference.canary, config.model
    if canary is None:
        return ""
    if model is None:
        return "the run has no model"
    about = fetch_config(model)
    if is_vision_language(about):
        return f"{model!r} reads images, but the canary is only text"
    if "vocab_size" not in about:
        return f"the config of {model!r} has no vocab_size"
    random = np.random.default_rng(abs(config.seed))
    return Probe(random.integers(about["vocab_size"], size=(canary.sequences, canary.tokens), dtype=np.int32))
