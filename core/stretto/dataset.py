"""The contract of datasets: rows by index. Order, epochs and the cursor are the kernel's business.

A row is a dict. `prompt` is text, or chat messages (`[{"role": ..., "content": ...}]`) to which the
tokenizer's template is applied once; `id` is optional; every other column reaches the reward by name.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from stretto.component import PositiveInt

__all__ = ["Dataset", "DatasetConfig", "Row"]

Row = dict[str, Any]


class DatasetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every dataset's section."""

    use: str
    """Name of the dataset."""
    max_prompt_tokens: PositiveInt | None = None
    """Rows with longer prompts are left out when their turn comes, and counted as `filtered`. A run stops if
    all rows are left out."""
    shuffle: bool = True
    """Visit the rows of every epoch in an order drawn from the run's seed."""


class Dataset(Protocol):
    """The same rows at every opening, in every process. Opened by the kernel and by rollout workers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """The row at `index`, 0 <= index < len.

        Raises:
            ConfigError: if the row cannot be read, naming the place.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever a row does; workers compare theirs with the kernel's."""
        ...
