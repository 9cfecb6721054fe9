"""Adapters in peft's format that a run continues. Importing it imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stretto.component import Problem

if TYPE_CHECKING:
    from stretto.training.config import LoraConfig

__all__ = ["adapter_problems", "base_of", "is_of_model"]

_OTHER_ADAPTERS = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_rslora",
)
"""Keys of peft whose adapters compute something else than W + alpha / rank · B A."""
_NEW_BASES = ("corda", "loftq", "olora", "pissa")
"""Values of `init_lora_weights`, or their beginnings, that change the weights of the model too."""


def base_of(folder: Path) -> str | None:
    """The model that an adapter says it belongs to; None if the folder has no adapter."""
    return _read(folder).get("base_model_name_or_path")


def is_of_model(folder: Path, model: str) -> bool:
    """Whether an adapter belongs to a model: the same folder or hub id, or one of the same name elsewhere."""
    base = base_of(folder)
    return base is not None and Path(base).resolve().name == Path(model).resolve().name


def adapter_problems(lora: LoraConfig, model: str | None) -> Iterator[Problem]:
    """Refuse an adapter that the run cannot continue."""
    if lora.adapter is None:
        return
    folder, key = Path(lora.adapter), "training.lora.adapter"
    own = _read(folder)
    if not own or not (folder / "adapter_model.safetensors").is_file():
        yield Problem(
            key,
            f"{lora.adapter!r} is no adapter in peft's format: expected a folder with adapter_config.json "
            "and adapter_model.safetensors",
        )
        return
    if model is not None and not is_of_model(folder, model):
        yield Problem(
            key,
            f"{lora.adapter!r} is an adapter of {base_of(folder)!r}, but `model` is {model!r}; write the "
            "model that it was trained on",
        )
    kind = {name: own[name] for name in _OTHER_ADAPTERS if own.get(name)}
    kind |= {
        name: own[name]
        for name, usual in (("bias", "none"), ("peft_type", "LORA"))
        if own.get(name, usual) != usual
    }
    if str(own.get("init_lora_weights")).startswith(_NEW_BASES):
        kind["init_lora_weights"] = own["init_lora_weights"]
    if kind:
        yield Problem(
            key, f"{lora.adapter!r} has {kind}, which stretto does not train; merge it into its model"
        )
    targets = own.get("target_modules") or []
    has = (own.get("r"), own.get("lora_alpha"), {targets} if isinstance(targets, str) else {*targets})
    if has != (lora.rank, lora.alpha, {*lora.targets}):
        yield Problem(
            "training.lora",
            f"differs from the adapter that it continues: write rank: {has[0]}, alpha: {has[1]}, targets: "
            f"[{', '.join(sorted(has[2]))}]",
        )


def _read(folder: Path) -> dict[str, Any]:
    """The config of an adapter; empty if there is none that can be read."""
    try:
        return msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}
