"""Changes of a run file that free memory."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import Composed
from stretto.assembly.run_memory import SMALLEST_PASS, Need, longest_sample

__all__ = ["Change", "changes", "fitting"]

_FEWEST_SLOTS = 8
_WORTH = 0.01
"""Share of the memory of all engines that a change must free to be named."""


class Change(NamedTuple):
    """Another value of a key, which frees memory."""

    path: str
    value: Any
    freed: int
    """Bytes."""

    @property
    def override(self) -> str:
        """The change as an argument of `stretto run`."""
        value = "{}" if isinstance(self.value, msgspec.Struct) else str(self.value).lower()
        return f"{self.path}={value}"

    def __str__(self) -> str:
        return f"{self.override} frees {self.freed / 2**30:.2g} GiB"


def changes(assembly: Assembly, section: str) -> list[Change]:
    """Return changes of a section that free memory, the largest first. No change has an effect on what is
    learned, except `lora`, `dtype` by rounding, and `sleep` by the versions that sample."""
    before, size = _excess(assembly), sum(need.number * need.size for need in assembly.needs)
    result: list[Change] = []
    for path, value in _candidates(assembly, section):
        after = _excess(_changed(assembly, assembly.composed.with_value(path, value)))
        if (freed := before - after) > _WORTH * size:
            result.append(Change(path, value, freed))
    return sorted(result, key=lambda change: -change.freed)


def fitting(
    assembly: Assembly, found: Sequence[Change], fits: Callable[[Sequence[Need]], bool]
) -> list[Change]:
    """Return as few of these changes as make the run fit, first of those that do not change what is learned;
    empty if all together do not."""
    harmless = [change for change in found if not change.path.endswith((".lora", ".dtype", ".sleep"))]
    for candidates in (harmless, found):
        composed = [assembly.composed]
        for change in candidates:
            composed.append(composed[-1].with_value(change.path, change.value))
        if not fits(_changed(assembly, composed[-1]).needs):  # count no part of changes that do not suffice
            continue
        numbers = (n for n, each in enumerate(composed) if n and fits(_changed(assembly, each).needs))
        return [*candidates[: next(numbers)]]
    return []


def _changed(assembly: Assembly, composed: Composed) -> Assembly:
    changed = Assembly(composed, folder=assembly.folder, gpu_bytes=assembly.gpu_bytes)
    changed.longest_row = assembly.longest_row
    return changed


def _excess(assembly: Assembly) -> int:
    """Return the bytes of all processes, less those of GPUs that they may use, where these are known."""
    total = 0
    for need in assembly.needs:
        known = need.on_gpu and need.limit < math.inf
        total += need.number * (need.size - (int(need.limit) if known else 0))
    return total


def _candidates(assembly: Assembly, path: str) -> Iterator[tuple[str, Any]]:
    section = assembly.composed.section(path)
    if path == "inference":
        if (slots := getattr(section, "slots", None)) is None or slots > _FEWEST_SLOTS:
            yield "inference.slots", max(_FEWEST_SLOTS, (slots or 64) // 4)
        if cache_gb := getattr(section, "cache_gb", None):
            yield "inference.cache_gb", cache_gb / 4
        if assembly.has_evaluator:
            yield "evaluation.own_engine", False
    elif getattr(section, "lora", True) is None:
        values = {**msgspec.to_builtins(section), "lora": {}}
        with suppress(msgspec.ValidationError):  # an engine may refuse adapters beside other keys
            yield f"{path}.lora", msgspec.convert(values, type(section)).lora
    if section.gpus and getattr(section, "may_be_on_host", False) and section.state == "device":
        yield f"{path}.state", "host"
    engine = assembly.config.inference
    shares_gpus = path != "inference" and section.gpus and engine.gpus and assembly.graph.samples
    if shares_gpus and engine.may_sleep and not engine.sleeps:
        yield "inference.sleep", True
    if getattr(section, "gradient_checkpointing", True) is False:
        yield f"{path}.gradient_checkpointing", True
    tokens = max(SMALLEST_PASS, longest_sample(assembly.config, sampled=assembly.graph.samples))
    if getattr(section, "micro_batch_tokens", 0) > tokens:
        yield f"{path}.micro_batch_tokens", tokens
    if getattr(section, "dtype", "") == "float32":
        yield f"{path}.dtype", "bfloat16"
