"""The processor of a vision-language model: it turns a prompt with images into the model's arguments.

The model's own processor decides how many tokens represent an image, and which arrays the model reads. It
always uses its Pillow and NumPy backend, so that rollout workers, which make the ids, agree with engines and
trainers, which make the arrays from the images' files.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from stretto.chat.chat_form import ChatForm, plain_text
from stretto.dataset import DatasetConfig, Message, OwnTurn, Row
from stretto.errors import ConfigError
from stretto.models.files import fetch_config
from stretto.models.images import OpenImage, decode, images_of
from stretto.models.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "PROCESSOR_FILES",
    "RowTokenizer",
    "Vision",
    "VisionPrompt",
    "image_token_of",
    "images_in",
    "is_vision_language",
    "keep_torch_out",
    "newest_name",
    "place_images",
]

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""The files of a model's processor, besides those of the tokenizer. Not every model has all of them."""

_ZERO_WIDTH = "\u200b"

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
# The outputs of a processor that have an entry for each token; all others belong to the images.
_OF_TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


def is_vision_language(config: Mapping[str, Any]) -> bool:
    """Return whether this `config.json` belongs to a model that reads images."""
    return "vision_config" in config


def image_token_of(config: Mapping[str, Any]) -> int | None:
    """Return the id of the token that represents a part of an image; None if this `config.json` has none."""
    token = config.get("image_token_id", config.get("image_token_index"))
    return token if isinstance(token, int) else None


# Older prefix of tensor names in checkpoints of vision-language models -> today's prefix.
_OLDER_PREFIXES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "visual.": "model.visual.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "model.embed_tokens.": "model.language_model.embed_tokens.",
    "model.layers.": "model.language_model.layers.",
    "model.norm.": "model.language_model.norm.",
}


def newest_name(name: str) -> str:
    """Return the name of a tensor of a vision-language model as transformers writes it today."""
    for older, newer in _OLDER_PREFIXES.items():
        if name.startswith(older):
            return newer + name.removeprefix(older)
    return name


def keep_torch_out() -> None:
    """Import transformers as if torch were not installed: its image processors import torch if they can. Call
    this before transformers is imported elsewhere, because it looks for torch only once. The parts of
    transformers that need torch are then missing in this process."""
    if "torch" in sys.modules:
        return
    modules, advice = cast("dict[str, Any]", sys.modules), os.environ.get(_ADVICE)
    modules["torch"], os.environ[_ADVICE] = None, "1"  # no warning to the user that torch was not found
    try:
        importlib.import_module("transformers.models.auto.processing_auto")
    finally:
        del modules["torch"], os.environ[_ADVICE]
        if advice is not None:
            os.environ[_ADVICE] = advice


@dataclass(frozen=True)
class VisionPrompt:
    """A prompt with its images, in the form that the model reads."""

    ids: NDArray[np.int32]
    """(P,) ids of the prompt. The number of image tokens equals the number of image features in the model."""
    media: Mapping[str, NDArray[Any]]
    """Arguments of the model, such as `pixel_values`; first dimension: images or patches. Empty without
    images."""


class Vision:
    """The processor of a vision-language model: its tokenizer and its image processor, used together.

    Any thread may call the methods, but only one at a time. Raise ConfigError if the model has no processor
    that can be loaded, or its config names no image token."""

    def __init__(self, model: str, rows: DatasetConfig | None = None) -> None:
        self._model = model
        self._processor = _load_processor(model)
        self.tokenizer = ModelTokenizer(self._processor.tokenizer, model, rows, self._processor)
        """The tokenizer for text without images. It has the chat template of the processor."""
        token = image_token_of(fetch_config(model))
        if token is None:
            raise ConfigError(f"model {model!r} names no image token: its config.json has no image_token_id")
        self.image_token: int = token

    def blank(self) -> VisionPrompt:
        """Return the smallest prompt with an image, which is black."""
        from PIL import Image

        return self.alone(Image.new("RGB", (32, 32)))

    def alone(self, *images: Image) -> VisionPrompt:
        """Return the smallest prompt with these images; ConfigError if they do not suit the model."""
        return self.see(self.place * len(images), images)

    def shown(self, image: Image) -> VisionPrompt:
        """Return a prompt with an image and no text, in the chat template's form if there is one: SGLang
        finds an image only between the template's tokens."""
        if self._processor.chat_template is None:
            return self.alone(image)
        return self.see([{"role": "user", "content": "<image>"}], [image])

    def count(self, ids: NDArray[Any]) -> int:
        """Return the number of image tokens among ids."""
        return int(np.count_nonzero(ids == self.image_token))

    def media_of(self, files: Sequence[bytes], tokens: int) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of images given as files; see `VisionPrompt`. Raise ConfigError if one cannot be
        read, or if the images do not have `tokens` image tokens."""
        prompt = self.alone(*map(decode, files))
        count = self.count(prompt.ids)
        if count != tokens:
            raise ConfigError(
                f"a prompt has {tokens} image tokens (id {self.image_token}), and its {len(files)} images "
                f"have {count}; do all machines have the same model folder and transformers?"
            )
        return prompt.media

    @property
    def place(self) -> str:
        """The text that the processor replaces by the tokens of an image."""
        # In some processors one token of the text represents the whole image; in the ids, others do.
        return getattr(self._processor, "boi_token", None) or self._processor.image_token

    def of(self, row: Row) -> RowTokenizer:
        """Return the tokenizer for the texts of one row. Raise ConfigError as `images_of` does."""
        return RowTokenizer(self, images_of(row))

    def see(
        self,
        prompt: str | Sequence[Message],
        images: Sequence[Image],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> VisionPrompt:
        """Process a prompt with its images. Each image has a placeholder: in a text the model's own, in chat
        messages a part `{"type": "image"}` or `<image>` in a text. Raise ConfigError if the numbers differ,
        the images do not suit the model, or the model lacks a chat template for messages."""
        plain = isinstance(prompt, str)
        text = prompt if plain else self.render(prompt, tools=tools, with_images=True)
        return self._process(text, images, plain=plain)

    def see_part(self, text: str, images: Sequence[Image]) -> VisionPrompt:
        """Process a part of a text with its images; no token is added around it. Raises as `see` does."""
        places = text.count(self.place)
        if places != len(images):
            raise ConfigError(
                f"a text has {len(images)} images and {places} places for them ({self.place}); "
                "leave the placeholder out of texts of rows, environments, tools and agents"
            )
        return self._process(text, images, plain=False)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        with_images: bool = False,
    ) -> str:
        """Like `Tokenizer.render`. Each part `{"type": "image"}` becomes the model's own placeholder; with
        `with_images`, each `<image>` in a text too."""
        turns = [
            (OwnTurn if isinstance(turn, OwnTurn) else dict[str, Any])(
                turn, content=_parts(turn.get("content"), with_images=with_images)
            )
            for turn in messages
        ]
        text = self.tokenizer.render(turns, tools=tools, add_generation_prompt=add_generation_prompt)
        return plain_text(text, mark=_ZERO_WIDTH)  # else the processor reads a special token

    def _process(self, text: str, images: Sequence[Image], *, plain: bool) -> VisionPrompt:
        try:
            inputs: Mapping[str, Any] = self._processor(
                images=list(images) or None,
                text=[text],
                add_special_tokens=plain,  # the chat template already contains them
                return_tensors="np",
            )
        except (ValueError, TypeError, IndexError, StopIteration) as error:
            raise ConfigError(
                f"the prompt does not go with its {len(images)} images: {error}", path="dataset"
            ) from error
        media = {name: np.asarray(value) for name, value in inputs.items() if name not in _OF_TOKENS}
        return VisionPrompt(np.asarray(inputs["input_ids"][0], np.int32), media)


class RowTokenizer:
    """A `stretto.tokenizer.Tokenizer` for one row. It puts the row's images into its prompts."""

    def __init__(self, vision: Vision, images: Sequence[OpenImage]) -> None:
        self._vision = vision
        self.images = images
        # All else is the same as for a row without images.
        self.rows = vision.tokenizer.rows
        self.encode_answer = vision.tokenizer.encode_answer
        self.encode_text = vision.tokenizer.encode_text
        self.decode = vision.tokenizer.decode
        self.ends_turn = vision.tokenizer.ends_turn
        self.special_in = vision.tokenizer.special_in
        self.most_characters = vision.tokenizer.most_characters

    @property
    def form(self) -> ChatForm:
        """The model's chat form."""
        return self._vision.tokenizer.form

    def encode_prompt(
        self, prompt: str | Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> NDArray[np.int32]:
        """See `Vision.see`."""
        return self._vision.see(prompt, [image.pixels for image in self.images], tools=tools).ids

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a prompt that `encode_prompt` encodes."""
        return self._vision.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, with_images=True
        )


def place_images(messages: Sequence[Message], digests: Sequence[str]) -> list[Message]:
    """Return chat messages with images at their places: `<image>` in a text or a part `{"type": "image"}`
    becomes `{"type": "image", "sha256": digest}`. Raise ConfigError if the numbers of places and
    images differ."""
    placed: list[Message] = []
    places = 0
    for message in messages:
        content = message.get("content")
        parts: Any = _parts(content, with_images=True) if digests and isinstance(content, str) else content
        if not isinstance(parts, list):
            placed.append(message)
            continue
        parts = list(cast("list[Any]", parts))
        for index, part in enumerate(parts):
            if _is_image(part) and "sha256" not in part:
                parts[index] = {"type": "image", "sha256": digests[places] if places < len(digests) else ""}
                places += 1
        placed.append({**message, "content": parts} if any(map(_is_image, parts)) else message)
    if places != len(digests):
        raise ConfigError(
            f"the messages have {len(digests)} images and {places} places for them; write one `<image>`, "
            "or one part {'type': 'image'}, for each"
        )
    return placed


def images_in(messages: Sequence[Message]) -> list[str]:
    """Return the digests of the images in chat messages, in order."""
    return [
        part["sha256"]
        for message in messages
        if isinstance(message.get("content"), list)
        for part in cast("list[Any]", message["content"])
        if _is_image(part)
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and cast("Mapping[str, Any]", part).get("type") == "image"


def _parts(content: Any, *, with_images: bool) -> Any:
    """Return a text content as parts, the only form that all templates of vision-language models read."""
    if not isinstance(content, str):
        return content
    texts = content.split("<image>") if with_images else [content]
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return parts


def _load_processor(model: str) -> Any:
    """Load the model's processor with Pillow's image processor. AutoProcessor would choose torchvision
    if it is installed, and needs torchvision for videos, which rows do not have."""
    from transformers import AutoConfig, AutoImageProcessor, PreTrainedTokenizerFast
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    try:
        kind: Any = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(model))]
        parts = [name for name in kind.get_attributes() if name != "video_processor"]

        class WithoutVideo(kind):
            @classmethod
            def get_attributes(cls) -> list[str]:
                return parts

        components = {
            "image_processor": AutoImageProcessor.from_pretrained(model, backend="pil"),
            "tokenizer": PreTrainedTokenizerFast.from_pretrained(model),
        }
        if unsupported := set(parts) - components.keys():
            raise ConfigError(
                f"model {model!r} has a processor with {', '.join(sorted(unsupported))}: not supported"
            )
        settings, _ = kind.get_processor_dict(model)
        no_video = {"video_processor": None} if "video_processor" in kind.get_attributes() else {}
        settings = {
            key: value for key, value in settings.items() if key not in (*components, "video_processor")
        }
        processor = WithoutVideo.from_args_and_dict([], {**settings, **no_video}, **components)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(
            f"model {model!r} has no processor of images that can be loaded: {type(error).__name__}: {error}"
        ) from error
    if processor.chat_template is None:
        processor.chat_template = processor.tokenizer.chat_template
    return processor
