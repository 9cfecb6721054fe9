"""The images of a request: the model's inputs, and the positions of the tokens around them."""

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engine import Digest
from stretto.errors import ConfigError, RequestError
from stretto.models.vision import Vision

_KEPT = 32
"""Number of requests whose arrays are kept: the next turn of a conversation has the same images."""


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt. P: tokens of the prompt."""

    media: Mapping[str, Tensor]  # arguments of the model, such as `pixel_values`
    places: NDArray[np.int64]  # positions of the image tokens, ascending, at least one
    salt: NDArray[np.int32]
    """Numbers that replace image tokens in the prefix cache: negative, and different for different images."""
    positions: Tensor | None
    """(3, 1, P) time, height and width of each token, for models with M-RoPE (Qwen2-VL); None for others."""
    shift: int
    """Position minus index of the tokens after the images: an image may have fewer positions than tokens."""

    @property
    def end(self) -> int:
        """The index after the last image token."""
        return int(self.places[-1]) + 1


class ImageReader:
    """Turns image files into inputs of one vision-language model. Call it from one thread at a time."""

    def __init__(self, folder: str, model: Any) -> None:
        self.vision = Vision(folder)
        self._model = model
        self._marks = {"mm_token_type_ids", "token_type_ids"} & {*inspect.signature(model.forward).parameters}
        self._media: OrderedDict[tuple[str, ...], Mapping[str, NDArray[Any]]] = OrderedDict()

    def read(
        self, prompt: NDArray[np.int32], digests: Sequence[Digest], files: Sequence[bytes]
    ) -> PromptImages:
        """Return the images of a prompt (P,). `digests`: SHA-256 of each file, if they are known."""
        places = np.flatnonzero(prompt == self.vision.image_token)
        try:
            media = self._media_of(tuple(digests), files, len(places))
        except ConfigError as error:
            raise RequestError(str(error)) from error
        return self.images(prompt, media, digests)

    def images(
        self, prompt: NDArray[np.int32], media: Mapping[str, NDArray[Any]], digests: Sequence[str]
    ) -> PromptImages:
        """Return the images of a prompt (P,). `media`: arrays that `Vision.media_of` made of the files."""
        device, dtype = self._model.device, self._model.dtype
        tensors = {name: torch.from_numpy(array).to(device) for name, array in media.items()}
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        places = np.flatnonzero(prompt == self.vision.image_token)
        ids = torch.from_numpy(prompt.astype(np.int64)).to(device)[None]
        positions = self._positions(ids, tensors)
        shift = 0 if positions is None else int(positions[:, 0].max()) + 1 - len(prompt)
        return PromptImages(tensors, places, _salt(digests, len(places)), positions, shift)

    def marks(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments that tell the model which of the tokens (N, P) are image tokens."""
        return dict.fromkeys(self._marks, (ids == self.vision.image_token).long())

    def _media_of(
        self, digests: tuple[str, ...], files: Sequence[bytes], tokens: int
    ) -> Mapping[str, NDArray[Any]]:
        if not digests:
            return self.vision.media_of(files, tokens)
        key = (*digests, str(tokens))
        if key not in self._media:
            self._media[key] = self.vision.media_of(files, tokens)
            while len(self._media) > _KEPT:
                self._media.popitem(last=False)
        self._media.move_to_end(key)
        return self._media[key]

    def _positions(self, ids: Tensor, media: Mapping[str, Tensor]) -> Tensor | None:
        """Return (3, 1, P) positions as the model's own forward computes them; None without M-RoPE."""
        rope = getattr(self._model.model, "get_rope_index", None)
        if rope is None:
            return None
        names = {*inspect.signature(rope).parameters}
        arguments = {name: value for name, value in {**media, **self.marks(ids)}.items() if name in names}
        return rope(ids, **arguments)[0]


def _salt(digests: Sequence[str], tokens: int) -> NDArray[np.int32]:
    """Return (tokens,) negative numbers that depend on all images of the prompt."""
    seed = hashlib.sha256("/".join(digests).encode()).digest()
    return np.random.default_rng([*seed]).integers(np.iinfo(np.int32).min, 0, tokens, np.int32)
