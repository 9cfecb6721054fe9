"""Adapters in peft's format that a run continues. Importing it imports no torch."""

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
"""Keys of peft whose adapters compute something else than W + alpha / rank · B A."""
_NEW_BASES = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Values of `init_lora_weights`, or their beginnings, that change the weights of the model too."""
_OF_MANY = ("", "model", "unknown")
"""Last parts of names that tell no model: checkpoints of a run have theirs in a folder `model`."""
_SNAPSHOT = re.compile(r".*/models--(.+?)--(.+?)/snapshots/[^/]+/?")
"""Folder of a model in the hub's cache."""


def base_of(folder: Path) -> str | None:
    """The model that an adapter says it belongs to; None if the folder has no adapter."""
    return _read(folder).get("base_model_name_or_path")


def _is_of(base: str, model: str) -> bool | None:
    """Whether `base` is `model`: the same folder or id, or of that name; None if its name does not tell."""
    one, other = (_SNAPSHOT.sub(r"\1/\2", each) for each in map(_place, (base, model)))
    if one == other:
        return True
    return None if Path(one).name in _OF_MANY else Path(one).name == Path(other).name


def _place(name: str) -> str:
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def adapter_problems(lora: LoraConfig, model: str, path: str) -> Iterator[Problem]:
    """Refuse an adapter that the run cannot continue on this model. `path`: dotted key of the section."""
    if lora.adapter is None:
        return
    folder, key = Path(lora.adapter), f"{path}.adapter"
    own = _read(folder)
    if not own or not next(folder.glob("adapter_model*.safetensors"), None):
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
            path,
            f"differs from the adapter that it continues: write rank: {has[0]}, alpha: {has[1]}, targets: "
            f"[{', '.join(sorted(has[2]))}]",
        )


def _read(folder: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}
