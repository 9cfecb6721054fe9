"""The engine `seeing`: the torch engine, which sees an image before every prompt. And its models.

The tests of the contract of engines know nothing of images. With this engine they test prompts that have one:
the engine puts it before each text, and `SeeingReference` does the same.
"""

import io
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from anyio.abc import TaskGroup
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from stretto import Component, Context, hookimpl
from stretto.array import Array
from stretto.engine import Emit, GenerateRequest
from stretto.models.images import OpenImage, decode
from stretto.models.vision import Vision, VisionPrompt
from stretto.testing.tiny_model import END, POSITIONS, VOCABULARY, Reference, TinyModel, make_tiny_tokenizer
from stretto.training.model import names_in_files
from stretto_torch import TorchInferenceConfig
from stretto_torch.inference import TorchInferenceEngine
from tiny_sizes import tiny_sizes
from vision_models import llava_options, never_sample, save_llava_processor

PREFIX = 5
"""Tokens before each text: one of text, and the four of the image."""


@cache
def picture() -> OpenImage:
    pixels = np.random.default_rng(5).integers(0, 256, (16, 16, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return OpenImage(file.getvalue(), decode(file.getvalue()))


def seen_by(folder: Path | str) -> VisionPrompt:
    """The image as a model's processor sees it, after one token of text."""
    seen = Vision(str(folder)).see("x<image>", [picture().pixels])
    assert len(seen.ids) == PREFIX
    return seen


class SeeingEngine(TorchInferenceEngine):
    def __init__(self, config: TorchInferenceConfig, context: Context) -> None:
        super().__init__(msgspec.structs.replace(config, context_length=POSITIONS + PREFIX), context)
        self._model = context.model

    async def start(self, emit: Emit, tasks: TaskGroup) -> None:
        await super().start(emit, tasks)
        self._before = seen_by(self._model or "").ids

    def generate(self, request: GenerateRequest, images: Sequence[bytes] = ()) -> None:
        text = request.prompt_ids.numpy()
        prompt = np.concatenate([self._before, text]) if text.size else text
        seeing = msgspec.structs.replace(
            request, prompt_ids=Array.of(prompt, np.int32), images=(picture().digest,)
        )
        super().generate(seeing, [picture().file])

    async def logprobs(
        self, sequences: Sequence[NDArray[np.int32]], images: Sequence[bytes] = ()
    ) -> list[NDArray[np.float32]]:
        texts = [np.concatenate([self._before, sequence]).astype(np.int32) for sequence in sequences]
        return [each[PREFIX:] for each in await super().logprobs(texts, [picture().file])]


@hookimpl
def stretto_inference() -> Iterable[Component[TorchInferenceConfig]]:
    yield Component("seeing", SeeingEngine, TorchInferenceConfig, "sees an image before every prompt")


class _Seeing:
    """A model whose texts come after the image."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model = model
        self._names = names_in_files(model, str(folder))
        seen = seen_by(folder)
        self._before = torch.from_numpy(seen.ids).long()[None]
        self._media = {name: torch.from_numpy(array) for name, array in seen.media.items()}

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        named: Iterable[tuple[str, Tensor]] = self.model.named_parameters()
        return ((self._names.get(name, name), parameter) for name, parameter in named)

    def __call__(self, ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        if past_key_values is None:
            before = self._before.repeat(len(ids), 1)
            media = {name: torch.cat([value] * len(ids)) for name, value in self._media.items()}
            past_key_values = self.model(input_ids=before, **media, use_cache=True).past_key_values
        return self.model(input_ids=ids, past_key_values=past_key_values, use_cache=use_cache)


class SeeingReference(Reference):
    """The plain forward of a vision-language model after the image."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText

        model: Any = AutoModelForImageTextToText.from_pretrained(folder)
        self._model = _Seeing(model.float().eval().requires_grad_(False), folder)


def make_seeing_model(folder: Path, *, seed: int, layers: int) -> TinyModel:
    """Write a LLaVA whose text model is as large as that of the other tests. It never samples the token of
    images: the first number of each hidden state is the same, and counts against that token alone."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    fast = make_tiny_tokenizer()
    fast.add_tokens(["<image>"], special_tokens=True)
    token = fast.convert_tokens_to_ids("<image>")
    assert token == VOCABULARY
    text = {
        **tiny_sizes(64, layers=layers, vocab_size=VOCABULARY + 1, eos_token_id=END),
        "max_position_embeddings": POSITIONS + PREFIX,
        "initializer_range": 0.15,
    }
    config: Any = AutoConfig.for_model("llava", image_token_id=token, **llava_options(text))
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model: Any = AutoModelForImageTextToText.from_config(config).float()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    torch.random.set_rng_state(generator)
    never_sample(model, model.model.multi_modal_projector.linear_2, token)
    model.generation_config.eos_token_id = END
    model.save_pretrained(folder)
    save_llava_processor(fast, folder)
    return TinyModel(folder, SeeingReference(folder))
