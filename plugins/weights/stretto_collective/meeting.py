"""(torch) Form a group of two processes: they meet through a store in the sender, and then use gloo or NCCL.

The receiver names its GPU, and the sender chooses the library. NCCL has not been tried on GPUs yet. It works
on GPUs only, so each end copies a bucket through its GPU.
"""

import os
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] - documented there

from stretto.errors import WeightsError
from stretto.models.version_files import AskOutline

BACKEND = "stretto/backend"
"""Key of the library that the sender has chosen, in the store of a transfer."""

_POLL_S = 0.0005
"""Seconds between two checks whether a GPU has sent or received a bucket."""


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Put a value into the store of a transfer. The answer is empty."""

    transfer: str
    key: str
    value: bytes


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """Ask for a value in the store of a transfer. The answer comes as soon as the value exists."""

    transfer: str
    key: str


class Send(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Ask the publisher to meet and to send a version's files. The empty answer follows the last file."""

    transfer: str
    version: int
    gpu: str
    """UUID of the receiver's GPU; empty if the receiver has or uses no GPU."""
    files: tuple[str, ...]
    """Names of the files that the receiver lacks. They are sent in the order of the manifest."""


Question = AskOutline | Put | Take | Send


def gpu_for(backend: str) -> str:
    """Return the UUID of the GPU that this process may use for transfers; empty if there is none."""
    if backend == "gloo":
        return ""
    if torch.cuda.is_available() and dist.is_nccl_available():
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    if backend == "nccl":
        raise WeightsError("weights.backend is `nccl`, but this process has no GPU; use `auto` or `gloo`")
    return ""


def choose_backend(backend: str, gpu: str, other: str) -> str:
    """Return the library for a transfer between two GPUs, given by UUID: `gloo` or `nccl`."""
    usable = bool(gpu and other) and gpu != other  # NCCL refuses two processes on one GPU
    if backend == "nccl" and not usable:
        fault = "they share one GPU" if gpu and other else "one of them has no GPU"
        raise WeightsError(
            f"weights.backend is `nccl`, but trainer and engine cannot use it: {fault}; use `auto` or `gloo`"
        )
    return "nccl" if usable and backend != "gloo" else "gloo"


class Transfer:
    """One end of a group of two during a `with` block, on one interface: rank 0 sends, rank 1 receives.
    Raises RuntimeError if the other end does not join in time, or the interface does not exist."""

    def __init__(self, backend: str, store: Store, rank: int, interface: str, deadline_s: float) -> None:
        self._deadline = timedelta(seconds=deadline_s)
        self._on_gpu = backend == "nccl"
        make_group = _nccl_group if self._on_gpu else _gloo_group
        self._group = make_group(store, rank, interface, self._deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._on_gpu:
            self._group.abort()  # frees memory of the GPU

    def send(self, bucket: Tensor) -> None:
        """Send a bucket. Raise RuntimeError if sending fails, or takes longer than the deadline."""
        on_device = bucket.cuda() if self._on_gpu else bucket
        self._wait(self._group.send([on_device], 1, 0))

    def receive(self, bucket: Tensor) -> None:
        """Fill a bucket, or raise as `send` does."""
        on_device = torch.empty_like(bucket, device="cuda") if self._on_gpu else bucket
        self._wait(self._group.recv([on_device], 0, 0))
        if self._on_gpu:
            bucket.copy_(on_device)

    def _wait(self, work: Any) -> None:
        if not self._on_gpu:
            work.wait(self._deadline)
            return
        # NCCL's own deadline would end the process, and with it the training. So poll instead.
        end = time.monotonic() + self._deadline.total_seconds()
        while not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError(f"NCCL has not finished within {self._deadline.total_seconds():g} s")
            time.sleep(_POLL_S)
        work.wait()


def _gloo_group(store: Store, rank: int, interface: str, deadline: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=interface)]
    options._timeout = deadline
    return gloo(store, rank, 2, options)


def _nccl_group(store: Store, rank: int, interface: str, deadline: timedelta) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)  # read once in a process
    nccl: Any = dist.ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue] - not in builds without CUDA
    options = nccl.Options()
    options._timeout = 10 * deadline  # `Transfer` raises an error earlier
    return nccl(store, rank, 2, options)


def buckets(files: Iterable[tuple[Path, int]], limit: int, *, write: bool) -> Iterator[Tensor]:
    """Yield the bytes of files, given with their sizes, as memory-mapped tensors of at most `limit` bytes.
    `write`: changes are written to the files."""
    for path, size in files:
        yield from torch.from_file(str(path), shared=write, size=size, dtype=torch.uint8).split(limit)
