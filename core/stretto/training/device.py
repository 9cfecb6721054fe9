"""The device on which a process computes, and torch's settings for it."""

from typing import Literal

import torch

from stretto.errors import EngineError

__all__ = ["compute_device"]


def compute_device(device: Literal["auto", "cpu", "cuda"], share: float) -> torch.device:
    """Return the device; limit a GPU's memory to `share`. Raise EngineError for 'cuda' without a GPU."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EngineError(
            "device is 'cuda', but torch sees no GPU in this process; set `gpus: 1` in the "
            "same section, or `device: cpu`"
        )
    torch.cuda.set_per_process_memory_fraction(share)
    # cuDNN builds a plan for every new shape, which takes up to a second; here most shapes are new.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda")
