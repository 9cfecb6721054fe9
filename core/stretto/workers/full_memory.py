"""The text for an error of full memory: what the process used, and which keys free most memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psutil

from stretto.assembly.placement import group_of_worker
from stretto.user_code.faults import with_causes

if TYPE_CHECKING:
    from stretto.assembly.assembly import Assembly

_OF_PROCESSORS = "DefaultCPUAllocator: can't allocate memory"
"""Part of the text of the RuntimeError that PyTorch raises for host memory."""


def out_of_memory(error: BaseException, worker: str, assembly: Assembly) -> str:
    """Return advice on an error of full memory; empty for another error."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ""
    causes = [*with_causes(error)]
    if any(isinstance(cause, torch.OutOfMemoryError) for cause in causes):
        text = "its GPU was full"
        if torch.cuda.is_available():
            (free, total), used = torch.cuda.mem_get_info(), torch.cuda.memory_allocated()
            text += f": {_gib(used)} of tensors in this process, {_gib(total - free)} of {_gib(total)} in use"
    elif any(_OF_PROCESSORS in str(cause) for cause in causes):
        used = psutil.Process().memory_info().rss
        text = f"this machine's memory was full: {_gib(used)} in this process"
    else:
        return ""
    keys = ", ".join(_keys(worker, assembly))
    return f"; {text}" + (f"; these keys free most: {keys}" if keys else "")


def _keys(worker: str, assembly: Assembly) -> Iterator[str]:
    """Yield keys of the run file with their values, first the key that frees the most memory."""
    if worker.startswith("trainer-"):
        group = assembly.placement.groups[group_of_worker(worker)[0]]
        tokens = getattr(group.section, "micro_batch_tokens", None)
        if getattr(group.section, "lora", True) is None:
            yield f"{group.path}.lora={{}} (no gradients and optimizer for the model itself)"
        if getattr(group.section, "gradient_checkpointing", True) is False:
            yield f"{group.path}.gradient_checkpointing=true"
        yield f"{group.path}.micro_batch_tokens (now {tokens})"
    elif not worker.startswith(("rollout-", "verifier-")):
        section = assembly.config.inference
        for key in ("slots", "context_length", "cache_gb", "share"):
            if hasattr(section, key):
                yield f"inference.{key} (now {getattr(section, key)})"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
