"""Dataset `hf`: rows of the `datasets` library, from the hub, a local folder, or data files."""

import codecs
import csv
import glob
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, cast

from stretto import Component, Context, hookimpl
from stretto.chat.prompts import ColumnsConfig
from stretto.component import PositiveInt
from stretto.dataset import Row, first_of, object_of
from stretto.errors import ConfigError
from stretto.models.images import with_places

__all__ = ["HFConfig", "HFDataset"]

_TEXT_READERS = {".csv": "csv", ".json": "json", ".jsonl": "json"}
_READERS = {
    **_TEXT_READERS,
    **{f"{ending}.gz": reader for ending, reader in _TEXT_READERS.items()},
    **{kind: kind.removeprefix(".") for kind in (".parquet", ".arrow")},
}
"""Ending of a file -> the library's reader."""
_STRICT_LINES = 1000
"""Lines of a JSON file in which keys are counted at each start: all of them can be millions."""
_CONVERT: dict[str, Callable[[str], float]] = {
    "int64": int,
    "float64": float,
    "bool": {"True": True, "False": False}.__getitem__,
}


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
        self._folder = Path(config.path) if Path(config.path).is_dir() else Path(config.path).parent
        loaded = _load(config)
        if isinstance(loaded, datasets.IterableDataset):
            # Keep images as the bytes of their files: pixels would need many times more memory.
            stream = cast("Iterable[Row]", loaded.decode(False))
            self._rows: Any = [*islice(stream, config.limit)]
            if loaded.info.builder_name == "csv":
                self._rows = [*_with_numbers({"": datasets.Dataset.from_list(self._rows)})[""]]
            parts = [(config.split, range(len(self._rows)))]
        else:
            parts = [*first_of(_parts_of(loaded, config), config.limit)]
            table = datasets.concatenate_datasets([loaded[split].select(rows) for split, rows in parts])
            for name, feature in table.features.items():
                if getattr(feature, "dtype", "") == "float32":
                    # As written: the float32 for 0.1 is 0.100000001 as a float of Python.
                    for dtype in ("string", "float64"):
                        table = table.cast_column(name, datasets.Value(dtype))
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
            row = self._config.with_prompt(dict(self._rows[index]))
            return with_places(row, self._folder) if self._folder.is_dir() else row
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
    try:
        if not is_saved:
            return _load_files(config, reader or config.path, options)
        saved: Any = datasets.load_from_disk(config.path).with_format(None)
        # A `Dataset` that was made as `train[:50%]` is called `train`.
        return (
            saved if isinstance(saved, dict) else {re.split(r"[^\w.]", str(saved.split or "train"))[0]: saved}
        )
    except (DatasetsError, ValueError, OSError, EOFError) as error:
        # The text of this error does not say what is wrong.
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        raise ConfigError(f"cannot load the dataset {config.path!r}: {reason}", path="path") from error


def _load_files(config: HFConfig, source: str, options: dict[str, Any]) -> Any:
    import datasets

    builder: Any = datasets.load_dataset_builder(source, **options)
    files: list[str] = [file for of_split in (builder.config.data_files or {}).values() for file in of_split]
    _check_files(Path(config.path), files, builder.name)
    if builder.name == "csv":
        for file in map(Path, files):
            if file.is_file():
                _check_quotes(file, builder.config)
        import pandas

        # The library would read `007` as 7, `1.10` as 1.1, and NA as null.
        # Two lines: where the first is shorter, pandas would take the other's first cells for an index.
        lines: dict[str, Any] = {"header": None, "nrows": 2, "dtype": str, "na_filter": False}
        lines = {**builder.config.pd_read_csv_kwargs, "chunksize": None, **lines}
        columns, *others = [[*pandas.read_csv(file, **lines).iloc[0]] for file in files]
        if len({*columns}) < len(columns):
            raise ConfigError(f"{files[0]} has a column twice, or one without a name: {columns}", path="path")
        if other := [each for each in others if each != columns]:
            text = f"{config.path!r} has files with different columns: {columns} and {other[0]}"
            raise ConfigError(text, path="path")
        options |= {"features": datasets.Features({str(name): datasets.Value("string") for name in columns})}
        builder = datasets.load_dataset_builder(source, **options, keep_default_na=False, na_values=[""])
    if config.streaming:
        return builder.as_streaming_dataset(config.split)
    builder.download_and_prepare()
    return _with_numbers(builder.as_dataset()) if builder.name == "csv" else builder.as_dataset()


def _with_numbers(splits: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the columns of CSV files in which every text is written as Python writes a number or bool."""
    import datasets

    for name in next(iter(splits.values())).column_names:
        texts = {text for table in splits.values() for text in table.unique(name)} - {None}
        for dtype, convert in _CONVERT.items() if texts else ():
            with suppress(KeyError, ValueError):  # also from Arrow, for integers of more than 64 bits
                if all(str(convert(text)) == text for text in texts):
                    kind = datasets.Value(dtype)
                    splits = {key: table.cast_column(name, kind) for key, table in splits.items()}
                    break
    return splits


def _check_files(path: Path, files: list[str], reader: str) -> None:
    """Refuse a source that the library would read in part: without a shard, a file, or a key of a row."""
    from datasets.data_files import FILES_TO_IGNORE

    for file in map(Path, files if reader == "json" else ()):
        if file.is_file() and _ending(file) in _READERS:
            _check_keys(file)
    shards = [re.match(r"(.*-)(\d{5})(-of-)(\d{5})", file) for file in files if not path.is_file()]
    have = {shard[0] for shard in shards if shard}
    need = {f"{s[1]}{n:05}{s[3]}{s[4]}" for s in shards if s for n in range(int(s[4]))}
    if lost := sorted(need - have):
        raise ConfigError(f"{str(path)!r} lacks the shard {', '.join(lost)}; copy it here", path="path")
    card = path / "README.md"  # may say which files to read
    if reader in _READERS.values() and not (card.exists() and b"configs:" in card.read_bytes()):
        found = [file for file in path.resolve().rglob("[!.]*") if _ending(file) in _READERS]
        if left := sorted({str(file) for file in found if file.name not in FILES_TO_IGNORE} - {*files}):
            fault = f"{str(path)!r}: {left[0]} is not read beside {files[0]}"
            cure = (
                "give the path of one file, or keep only files of one kind, with names of splits or without"
            )
            raise ConfigError(f"{fault}; {cure}", path="path")


def _check_keys(file: Path) -> None:
    """Refuse a file of JSON in which one of the first objects has a key twice, or that is not UTF-8."""
    with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as lines:
        is_array = lines.read(1) == b"["
        lines.seek(0)
        for number, text in enumerate([lines.read()] if is_array else islice(lines, _STRICT_LINES), 1):
            try:
                json.loads(text, object_pairs_hook=object_of)
            except (ConfigError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file}:{number}: {error}", path="path") from error
            except ValueError:
                return  # the library says why


def _check_quotes(file: Path, config: Any) -> None:
    """Refuse a CSV file with text behind a closing quote, where the library moves quotes: `"say \\"a\\""`."""
    csv.field_size_limit(2**31 - 1)
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding=config.encoding, newline="") as lines:
        rows = csv.reader(lines, delimiter=config.sep, strict=True)
        try:
            for _ in rows:
                pass
        except (csv.Error, UnicodeDecodeError) as error:
            fault = f"{file}:{rows.line_num}: {error}; close each quote, and write one inside quotes twice"
            raise ConfigError(fault, path="path") from error


def _reader_of(path: Path) -> str:
    """Return the library's reader for a file, by its ending; empty if the path is no file's."""
    ending = _ending(path)
    fault = f"ends in {ending!r}; expected one of {', '.join(_READERS)}" if path.is_file() else ""
    if ending in _READERS:
        fault = "does not exist" if not path.is_file() else "" if path.stat().st_size else "is empty"
    if path.is_file() and not fault:
        with path.open("rb") as file:
            marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            fault = "is UTF-16; save it as UTF-8" if file.read(2) in marks else ""
    if fault:
        raise ConfigError(f"the file {str(path)!r} {fault}", path="path")
    return _READERS.get(ending, "")


def _ending(file: Path) -> str:
    return "".join(file.suffixes[-2 if file.suffix == ".gz" else -1 :]).lower()


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
