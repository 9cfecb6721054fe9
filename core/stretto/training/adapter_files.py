"""Check adapters in peft's format that a run continues to train. Importing this module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stretto.component import Problem

if TYPE_CHECKING:
    from stretto.training.config import LoraConfig

__all__ = ["adapter_problems", "base_of"]

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
"""Keys of adapter_config.json. An adapter that sets one of them does not compute W + alpha / rank · B A."""
_NEW_BASES = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""First parts of those values of `init_lora_weights` that also change the weights of the model."""
_OF_MANY = ("", "model", "unknown")
"""Last parts of paths that do not identify a model: every checkpoint of a run has a folder `model`."""
_SNAPSHOT = re.compile(r".*/models--(.+?)--(.+?)/snapshots/[^/]+/?")
"""Folder of a model in the hub's cache."""


def base_of(folder: Path) -> str | None:
    """Return the base model that the adapter's config names; None if the folder has no adapter."""
    return _read(folder).get("base_model_name_or_path")


def _is_of(base: str, model: str) -> bool | None:
    """Whether `base` and `model` have the same path, id or last part; None if `base` names no model."""
    base_place, model_place = (_SNAPSHOT.sub(r"\1/\2", place) for place in map(_place, (base, model)))
    if base_place == model_place:
        return True
    return None if Path(base_place).name in _OF_MANY else Path(base_place).name == Path(model_place).name


def _place(name: str) -> str:
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def adapter_problems(lora: LoraConfig, model: str, path: str) -> Iterator[Problem]:
    """Yield why the run cannot continue the adapter on this model. `path`: dotted key of the section."""
    if lora.adapter is None:
        return
    folder, key = Path(lora.adapter), f"{path}.adapter"
    saved = _read(folder)
    if not saved or not next(folder.glob("adapter_model*.safetensors"), None):
        yield Problem(
            key,
            f"{lora.adapter!r} is no adapter in peft's format: expected a folder with adapter_config.json "
            "and adapter_model.safetensors",
        )
        return
    fits = _is_of(base_of(folder) or "", model)
    if not fits:
        yield Problem(
            key,
            f"{lora.adapter!r} is an adapter of {base_of(folder)!r}, and the model is {model!r}; it has to "
            "be the model that the adapter was trained on",
            "warning" if fits is None else "error",
        )
    unsupported = {name: saved[name] for name in _OTHER_ADAPTERS if saved.get(name)}
    unsupported |= {
        name: saved[name]
        for name, usual in (("bias", "none"), ("peft_type", "LORA"))
        if saved.get(name, usual) != usual
    }
    if str(saved.get("init_lora_weights")).startswith(_NEW_BASES):
        unsupported["init_lora_weights"] = saved["init_lora_weights"]
    if unsupported:
        yield Problem(
            key, f"{lora.adapter!r} has {unsupported}, which stretto does not train; merge it into its model"
        )
    targets = saved.get("target_modules") or []
    form = (saved.get("r"), saved.get("lora_alpha"), {targets} if isinstance(targets, str) else {*targets})
    if form != (lora.rank, lora.alpha, {*lora.targets}):
        yield Problem(
            path,
            f"differs from the adapter that it continues: write rank: {form[0]}, alpha: {form[1]}, targets: "
            f"[{', '.join(sorted(form[2]))}]",
        )


def _read(folder: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}
