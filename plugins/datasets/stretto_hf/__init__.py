"""Dataset `hf`: rows of the `datasets` library, from the hub, a local folder, or data files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

from stretto import Component, Context, hookimpl
from stretto.component import PositiveInt
from stretto.dataset import Row
from stretto.errors import ConfigError
from stretto.models.prompts import ColumnsConfig

__all__ = ["HFConfig", "HFDataset"]


class HFConfig(ColumnsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the dataset `hf`."""

    path: str
    """A dataset of the hub (`openai/gsm8k`), a folder that `save_to_disk` wrote, or a folder of data
    files."""
    name: str | None = None
    """Configuration name, for datasets that have several (`main`)."""
    split: str = "train"
    """Split, or a part of one in the library's notation: `train[:90%]`."""
    revision: str | None = None
    """Commit or tag of the hub's repository. Set it so that the rows never change."""
    streaming: bool = False
    """Read the first `limit` rows over the network, without downloading the whole dataset."""
    limit: PositiveInt | None = None
    """Number of rows to use, from the first on; null for all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming and self.limit is None:
            raise ValueError("streaming needs limit, the number of rows to read")


class HFDataset:
    """Rows of one split. The library memory-maps the rows, but streamed rows are in memory."""

    def __init__(self, config: HFConfig, context: Context) -> None:
        del context
        self._config = config
        split = _load_split(config)
        if config.streaming:
            # Keep images as the bytes of their files: pixels would need many times more memory.
            self._rows: Any = list(islice(cast("Iterable[Row]", split.decode(False)), config.limit))
        else:
            rows = split.select(range(min(config.limit, len(split)))) if config.limit else split
            self._rows = _Undecoded(rows) if _has_images(rows.features) else rows
        if len(self._rows):
            self[0]  # all rows have the same columns, so this raises now if the prompt needs a missing one
        self.fingerprint = _digest(self._rows)
        """SHA-256 of the rows, in order."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        try:
            return self._config.with_prompt(dict(self._rows[index]))
        except ConfigError as error:
            raise ConfigError(f"row {index} of {self._config.path!r}: {error}") from error


class _Undecoded:
    """Rows of a table with the bytes or paths of image files instead of decoded pixels."""

    def __init__(self, table: Any) -> None:
        self._table = table.with_format("arrow")

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Row:
        return self._table[index : index + 1].to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


def _has_images(feature: Any) -> bool:
    import datasets

    if isinstance(feature, Mapping):
        return any(_has_images(item) for item in cast("Mapping[str, Any]", feature).values())
    if isinstance(feature, list):
        return any(_has_images(item) for item in cast("list[Any]", feature))
    return isinstance(feature, datasets.Image) or _has_images(getattr(feature, "feature", []))


def _load_split(config: HFConfig) -> Any:
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    datasets.disable_progress_bars()  # logs are files
    folder = Path(config.path)
    try:
        if (folder / "dataset_info.json").exists():
            return datasets.load_from_disk(config.path)
        if (folder / "dataset_dict.json").exists():
            splits = cast("Mapping[str, Any]", datasets.load_from_disk(config.path))
            if config.split not in splits:
                raise ConfigError(
                    f"{config.path!r} has no split {config.split!r}; it has {', '.join(splits)}"
                )
            return splits[config.split]
        return datasets.load_dataset(
            config.path,
            config.name,
            split=config.split,
            revision=config.revision,
            streaming=config.streaming,
        )
    except (DatasetNotFoundError, ValueError, OSError) as error:
        raise ConfigError(f"cannot load the dataset {config.path!r}: {error}") from error


def _digest(rows: Iterable[Any]) -> str:
    """Hash the values of all rows. The hash is the same on every machine, whatever the library caches."""
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(repr(sorted((name, _digestible(value)) for name, value in row.items())).encode())
    return hasher.hexdigest()


def _digestible(value: Any) -> Any:
    """Return a value in which each image file is replaced by its digest, at any depth of lists."""
    if isinstance(value, list):
        return [_digestible(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        image = cast("dict[str, Any]", value)
        return hashlib.sha256(image["bytes"] or Path(image["path"]).read_bytes()).hexdigest()
    return value


@hookimpl
def stretto_dataset() -> Iterator[Component[HFConfig]]:
    yield Component(
        "hf",
        HFDataset,
        HFConfig,
        "the `datasets` library: the hub, a local folder, parquet, csv or json; also streamed",
        requires={"datasets": "stretto[hf]"},
    )
