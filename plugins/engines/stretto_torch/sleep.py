"""Gives the memory of a decoder's weights and cache back to the system, and takes it again.

The tensors keep their storages, so views of them stay valid. On a CPU their pages are dropped, and come back
as zeros when they are used: the storages of a loaded model may not be resized.
"""

import ctypes
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True)


class DeviceMemory:
    """The memory of some tensors. `free` and `restore` may be repeated."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._sizes = {storage.data_ptr(): (storage, storage.nbytes()) for storage in storages}

    def free(self) -> None:
        """Free the memory. What the tensors held is lost."""
        for address, (storage, size) in self._sizes.items():
            if storage.device.type == "cpu":
                _drop_pages(address, size)
            else:
                storage.resize_(0)
        torch.cuda.empty_cache()
        if trim := getattr(_LIBC, "malloc_trim", None):  # glibc keeps what was freed before
            trim(0)

    def restore(self) -> None:
        """Take the memory again. The tensors have zeros, or values that they had."""
        for storage, size in self._sizes.values():
            if storage.nbytes() < size:
                storage.resize_(size).fill_(0)


def _drop_pages(address: int, size: int) -> None:
    """Drop the pages that lie within a block of memory."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0 and _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "the memory of the weights cannot be freed")
