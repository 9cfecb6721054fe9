"""The contract of datasets: rows by index. The kernel keeps order, epochs and the cursor.

A row is a dict. `prompt` is text, or chat messages (`[{"role": ..., "content": ...}]`); stretto applies the
tokenizer's chat template to messages once. `id` is optional. The reward receives every other column by name.
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
    """Maximum length of a prompt, in tokens. The run leaves out rows with longer prompts when their turn
    comes, and counts them as `filtered`. It stops if it leaves out all rows."""
    shuffle: bool = True
    """Visit the rows of every epoch in a random order, drawn with the run's seed."""


class Dataset(Protocol):
    """Must give the same rows in every process, each time it is made. The kernel and the rollout workers make
    it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Return the row at `index`, 0 <= index < len.

        Raises:
            ConfigError: if the row cannot be read; the message names the place in the file.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """A text that changes whenever a row changes. Workers compare their own with the kernel's."""
        ...
