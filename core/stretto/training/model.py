"""(torch) A Hugging Face model made ready for training: its head, its rows and its layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import structlog
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from stretto.errors import EngineError
from stretto.training.packing import (
    ATTENTION,
    MakeInputs,
    ModelInputs,
    packed_rows,
    packs_exactly,
    padded_rows,
)

if TYPE_CHECKING:
    from stretto.component import Head
    from stretto.rl.batch import Batch
    from stretto.training.config import ModelTrainingConfig

__all__ = [
    "checkpoint_activations",
    "compile_layers",
    "layers_of",
    "load_model",
    "load_policy",
    "reads_images",
]

log = structlog.get_logger()


# ----------------------------------------------------------------------------------------- loading


def load_model(
    source: str, config: ModelTrainingConfig, head: Head, device: torch.device
) -> tuple[PreTrainedModel, MakeInputs]:
    """The model in float32 on a device, and how batches are laid out for it: packed if that is exact.

    Raises:
        EngineError: if it cannot be loaded, or must be packed and cannot.
    """
    try:
        made_for = _without_dropout(AutoConfig.from_pretrained(source))
        if reads_images(made_for):
            return _vision_language(source, made_for, config, head, device)
        if config.packing != "padded":
            model = _from_pretrained(source, made_for, head, ATTENTION, device)
            size = made_for.get_text_config().vocab_size
            reason = packs_exactly(_output_of(model, head), size, device, keep=head == "policy")
            if not reason:
                return model, packed_rows
            if config.packing == "packed":
                raise EngineError(f"training.packing is 'packed', and {source!r} does not allow it: {reason}")
            log.info("rows are padded", reason=reason)
            del model  # before there is another
        return _from_pretrained(source, made_for, head, None, device), padded_rows
    except (OSError, ValueError) as error:
        raise EngineError(f"model {source!r} cannot be loaded: {error}") from error


def load_policy(source: str) -> PreTrainedModel:
    """A model as its files have it, in their own type and on the CPU: to be passed on, not to be trained.

    Raises:
        EngineError: if it cannot be loaded, or is no language model.
    """
    try:
        made_for = AutoConfig.from_pretrained(source)
        kind = AutoModelForImageTextToText if reads_images(made_for) else AutoModelForCausalLM
        return _read(kind, source, torch.device("cpu"), dtype="auto", config=made_for)
    except (OSError, ValueError) as error:
        raise EngineError(f"model {source!r} cannot be loaded: {error}") from error


def reads_images(config: Any) -> bool:
    """Whether a model's config is of a vision-language one."""
    return hasattr(config, "vision_config")


def _vision_language(
    source: str, made_for: Any, config: ModelTrainingConfig, head: Head, device: torch.device
) -> tuple[PreTrainedModel, MakeInputs]:
    """A vision-language model. Its rows are padded: images have attention, and often positions, of their
    own, of which a packed row knows nothing."""
    if head != "policy":
        raise EngineError(
            f"{source!r} is a vision-language model, and a {head} head on one is not supported; give a text "
            "model for it, or leave it out"
        )
    if config.packing == "packed":
        raise EngineError(f"training.packing is 'packed', and {source!r} reads images; leave it 'auto'")
    model = _read(AutoModelForImageTextToText, source, device, config=made_for)
    return model, _rows_with_images(model)


def _rows_with_images(model: PreTrainedModel) -> MakeInputs:
    """Padded rows, with what the model is to know of the images in them."""
    config: Any = model.config
    image_token: int = getattr(config, "image_token_id", None) or config.image_token_index
    # Some are told by the caller which tokens stand for an image: without, positions would be those of text.
    marks = {"mm_token_type_ids", "token_type_ids"} & {*inspect.signature(model.forward).parameters}

    def rows(batch: Batch, at: Tensor, *, keep: bool) -> ModelInputs:
        padded = padded_rows(batch, at, keep=keep)
        marked = (padded.arguments["input_ids"] == image_token).long()
        told = {**batch.joined_media(), **dict.fromkeys(marks, marked)}
        return replace(padded, arguments={**padded.arguments, **told})

    return rows


def _from_pretrained(
    source: str, config: Any, head: Head, attention: str | None, device: torch.device
) -> PreTrainedModel:
    if head == "policy":
        return _read(AutoModelForCausalLM, source, device, config=config, attn_implementation=attention)
    config.num_labels = 1
    config.classifier_dropout = 0.0
    kind = AutoModelForTokenClassification
    return _read(kind, source, device, new_head=True, config=config, attn_implementation=attention)


def _read(
    kind: Any,
    source: str,
    device: torch.device,
    *,
    new_head: bool = False,
    dtype: torch.dtype | str = torch.float32,
    **options: Any,
) -> PreTrainedModel:
    """The model of a folder or of the hub, on a device. Nothing is unpickled, and nothing drawn at random.

    Args:
        new_head: a head that the source lacks begins at 0; otherwise it must have everything.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it would warn of what is missing; here that is judged
    try:
        model, found = kind.from_pretrained(
            source, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    finally:
        transformers_logging.set_verbosity(verbosity)
    if new_head:
        _begin_at_zero(model, found["missing_keys"], source)
    elif missing := sorted(found["missing_keys"]):
        raise EngineError(f"model {source!r} lacks {', '.join(missing[:3])}; is it one with another head?")
    model.train()
    return model.to(device)


@torch.no_grad()
def _begin_at_zero(model: PreTrainedModel, missing: Iterable[str], source: str) -> None:
    """A head that the source lacks says 0 of every token, in whatever rank."""
    parameters = dict(model.named_parameters())
    for name in missing:
        if name.startswith(f"{model.base_model_prefix}.") or name not in parameters:
            raise EngineError(f"model {source!r} lacks {name!r}, which is no part of a head")
        parameters[name].zero_()


def _without_dropout(config: Any) -> Any:
    """What a model says must not depend on chance."""
    parts = [getattr(config, name, None) for name in config.sub_configs]
    for owner in (config, config.get_text_config(), *(part for part in parts if part is not None)):
        for name, value in vars(owner).items():
            if ("drop" in name) and isinstance(value, float):
                setattr(owner, name, 0.0)
    return config


def _output_of(model: PreTrainedModel, head: Head) -> Callable[[dict[str, Any]], Tensor]:
    """What tells whether a model packs: a new head is 0 everywhere, so there it is what goes into it."""
    if head == "policy":
        return lambda arguments: model(**arguments).logits
    base: Any = model.base_model
    return lambda arguments: base(**arguments).last_hidden_state


# ------------------------------------------------------------------------------------------ layers


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that Hugging Face names as never to be split, in order; none for an unknown model."""
    names: set[str] = {*(getattr(model, "_no_split_modules", None) or ())}
    # By its ancestors too: FSDP2 makes a class of its own of every module's.
    return [module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__}]


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Have the backward pass compute each layer again, rather than hold what it needs."""
    # Later versions of transformers have another name for it, and warn of the old one.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})


def compile_layers(model: nn.Module) -> None:
    """torch.compile for the feed-forward part of every layer, whatever the number of tokens.

    Raises:
        EngineError: if the layers have no module `mlp`.
    """
    parts = [layer.mlp for layer in layers_of(model) if isinstance(getattr(layer, "mlp", None), nn.Module)]
    if not parts:
        raise EngineError(f"training.compile: {type(model).__name__} has no layers with a module 'mlp'")
    for part in parts:
        cast("nn.Module", part).compile(dynamic=True)
