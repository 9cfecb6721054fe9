"""The canary in a trainer: a fixed text, and its logprobs under the lead model of each version."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stretto.array import Array
from stretto.config import RunConfig
from stretto.engine import CanaryConfig, TrainingEngine
from stretto.models.files import fetch_config
from stretto.models.images import decode
from stretto.models.vision import Vision, VisionPrompt, is_vision_language
from stretto.weights import Canary

if TYPE_CHECKING:
    from stretto.rl.batch import Batch

_SIDE = 56
"""Pixels of a side of the canary's image: whole patches for today's models, so none of them rescales it."""


class Probe:
    """The canary: (S, C) int32 random tokens; before them an image, if the model reads images."""

    def __init__(
        self, tokens: NDArray[np.int32], image: bytes = b"", seen: VisionPrompt | None = None
    ) -> None:
        self._image, self._seen = image, seen
        self._compared = tokens.shape[1] - (seen is None)
        image_ids = [] if seen is None else [np.tile(seen.ids, (len(tokens), 1))]
        self._tokens = np.concatenate([*image_ids, tokens], axis=1).astype(np.int32)

    def score(self, engine: TrainingEngine) -> Canary:
        """Return the text with its logprobs. All ranks of the group call it; only rank 0's result counts."""
        logprobs = engine.forward(self._batch(), temperature=1.0).numpy().reshape(self._tokens.shape)
        compared = Array.of(logprobs[:, -self._compared :], np.float32)
        return Canary(Array.of(self._tokens), compared, self._image)

    def _batch(self) -> Batch:
        import torch

        from stretto.rl.batch import Batch

        sequences, length = self._tokens.shape
        tokens = {"tokens": torch.from_numpy(self._tokens.reshape(-1)).long()}
        seen = {} if self._seen is None else self._seen.media
        media = {name: torch.from_numpy(array) for name, array in seen.items()}
        return Batch([length] * sequences, tokens, {}, [media] * sequences)


def probe_of(config: RunConfig) -> Probe | str:
    """Return the run's canary, the same in every process; or the reason for none, empty if none is wanted."""
    canary, model = config.inference.canary, config.model
    if canary is None:
        return ""
    if model is None:
        return "the run has no model"
    model_config = fetch_config(model)
    random = np.random.default_rng(abs(config.seed))
    if not is_vision_language(model_config):
        if "vocab_size" not in model_config:
            return f"the config of {model!r} has no vocab_size"
        return Probe(_text(random, model_config["vocab_size"], canary))
    vision = Vision(model)
    image = _picture(random)
    # Token ids from `image_token` up stand for images, videos and their delimiters.
    return Probe(_text(random, vision.image_token, canary), image, vision.shown(decode(image)))


def _text(random: np.random.Generator, vocabulary: int, canary: CanaryConfig) -> NDArray[np.int32]:
    return random.integers(vocabulary, size=(canary.sequences, canary.tokens), dtype=np.int32)


def _picture(random: np.random.Generator) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(random.integers(256, size=(_SIDE, _SIDE, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()
