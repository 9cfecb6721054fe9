"""A disk without room: `from full_disk import no_file_larger_than`."""

import resource
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_file_larger_than(size: int) -> Generator[None]:
    """A write beyond this size ends there, and the next one fails, as on a full disk."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
