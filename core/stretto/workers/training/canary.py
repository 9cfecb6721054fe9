"""The canary in a trainer: fixed texts, and their logprobs under the lead model of each version."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stretto.array import Array
from stretto.config import RunConfig
from stretto.engine import CanaryConfig, TrainingEngine
from stretto.models.files import fetch_config, positions_of
from stretto.models.images import decode
from stretto.models.vision import Vision, VisionPrompt, is_vision_language
from stretto.weights import Canary

if TYPE_CHECKING:
    from stretto.rl.batch import Batch

_MOST_DEPTH = 1024  # tokens of the long text, unless the run file sets more
_SIDE = 56
"""Pixels of a side of the canary's image: whole patches for today's models, so none of them rescales it."""


class Probe:
    """The canary: int32 random tokens of each text; before them an image, if the model reads images."""

    def __init__(
        self, texts: Sequence[NDArray[np.int32]], image: bytes = b"", seen: VisionPrompt | None = None
    ) -> None:
        self._image, self._seen = image, seen
        self._compared = [len(text) - (seen is None) for text in texts]
        image_ids = [] if seen is None else [seen.ids]
        self._texts = [np.concatenate([*image_ids, text]).astype(np.int32) for text in texts]

    def score(self, engine: TrainingEngine) -> Canary:
        """Return the texts with their logprobs. All ranks of the group call it; rank 0's result counts."""
        batch = self._batch()
        parts = engine.forward(batch, temperature=1.0).split(batch.lengths)
        logprobs = (part.numpy()[-size:] for part, size in zip(parts, self._compared, strict=True))
        texts = tuple(Array.of(text) for text in self._texts)
        return Canary(texts, tuple(Array.of(part, np.float32) for part in logprobs), self._image)

    def _batch(self) -> Batch:
        import torch

        from stretto.rl.batch import Batch

        tokens = {"tokens": torch.from_numpy(np.concatenate(self._texts)).long()}
        seen = {} if self._seen is None else self._seen.media
        media = {name: torch.from_numpy(array) for name, array in seen.items()}
        return Batch([*map(len, self._texts)], tokens, {}, [media] * len(self._texts))


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
        sizes = [canary.tokens] * canary.sequences
        if (depth := _depth_of(config, canary)) > canary.tokens:
            sizes.append(depth)
        return Probe(_texts(random, model_config["vocab_size"], sizes))
    vision = Vision(model)
    image = _picture(random)
    # Token ids from `image_token` up stand for images, videos and their delimiters.
    sizes = [canary.tokens] * canary.sequences + ([canary.depth] if canary.depth else [])
    texts = _texts(random, vision.image_token, sizes)
    return Probe(texts, image, vision.shown(decode(image)))


def _depth_of(config: RunConfig, canary: CanaryConfig) -> int:
    """Return the number of tokens of the long text."""
    rooms = (getattr(config.inference, "context_length", None), positions_of(config.model))
    # A server needs room for one more token.
    room = min((each - 1 for each in rooms if each is not None), default=_MOST_DEPTH)
    wanted = min(config.sampling.max_tokens, _MOST_DEPTH) if canary.depth is None else canary.depth
    return min(wanted, room)


def _texts(random: np.random.Generator, vocabulary: int, sizes: Sequence[int]) -> list[NDArray[np.int32]]:
    return [random.integers(vocabulary, size=size, dtype=np.int32) for size in sizes]


def _picture(random: np.random.Generator) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(random.integers(256, size=(_SIDE, _SIDE, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()
