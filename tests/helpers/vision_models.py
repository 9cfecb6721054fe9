"""Tiny random vision-language models, with tokenizer and processor, and pictures for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from tiny_sizes import IDS, tiny_sizes

ARCHITECTURES = ["llava", "qwen2_5_vl"]
PLACE = {"llava": "<image>", "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
_IMAGE = {"llava": "<image>", "qwen2_5_vl": "<|image_pad|>"}
_SEES = {"hidden_size": 16, "intermediate_size": 24, "initializer_range": 0.3}
TEXTS = 97
"""Ids below are characters, those from here on stand for images."""


def make_vision_model(
    architecture: str, folder: Path, *, patch: int = 4, most_pixels: int = 1024, positions: int = 256
) -> None:
    """About 0.03 M parameters; an image is four tokens, or for Qwen as many as its size makes.

    Args:
        patch: width and height of a patch, for Qwen; four patches are a token.
        most_pixels: larger images are made smaller, for Qwen.
        positions: tokens that a text may have.
    """
    vocabulary = _save_tokenizer(architecture, folder)
    if architecture != "llava":
        from transformers import Qwen2VLImageProcessorPil

        sizes = {"shortest_edge": 64, "longest_edge": most_pixels}
        Qwen2VLImageProcessorPil(patch_size=patch, size=sizes).save_pretrained(folder)
    text = {
        "vocab_size": len(vocabulary),
        "initializer_range": 0.08,
        **IDS,
        **tiny_sizes(32, layers=2, max_position_embeddings=positions),
    }
    if architecture == "llava":
        options = llava_options(text)
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        sees = {**_SEES, "depth": 2, "num_heads": 2, "out_hidden_size": 32, "patch_size": patch}
        options = {
            "text_config": {**text, "rope_parameters": rope},
            "vision_config": {**sees, "window_size": 4 * patch, "fullatt_block_indexes": [1]},
            "vision_start_token_id": vocabulary["<|vision_start|>"],
        }
    torch.manual_seed(7)
    config = AutoConfig.for_model(architecture, image_token_id=vocabulary[_IMAGE[architecture]], **options)
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(folder)


def llava_options(text: dict[str, Any]) -> dict[str, Any]:
    """The config of a LLaVA with a text model like Qwen2's, which sees 16 × 16 pixels in patches of 8."""
    sees = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    return {
        "text_config": {"model_type": "qwen2", "bos_token_id": None, "pad_token_id": 0, **text},
        "vision_config": {"model_type": "clip_vision_model", **_SEES, **sees},
        "vision_feature_layer": -1,
    }


def _save_tokenizer(architecture: str, folder: Path) -> dict[str, int]:
    """Printable ASCII and what stands for images, a chat template, and the processor; the vocabulary."""
    special = [_IMAGE[architecture]]
    if architecture != "llava":
        special += ["<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    fast = ascii_tokenizer(special)
    fast.chat_template = (
        "{% for turn in messages %}{{ turn.role }}:{% for part in turn.content %}"
        "{% if part.type == 'image' %}" + PLACE[architecture] + "{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    fast.save_pretrained(folder)
    if architecture == "llava":
        save_llava_processor(fast, folder)
    return fast.get_vocab()


def ascii_tokenizer(special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A token for each printable character, and these."""
    characters = ["Ġ" if code == 32 else chr(code) for code in range(32, 127)]
    vocabulary = {token: id for id, token in enumerate(["<pad>", "<|im_end|>", *characters, *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **names, additional_special_tokens=list(special)
    )


def never_sample_images(folder: Path) -> None:
    """Change a Qwen2.5-VL so that it does not sample the token of images, which would fail its ticket."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    never_sample(model, model.model.visual.merger.mlp[2], model.config.image_token_id)
    model.save_pretrained(folder)


def never_sample(model: Any, projection: Any, token: int) -> None:
    """Make the first number of each hidden state the same, and let it count against this token alone.

    Args:
        projection: what maps images to hidden states.
    """
    inner = model.model.language_model
    inner.embed_tokens.weight.data[:, 0] = 2.0
    projection.weight.data[0], projection.bias.data[0] = 0.0, 2.0
    for layer in inner.layers:
        layer.self_attn.o_proj.weight.data[0] = 0.0
        layer.mlp.down_proj.weight.data[0] = 0.0
    inner.norm.weight.data[0] = 1.0
    model.lm_head.weight.data[:, 0] = 0.0
    model.lm_head.weight.data[token] = 0.0
    model.lm_head.weight.data[token, 0] = -1000.0


def save_llava_processor(tokenizer: Any, folder: Path) -> None:
    """Write the processor of a LLaVA that sees 16 × 16 pixels in patches of 8: four tokens for an image."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    square = {"height": 16, "width": 16}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=square),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


def picture(seed: int, width: int = 20, height: int = 14) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
