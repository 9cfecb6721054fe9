"""(torch) Form a group of two processes: they meet through a store in the sender, and then use gloo."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage] - documented there

from stretto.models.version_files import AskOutline

__all__ = ["AskOutline", "HashStore", "Put", "Question", "Send", "Store", "Take", "buckets", "form_group"]


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Put a value into the store of a transfer. The answer is empty."""

    transfer: str
    key: str
    value: bytes


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """Ask for a value of the store of a transfer. The answer is the value, as soon as it exists."""

    transfer: str
    key: str


class Send(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Ask the publisher to meet and to send the files of a version. The answer is empty, and comes when all
    files have been sent."""

    transfer: str
    version: int


Question = AskOutline | Put | Take | Send


def form_group(store: Store, rank: int, interface: str, deadline_s: float) -> Any:
    """Form a group of two, and return this end of it: rank 0 sends, rank 1 receives. Both listen on one
    interface only.

    Raises:
        RuntimeError: if the other end does not come in time, or the interface does not exist.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=interface)]
    options._timeout = timedelta(seconds=deadline_s)
    return gloo(store, rank, 2, options)


def buckets(files: Iterable[tuple[Path, int]], limit: int, *, write: bool) -> Iterator[Tensor]:
    """Yield the bytes of files, given with their sizes, as tensors of at most `limit` bytes. The tensors are
    memory-mapped, so with `write` changes are written to the files."""
    for path, size in files:
        yield from torch.from_file(str(path), shared=write, size=size, dtype=torch.uint8).split(limit)
