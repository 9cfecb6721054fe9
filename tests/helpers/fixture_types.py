"""The types of fixtures of `conftest.py`, for the signatures of tests."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from stretto.bus.client import Bus

OpenBus = Callable[[str], AbstractAsyncContextManager[Bus]]
Start = Callable[..., Any]
Models = Callable[[str], Path]
