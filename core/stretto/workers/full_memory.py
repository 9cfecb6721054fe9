"""The text for an error of full memory: what the process held, what was counted before, what frees most."""

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import psutil

from stretto.assembly.assembly import Assembly
from stretto.assembly.memory_changes import changes
from stretto.user_code.faults import with_causes

_OF_PROCESSORS = "DefaultCPUAllocator: can't allocate memory"
"""Part of the text of the RuntimeError that PyTorch raises for host memory."""


def out_of_memory(error: BaseException, worker: str, assembly: Assembly) -> str:
    """Return advice on an error of full memory; empty for another error."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ""
    causes = [*with_causes(error)]
    if any(isinstance(cause, torch.OutOfMemoryError) for cause in causes):
        text, held, device = "its GPU was full", 0, "cuda"
        if torch.cuda.is_available():
            (free, total), held = torch.cuda.mem_get_info(), torch.cuda.max_memory_allocated()
            text += f", {_gib(total - free)} of {_gib(total)} in use by all processes"
    elif any(_OF_PROCESSORS in str(cause) for cause in causes):
        text, held, device = "this machine's memory was full", psutil.Process().memory_info().rss, "cpu"
    else:
        return ""
    return f"; {text}" + "".join(f"; {part}" for part in _parts(held, device, worker, assembly) if part)


def _parts(held: int, device: str, worker: str, assembly: Assembly) -> Iterator[str]:
    """Yield what the process held, what `stretto check` counts, and the keys that free most."""
    need = assembly.need_of(worker)
    if held:
        tensors = _tensors(device) if worker.startswith("trainer-") else {}
        rest = {"other": held - sum(tensors.values())} if tensors else {}
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in {**tensors, **rest}.items())
        yield f"this process held {_gib(held)}" + (f" ({listed})" if listed else "")
    if need is not None:
        yield str(need)
        yield ", ".join(map(str, changes(assembly, need.section)))


def _tensors(device: str) -> Mapping[str, int]:
    """Return the bytes of this process's parameters, gradients and optimizer states on a type of device."""
    import torch

    objects = gc.get_objects()
    # By type: asking some objects for their `__class__` warns or runs code.
    parameters = [each for each in objects if issubclass(type(each), torch.nn.Parameter)]
    states = [
        value
        for optimizer in objects
        if issubclass(type(optimizer), torch.optim.Optimizer)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    gradients = [each.grad for each in parameters if each.grad is not None]
    return {
        "weights": _bytes(parameters, device),
        "gradients": _bytes(gradients, device),
        "optimizer": _bytes(states, device),
    }


def _bytes(tensors: Iterable[Any], device: str) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type == device)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
