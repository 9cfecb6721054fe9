"""Dataset `hf`: rows of the `datasets` library, from the hub, a local folder, or data files."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

from stretto import Component, Context, hookimpl
from stretto.component import PositiveInt
from stretto.dataset import Row, first_of
from stretto.errors import ConfigError
from stretto.models.prompts import ColumnsConfig

__all__ = ["HFConfig", "HFDataset"]

_TEXT_READERS = {".csv": "csv", ".json": "json", ".jsonl": "json"}
_READERS = {
    **_TEXT_READERS,
    **{f"{ending}.gz": reader for ending, reader in _TEXT_READERS.items()},
    **{kind: kind.removeprefix(".") for kind in (".parquet", ".arrow")},
}
"""Ending of a file -> the library's reader."""


class HFConfig(ColumnsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the dataset `hf`."""

    path: str
    """A dataset of the hub (`openai/gsm8k`), a folder that `save_to_disk` wrote, a folder of data files, or
    one file: `.parquet`, `.arrow`, `.csv`, `.json`, `.jsonl`, the last three also with `.gz`."""
    name: str | None = None
    """Configuration name, for datasets that have several (`main`)."""
    split: str = "train"
    """Split, or a part of one in the library's notation: `train[:90%]`. A single file is `train`, and so is a
    saved `Dataset` that has no split of its own."""
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
        import datasets

        del context
        self._config = config
        loaded = _load(config)
        if isinstance(loaded, datasets.IterableDataset):
            # Keep images as the bytes of their files: pixels would need many times more memory.
            stream = cast("Iterable[Row]", loaded.decode(False))
            self._rows: Any = list(islice(stream, config.limit))
            parts = [(config.split, range(len(self._rows)))]
        else:
            parts = [*first_of(_parts_of(loaded, config), config.limit)]
            table = datasets.concatenate_datasets([loaded[split].select(rows) for split, rows in parts])
            self._rows = _Undecoded(table) if _has_images(table.features) else table
        self.sources = [(_source_of(config, split), rows) for split, rows in parts]
        """See `stretto.dataset.SourcedDataset`."""
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
            text = f"row {index} of {self._config.path!r}: {error}"
            raise ConfigError(text, path=error.path) from error


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


def _load(config: HFConfig) -> Any:
    """Return all splits by name, or the stream of one."""
    import datasets
    from datasets.exceptions import DatasetGenerationError, DatasetsError

    datasets.disable_progress_bars()  # logs are files
    path = Path(config.path)
    is_saved = any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))
    reader = "" if path.is_dir() else _reader_of(path)
    for key, is_read in {"name": not is_saved and not reader, "revision": not path.exists()}.items():
        if getattr(config, key) is not None and not is_read:
            raise ConfigError(f"{config.path!r} is on this machine and has no {key}; leave it out", path=key)
    options: dict[str, Any] = {"name": config.name, "revision": config.revision}
    if reader:
        options = {"data_files": glob.escape(config.path)}
    if config.streaming:
        options |= {"streaming": True, "split": config.split}
    try:
        if not is_saved:
            return datasets.load_dataset(reader or config.path, **options)
        saved: Any = datasets.load_from_disk(config.path)
        # A `Dataset` that was made as `train[:50%]` is called `train`.
        return (
            saved if isinstance(saved, dict) else {re.split(r"[^\w.]", str(saved.split or "train"))[0]: saved}
        )
    except (DatasetsError, ValueError, OSError) as error:
        # The text of this error does not say what is wrong.
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        raise ConfigError(f"cannot load the dataset {config.path!r}: {reason}", path="path") from error


def _reader_of(path: Path) -> str:
    """Return the library's reader for a file, by its ending; empty if the path is no file's."""
    ending = "".join(path.suffixes[-2 if path.suffix == ".gz" else -1 :]).lower()
    fault = f"ends in {ending!r}; expected one of {', '.join(_READERS)}" if path.is_file() else ""
    if ending in _READERS:
        fault = "does not exist" if not path.is_file() else "" if path.stat().st_size else "is empty"
    if fault:
        raise ConfigError(f"the file {str(path)!r} {fault}", path="path")
    return _READERS.get(ending, "")


def _parts_of(splits: Mapping[str, Any], config: HFConfig) -> list[tuple[str, range]]:
    """Return (split, indices of its rows) for each part that `split` names."""
    import datasets

    sizes = {name: len(table) for name, table in splits.items()}
    spec = "+".join(sizes) if config.split == "all" else config.split
    if spec in sizes:
        return [(spec, range(sizes[spec]))]
    try:
        parts = datasets.ReadInstruction.from_spec(spec).to_absolute(sizes)
    except ValueError as error:
        text = (
            f"{config.path!r} has no split {spec!r}; it has {', '.join(sizes)}, and parts such as train[:90%]"
        )
        raise ConfigError(text, path="split") from error
    return [(part.splitname, range(part.from_, part.to)) for part in parts]


def _source_of(config: HFConfig, split: str) -> str:
    path = Path(config.path)
    place = str(path.resolve()) if path.exists() else config.path
    split = "" if path.is_file() else f"({split})"  # a file has one, also for the dataset `jsonl`
    return " ".join(filter(None, (place, config.name, config.revision, split)))


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
