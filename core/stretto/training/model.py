"""(torch) Prepare a Hugging Face model for training: its head, the rows of its inputs, its layers."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import structlog
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from stretto.component import Head
from stretto.errors import EngineError
from stretto.models.files import is_hybrid, tensors_of_model
from stretto.rl.batch import Batch
from stretto.training import packing
from stretto.training.config import ModelTrainingConfig
from stretto.training.trial import attempt

__all__ = [
    "checkpoint_activations",
    "compile_layers",
    "empty_model",
    "image_arguments",
    "layers_of",
    "load_empty",
    "load_model",
    "load_policy",
    "load_whole",
    "names_in_files",
    "reads_images",
    "vision_tower",
]

log = structlog.get_logger()

_LM_HEAD = re.compile("lm_head|lm_loss|embed_out|pred_layer|cls\\.predictions")
_HEAD = re.compile(
    rf"{_LM_HEAD.pattern}|\w*(head|score|classif|regress|reward|value|critic|summary|qa_outputs)"
)
"""Begin the names of the tensors of a head in a model's files."""
_SHOWN = 3  # tensors that a message lists


def load_model(
    source: str, config: ModelTrainingConfig, head: Head, device: torch.device, trains_on: torch.device
) -> tuple[PreTrainedModel, packing.InputRows]:
    """Load a model in float32 and choose the form of its input rows: packed, with shared prefixes, if the
    config allows that and tests show it is exact. Raise EngineError if loading or 'packed' is impossible.
    `device` has the model first, `trains_on` later."""
    try:
        model_config = _without_dropout(AutoConfig.from_pretrained(source))
        if reads_images(model_config):
            return _vision_language(source, model_config, config, head, device)
        if config.packing != "padded":
            packed = packing.PackedRows(recurrent=is_hybrid(source))
            model, reason = attempt(partial(_load_packed, source, model_config, head, device, packed))
            if model is not None:
                return model, _rows_of(model, packed, config, trains_on)
            if config.packing == "packed":
                raise EngineError(
                    f"training.packing is 'packed', and {source!r} does not allow it: {reason}; write `auto`"
                )
            log.info("rows are padded, and each sequence computes its prefix", reason=reason)
        return _load(source, model_config, head, device, attn_implementation=None), packing.PaddedRows()
    except (OSError, ValueError) as error:
        raise EngineError(f"model {source!r} cannot be loaded: {error}") from error


def _load_packed(
    source: str, config: Any, head: Head, device: torch.device, packed: packing.PackedRows
) -> PreTrainedModel:
    model = _load(source, config, head, device, attn_implementation=packing.ATTENTION)
    packing.compare_with_plain(packed, model)
    return model


def _rows_of(
    model: PreTrainedModel, packed: packing.PackedRows, config: ModelTrainingConfig, trains_on: torch.device
) -> packing.InputRows:
    rows = packed
    if config.shared_prefixes and not packed.recurrent:
        rows = packing.PrefixRows(model.config.get_text_config().hidden_size)
        _, reason = attempt(partial(packing.compare_with_plain, rows, model))
        if reason:
            log.info("each sequence computes its prefix", reason=reason)
            rows = packed
    if not config.varlen_attention:
        return rows
    _, reason = attempt(
        lambda: packing.compare_varlen(rows, model, trains_on, getattr(torch, config.compute_dtype))
    )
    if reason:
        log.warning("training.varlen_attention is not used", reason=reason)
        return rows
    return replace(rows, varlen=True)


def load_policy(source: str) -> PreTrainedModel:
    """Load a model on the CPU, in its files' dtype, to publish it. Raise EngineError if that fails."""
    try:
        model_config = AutoConfig.from_pretrained(source)
        return _load(source, model_config, "policy", torch.device("cpu"), dtype="auto")
    except (OSError, ValueError) as error:
        raise EngineError(f"model {source!r} cannot be loaded: {error}") from error


def load_empty(source: str, head: Head) -> None:
    """Load a model whose tensors have shapes and no numbers, to raise and to log as `load_whole` does for its
    files. Also raise OSError or ValueError."""
    with torch.device("meta"):
        model, _ = empty_model(source, head, may_be_packed=False)
        shapes = {name: torch.empty(each.shape) for name, each in tensors_of_model(source).items()}
    options = {"config": model.config, "state_dict": shapes, "device_map": "meta"}
    load_whole(type(model), source, may_lack_head=head != "policy", **options)


def empty_model(source: str, head: Head, may_be_packed: bool) -> tuple[PreTrainedModel, packing.InputRows]:
    """Make a model from its config alone, on torch's current device, and choose the form of its input rows by
    that config."""
    model_config = _without_dropout(AutoConfig.from_pretrained(source))
    text_config = model_config.get_text_config()
    # With an id for padding, transformers reads the numbers of the ids, and they may have none.
    model_config.pad_token_id = text_config.pad_token_id = None
    kinds = getattr(text_config, "layer_types", None)
    is_plain = {*kinds} <= {"full_attention"} if kinds else not getattr(text_config, "sliding_window", None)
    is_packed = is_plain and not reads_images(model_config) and may_be_packed
    attention = packing.ATTENTION if is_packed else None
    model = _kind_of(model_config, head).from_config(
        model_config, dtype=torch.float32, attn_implementation=attention
    )
    return model.eval(), packing.PackedRows() if is_packed else packing.PaddedRows()


def names_in_files(model: PreTrainedModel, source: str | None) -> dict[str, str]:
    """Return name in the model -> name in the files of `source`, for tensors that transformers renames at
    load, as in most vision-language models. Workers without transformers know only the names of the files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    state, names = model.state_dict(), dict[str, str]()
    for file_name in tensors_of_model(source):
        name, converter = rename_source_key(file_name, renamings, converters, model.base_model_prefix, state)
        if converter is None and name != file_name and name in state:
            names[name] = file_name
    return names


def reads_images(config: Any) -> bool:
    """Return whether this is the config of a vision-language model."""
    return hasattr(config, "vision_config")


def vision_tower(model: PreTrainedModel) -> str:
    """Return the name of the module that encodes images; EngineError if the model has none."""
    tower: Any = model.get_encoder(modality="image")
    if tower is model or tower is model.base_model:
        raise EngineError(
            f"training.freeze_vision_tower: {type(model).__name__} has no module that encodes images alone"
        )
    return next(name for name, module in model.named_modules() if module is tower)


def _vision_language(
    source: str, model_config: Any, config: ModelTrainingConfig, head: Head, device: torch.device
) -> tuple[PreTrainedModel, packing.InputRows]:
    """Load a vision-language model, with padded rows: packed ones do not support its attention."""
    if head != "policy":
        raise EngineError(
            f"{source!r} is a vision-language model, and a {head} head on one is not supported; give a text "
            "model for it, or leave it out"
        )
    if config.packing == "packed":
        raise EngineError(f"training.packing is 'packed', and {source!r} reads images; leave it 'auto'")
    model = _load(source, model_config, head, device)
    return model, packing.PaddedRows(image_arguments(model))


def image_arguments(model: PreTrainedModel) -> Callable[[Batch, Tensor], dict[str, Tensor]]:
    """Return a function that makes the model's image arguments from a batch and its (S, L) padded ids."""
    config: Any = model.config
    image_token: int = getattr(config, "image_token_id", None) or config.image_token_index
    # Without an argument that marks image tokens, some models give image tokens the positions of text.
    marks = {"mm_token_type_ids", "token_type_ids"} & {*inspect.signature(model.forward).parameters}

    def arguments(batch: Batch, ids: Tensor) -> dict[str, Tensor]:
        return {**batch.join_media(), **dict.fromkeys(marks, (ids == image_token).long())}

    return arguments


def _kind_of(config: Any, head: Head) -> Any:
    """Return transformers' class for a model with this head. The config of a value or reward head gets one
    output for each token."""
    if head == "policy":
        return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM
    config.num_labels = 1
    config.classifier_dropout = 0.0
    return AutoModelForTokenClassification


def _load(
    source: str,
    config: Any,
    head: Head,
    device: torch.device,
    *,
    dtype: torch.dtype | str = torch.float32,
    **options: Any,
) -> PreTrainedModel:
    """Load a model on a device, with `load_whole`. It stays in evaluation mode: then noise is off, whatever
    its name, and the model computes what inference workers sample from."""
    kind, may_lack = _kind_of(config, head), head != "policy"
    model: Any = load_whole(kind, source, may_lack_head=may_lack, config=config, dtype=dtype, **options)
    return model.to(device)


def load_whole(kind: Any, source: str, *, may_lack_head: bool = False, **options: Any) -> PreTrainedModel:
    """Load a model of this class of transformers, from a folder or the hub. Nothing is unpickled, no tensor
    is random, and no head is left out: raise EngineError where the files and the class do not fit. With
    `may_lack_head`, a head that the files lack starts at 0, and one with another name is taken. Log other
    tensors that the class does not have, except those that transformers knows to be superfluous."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # no warnings about tensors: they are checked below
    loading = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        place = None if "state_dict" in options else source
        model, info = kind.from_pretrained(place, **loading, **options)
    finally:
        transformers_logging.set_verbosity(verbosity)
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if shapes := [f"{name} {[*found]}, not {[*own]}" for name, found, own in sorted(info["mismatched_keys"])]:
        raise EngineError(f"model {source!r} has other shapes than {type(model).__name__}: {_some(shapes)}")
    body = f"{model.base_model_prefix}."
    if lacking := [name for name in missing if not may_lack_head or name.startswith(body)]:
        names = _some(lacking) + (f", and has {_some(unexpected)}" if unexpected else "")
        raise EngineError(
            f"model {source!r} lacks {names}; does it have another head than {type(model).__name__}?"
        )
    heads = [name for name in unexpected if not name.startswith(body) and _HEAD.match(name)]
    if model.get_output_embeddings() is None:
        unexpected, heads = (
            [name for name in names if not _LM_HEAD.match(name)] for names in (unexpected, heads)
        )
    stems, own = ({name.rpartition(".")[0] for name in names} for names in (heads, missing))
    if len(stems) == len(own) == 1 and "key_mapping" not in options:
        renaming = {rf"^{re.escape(stems.pop())}\.": f"{own.pop()}."}
        return load_whole(kind, source, may_lack_head=True, key_mapping=renaming, **options)
    if heads:
        raise EngineError(
            f"model {source!r} has {_some(heads)}, a head that {type(model).__name__} does not have, and it "
            "would be lost; name the model where its head is used, or save this one without the head"
        )
    if unexpected:
        log.warning("tensors in the files of a model are not used", model=source, tensors=_some(unexpected))
    with torch.no_grad():
        for name in missing:
            model.get_parameter(name).zero_()
    vars(model.config).pop("auto_map", None)  # names code that an export does not have
    return model


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _without_dropout(config: Any) -> Any:
    """Set dropout to 0 in all parts of a config: layers that are computed again are in training mode."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that Hugging Face declares in `_no_split_modules`, in order; maybe an empty list."""
    names: set[str] = {*(getattr(model, "_no_split_modules", None) or ())}
    # Look at base classes too: FSDP2 replaces the class of every module by a subclass.
    return [module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__}]


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let the backward pass compute each layer again instead of keeping its activations."""
    # Later versions of transformers renamed the method, and warn about the old name.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})
    for module in model.modules():  # transformers computes a layer again only in training mode
        module.training = bool(getattr(module, "gradient_checkpointing", False))


def compile_layers(model: nn.Module) -> None:
    """Apply torch.compile to each layer's `mlp`, for any number of tokens; EngineError if none exists."""
    parts = [layer.mlp for layer in layers_of(model) if isinstance(getattr(layer, "mlp", None), nn.Module)]
    if not parts:
        raise EngineError(
            f"training.compile: {type(model).__name__} has no layers with a module 'mlp'; set it to false"
        )
    for part in parts:
        cast("nn.Module", part).compile(dynamic=True)
