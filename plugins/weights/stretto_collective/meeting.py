"""(torch) How two processes form a group: they meet in a store at the sender's, and then speak gloo."""

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

__all__ = ["AskOutline", "HashStore", "Put", "Question", "Send", "Store", "Take", "buckets", "joined"]


class AskOutline(msgspec.Struct, frozen=True, array_like=True, tag="outline"):
    """What does a version consist of? Answered by a `stretto.models.version_files.Outline`."""

    version: int


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Keep a value in the store of a transfer. Answered by nothing."""

    transfer: str
    key: str
    value: bytes


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """A value of the store of a transfer. Answered by it, once it is there."""

    transfer: str
    key: str


class Send(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Meet the asker, and send it the files of a version. Answered by nothing, when all are sent."""

    transfer: str
    version: int


Question = AskOutline | Put | Take | Send


def joined(store: Store, rank: int, interface: str, deadline_s: float) -> Any:
    """This end of a group of two: 0 sends, 1 receives. Both listen on one interface only.

    Raises:
        RuntimeError: if the other end does not come, or there is no such interface.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=interface)]
    options._timeout = timedelta(seconds=deadline_s)
    return gloo(store, rank, 2, options)


def buckets(files: Iterable[tuple[Path, int]], limit: int, *, write: bool) -> Iterator[Tensor]:
    """The bytes of files, each with its size, in tensors of at most `limit` bytes; mapped, and so written to
    the files where `write` is true."""
    for path, size in files:
        yield from torch.from_file(str(path), shared=write, size=size, dtype=torch.uint8).split(limit)
