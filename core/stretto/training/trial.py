"""(torch) Try what may be impossible for a model, and say why it is."""

from collections.abc import Callable
from typing import TypeVar

import torch

from stretto.errors import StrettoError

__all__ = ["Unsuitable", "attempt"]

T = TypeVar("T")


class Unsuitable(Exception):
    """What was tried does not compute what the plain way computes."""


def attempt(trial: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of a trial and an empty text, or None and the reason why it failed. Full memory is no
    reason to go another way, which needs more of it, and neither is an error of stretto: both are raised."""
    try:
        return trial(), ""
    except (StrettoError, MemoryError, torch.OutOfMemoryError):
        raise
    except Unsuitable as reason:
        return None, str(reason)
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
        first_line = str(error).strip().partition("\n")[0]
        return None, f"{type(error).__name__}: {first_line}"
