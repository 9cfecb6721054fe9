"""The device on which a process computes, and torch's settings for it."""

import os
from typing import Literal

import torch

from stretto.errors import EngineError
from stretto.launcher import Resources
from stretto.machine.gpus import listed_gpus

__all__ = ["compute_device", "is_gpu"]


def is_gpu(device: torch.device) -> bool:
    """Whether this is a GPU of any kind. Its work runs beside the host's, until the host reads a result."""
    return device.type not in ("cpu", "meta")


def compute_device(device: Literal["auto", "cpu", "cuda"], resources: Resources) -> torch.device:
    """Return the device; limit a GPU's memory to the share. Raise EngineError for a section that asks for a
    GPU, by `gpus` or by 'cuda', where torch sees none: a processor would be a hundred times slower."""
    if device == "cpu" or (device == "auto" and not resources.gpus and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        raise EngineError(
            f"gpus is {resources.gpus} and device is {device!r}, but torch sees no GPU in this process: "
            f"torch {torch.__version__} is built for {f'CUDA or ROCm {built}' if built else 'processors'}, "
            f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}, and this machine lists "
            f"{[gpu.model or gpu.name for gpu in listed_gpus()]}; set `gpus: 1` and install a torch for this "
            "machine's driver, or set `gpus: 0` and `device: cpu`"
        )
    if getattr(resources, "dtype", None) == "bfloat16" and not torch.cuda.is_bf16_supported(False):
        raise EngineError(
            f"dtype is 'bfloat16', in which {torch.cuda.get_device_name()} does not compute; set "
            "`dtype: float32` for trainer and engine"
        )
    torch.cuda.set_per_process_memory_fraction(resources.share)
    # cuDNN builds a plan for every new shape, which takes up to a second; here most shapes are new.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda")
