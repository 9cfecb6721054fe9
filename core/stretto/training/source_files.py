"""Check the files with which training begins: adapters in peft's format, and the tensors of models, which a
child process compares with the classes that trainers load. Importing this module imports no torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stretto.component import Head, Problem
from stretto.errors import EngineError
from stretto.machine.child_process import last_line, run_child
from stretto.models.files import fingerprint_of, tensors_of_model

if TYPE_CHECKING:
    from stretto.training.config import LoraConfig

__all__ = ["adapter_problems", "base_of", "tensor_problems"]

_TRY_S = 60.0
_OTHER_KEYS = re.compile(
    "auto_mapping|base_model_name_or_path|fan_in_fan_out|inference_mode|layers_pattern|lora_alpha|lora_dropout"
    "|megatron_core|peft_version|qalora_group_size|r|revision|runtime_config|target_modules"
    "|(corda|eva|loftq|lora_ga)_config"
)
"""Keys of adapter_config.json that are compared with the run, or that do not change what is computed. All
others are empty in an adapter that computes W + alpha / rank · B A, or have one of these values:"""
_USUAL = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # others also change the model's weights
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
}
_OF_MANY = ("", "model", "unknown")
"""Last parts of paths that do not identify a model: every checkpoint of a run has a folder `model`."""
_SNAPSHOT = re.compile(r".*/models--(.+?)--(.+?)/snapshots/[^/]+/?")
"""Folder of a model in the hub's cache."""


def base_of(folder: Path) -> str | None:
    """Return the base model that the adapter's config names; None if the folder has no adapter."""
    return _read(folder).get("base_model_name_or_path")


def _is_of(base: str, model: str) -> bool | None:
    """Whether `base` and `model` have the same path, id or tensors, or `base` is the last part of `model`, as
    in exports; None if both have only the last part in common, or `base` names no model."""
    base_place, model_place = (_SNAPSHOT.sub(r"\1/\2", place) for place in map(_place, (base, model)))
    if base_place == model_place:
        return True
    if (tensors := fingerprint_of(base)) and (others := fingerprint_of(model)):
        return tensors == others
    name = Path(base_place).name
    if name not in (*_OF_MANY, Path(model_place).name):
        return False
    return True if base == name and name not in _OF_MANY else None


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
    if str(saved.get("exclude_modules")).endswith(r"\..*"):
        del saved["exclude_modules"]  # a vision tower that is frozen
    unsupported = {
        name: value
        for name, value in saved.items()
        if value and not _OTHER_KEYS.fullmatch(name) and value not in _USUAL.get(name, ())
    }
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


def tensor_problems(models: Sequence[tuple[str, str, Head]]) -> Iterator[Problem]:
    """Yield what is wrong with models whose files are here: key of the run file, source and head of each."""
    here = [model for model in models if tensors_of_model(model[1])]
    if not here:
        return
    try:
        child = run_child([sys.executable, "-m", __name__], msgspec.json.encode(here), _TRY_S)
        fault = last_line(child.stderr) if child.returncode else ""
    except TimeoutError:
        child, fault = None, f"it took longer than {_TRY_S:.0f} s"
    if child is None or fault:
        yield Problem("model", f"its tensors are not compared with its class: {fault}", "warning")
        return
    yield from (Problem(**each) for each in msgspec.json.decode(child.stdout))


def _problems_of(path: str, source: str, head: Head) -> Iterator[Problem]:
    from structlog.testing import capture_logs

    from stretto.training.model import load_empty

    with capture_logs() as lines:
        try:
            load_empty(source, head)
        except (EngineError, OSError, ValueError) as error:
            yield Problem(path, str(error))
    yield from (Problem(path, f"{source!r}: {line['event']}: {line['tensors']}", "warning") for line in lines)


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        _asked = msgspec.json.decode(sys.stdin.buffer.read(), type=list[tuple[str, str, Head]])
        _found = [each for model in _asked for each in _problems_of(*model)]
    sys.stdout.buffer.write(msgspec.json.encode(_found))
