"""`stretto export`: write a run's model or samples for other programs.

- The model of a checkpoint as a folder that `transformers` loads, or its adapter as one that `peft` loads,
  with the tokenizer, the generation config and a model card. `--push-to-hub` uploads it.
- Kept samples as rows for supervised training: `prompt` and `completion`, both text or both chat messages.
  The algorithm `sft` trains the same tokens on them as the run did.

A model card names no file of this machine and no value of the run file that could be a secret: it has a fixed
list of keys, and numbers.
"""

import json
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Literal

import msgspec

from stretto.algorithm import Encoded
from stretto.assembly.run_file import RunFile, read
from stretto.cli.start.folders import is_free
from stretto.dataset import DatasetConfig
from stretto.errors import ConfigError, StrettoError
from stretto.kernel.durable.checkpoint import find_checkpoint
from stretto.models.files import fetch_config, tensors_of_model
from stretto.models.safetensors import cast_file
from stretto.models.tokenizer import load_tokenizer
from stretto.models.vision import Vision, is_vision_language
from stretto.records.figures import FIGURES, recent
from stretto.records.run_folder import RunFolder
from stretto.records.samples.store import SampleFilter, open_samples
from stretto.records.samples.traces import row_of, sample_of
from stretto.rl.supervised import prompt_and_answer

Form = Literal["merged", "adapter"]

_DTYPES = ("float32", "bfloat16", "float16")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_KEYS = (
    *("algorithm.use", "algorithm.group_size", "reward.use", "dataset.use", "training.use", "training.lr"),
    *("queue.batch_size", "queue.max_staleness", "sampling.temperature", "sampling.max_tokens", "seed"),
)
_FIGURES = ("reward", "length", "entropy", "staleness")
"""Keys of `metrics.jsonl` that a model card shows: means of the last 10 steps up to the version."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json")


def export_model(
    run: RunFolder, version: str | None, form: Form, to: Path | None, dtype: str | None = None
) -> tuple[Path, str]:
    """Write a checkpoint's model, by default the newest, to a free folder. It is complete or absent. Return
    the folder, and the dtype of its weights: if `dtype` is None, that of the files of the run's model, or
    float32 for an adapter and where these files are unknown."""
    if dtype not in (None, *_DTYPES):
        raise ConfigError(f"--dtype {dtype}: expected {', '.join(_DTYPES)}")
    checkpoint = find_checkpoint(run.folder, version)
    source, model = checkpoint / ("model" if form == "merged" else "adapter"), checkpoint / "model"
    if not model.is_dir():
        engine = run.config["training"]["use"]
        raise ConfigError(f"{checkpoint} has no model: the training engine {engine!r} does not save one")
    if not source.is_dir():
        raise ConfigError(
            f"{checkpoint} has no adapter: `training.lora` is not set; export it without --adapter"
        )
    to = to or Path(f"{run.folder.name}-{checkpoint.name}")
    with _written_aside(to) as aside:
        shutil.copytree(source, aside, dirs_exist_ok=True)
        if form == "adapter":
            ignore = shutil.ignore_patterns(*_WEIGHTS)
            shutil.copytree(model, aside, dirs_exist_ok=True, ignore=ignore)
            file = aside / "adapter_config.json"  # with the hub id or folder name of the base model
            config = {**json.loads(file.read_text()), "base_model_name_or_path": _base_of(run)[0]}
            file.write_text(json.dumps(config, indent=2) + "\n")
        dtype = dtype or (_source_dtype(run) if form == "merged" else _DTYPES[0])
        for file in aside.glob("*.safetensors") if dtype != _DTYPES[0] else ():
            cast_file(file, dtype)
        if form == "merged":
            config = {**json.loads((aside / "config.json").read_text()), "dtype": dtype}
            (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (aside / "README.md").write_text(_card(run, checkpoint, form))
    return to, dtype


def _source_dtype(run: RunFolder) -> str:
    """Return the dtype of most weights in the files of the run's model; float32 if they are not here, or have
    another one than an export can have."""
    sizes = Counter[str]()
    for place in tensors_of_model(run.config.get("model")).values():
        sizes[place.dtype_name] += math.prod(place.shape)
    found = sizes.most_common(1)[0][0] if sizes else _DTYPES[0]
    return found if found in _DTYPES else _DTYPES[0]


def push_to_hub(folder: Path, repository: str) -> str:
    """Upload a folder to a repository of the Hugging Face hub, and return its address. Create a private
    repository if it does not exist. The token comes from `hf auth login` or HF_TOKEN."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    hub = HfApi()
    try:
        address = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by stretto export")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error)
        if token := get_token():
            reason = reason.replace(token, "<token>")
        # Raise without the cause, whose traceback has the request and its headers.
        raise StrettoError(f"--push-to-hub {repository}: {reason}") from None
    return str(address)


@contextmanager
def _written_aside(to: Path) -> Generator[Path]:
    """Yield a new folder beside `to`. Rename it to `to` at the end of the block; remove it after an error."""
    if not is_free(to):
        raise ConfigError(f"{to} exists and is not empty; give another folder with --to")
    temporary = to.absolute().with_name(f".{to.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.replace(to)
    except OSError as error:
        raise ConfigError(f"{to}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _base_of(run: RunFolder) -> tuple[str, bool]:
    """Return the name of the model that the run started from, and whether the name is a hub id."""
    model = str(run.config.get("model") or "")
    if "$" in model:  # the name is read from the environment
        return "unknown", False
    on_hub = _HUB_ID.fullmatch(model) is not None and not Path(model).exists()
    return (model, True) if on_hub else (Path(model).name or "unknown", False)


def _card(run: RunFolder, checkpoint: Path, form: Form) -> str:
    base, on_hub = _base_of(run)
    architectures = json.loads((checkpoint / "model" / "config.json").read_text()).get("architectures") or []
    algorithm = run.config["algorithm"]["use"]
    head = {
        **({"base_model": base} if on_hub else {}),
        "library_name": "peft" if form == "adapter" else "transformers",
        **({"pipeline_tag": "text-generation"} if str(architectures).endswith("ForCausalLM']") else {}),
        "tags": ["stretto", algorithm],
    }
    version = int(checkpoint.name.rpartition("-")[2])
    what = "A LoRA adapter for" if form == "adapter" else "Trained from"
    origin = f"`{base}`" if on_hub else f"a local model named `{base}`"
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in head.items()),
        "---",
        "",
        f"# {run.name}, version {version}",
        "",
        f"{what} {origin}: {version} train steps with the algorithm `{algorithm}` of",
        f"stretto {version_of('stretto')}.",
        "",
        *_table("figure (of steps: mean of the last 10)", list(_figures(run, version))),
        *_table("key of the run file", list(_values(run))),
    ]
    return "\n".join(lines)


def _figures(run: RunFolder, version: int) -> Iterator[tuple[str, str]]:
    for key in (run.held_out, *_FIGURES):
        values = [value for step, value in run.series(key) if step <= version]
        value = dict(run.series(key)).get(version) if key == run.held_out else recent(values)
        if value is not None:
            yield FIGURES[key].name, FIGURES[key].text(value)


def _values(run: RunFolder) -> Iterator[tuple[str, str]]:
    values = run.values()
    for key in _KEYS:
        value = values.get(key, "null")
        if value != "null" and "$" not in value:
            yield f"`{key}`", value.replace('"', "")


def _table(title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    return [f"| {title} | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]


_PAGE = 500
"""Maximum number of samples whose tokens are in memory at the same time."""


@dataclass(frozen=True)
class ExportedSamples:
    """What `export_samples` has written."""

    rows: int
    with_tokens: int
    """Rows with the columns `tokens` and `loss_mask`, because encoding their text gives other tokens."""
    truncated: int
    """Samples that reached the limit of tokens. They are left out: a model would learn to stop there."""
    unusable: int
    """Samples left out because their dataset row contains the images, or their conversation has images."""


def export_samples(
    folder: Path, file: Path, *, min_reward: float | None = None, best_of_group: bool = False
) -> ExportedSamples:
    """Write a run's training samples as JSON lines: `id`, `prompt`, `completion`, `reward`, and `images` if
    there are some. The file is complete or unchanged. Where `sft` would make other tokens than the run
    trained, a row also has `tokens` and `loss_mask`."""
    wanted = SampleFilter(purpose="train", reward=(min_reward, None))
    store = open_samples(folder)
    every = store.find(wanted, limit=None, texts=False)
    found = [row for row in every if row["reward"] is not None]
    finished = [row for row in found if row["finish"] == "stop"]
    chosen = {row["id"] for row in (_best(finished) if best_of_group else finished)}
    parts = Counter(map(sample_of, finished))
    encode = _encoder_of(folder)
    rows: list[str] = []
    with_tokens = 0
    for offset in range(0, len(every), _PAGE):
        for sample in store.find(wanted, limit=_PAGE, offset=offset, tokens=True):
            if sample["id"] not in chosen or (row := row_of(sample, parts[sample_of(sample)])) is None:
                continue
            kept = Encoded(sample["tokens"], sample["loss_mask"])
            if encode(row) != kept:
                row |= {"tokens": kept.tokens, "loss_mask": [int(trained) for trained in kept.loss_mask]}
                with_tokens += 1
            rows.append(json.dumps(row, ensure_ascii=False))
    if not rows:
        raise ConfigError(
            f"{folder} has no sample to export: {len(found)} have a reward that fits, and {len(finished)} of "
            "these ended by themselves; images must be files, and not in a conversation"
        )
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.absolute().parent, delete=False) as aside:
            aside.writelines(f"{row}\n" for row in rows)
        Path(aside.name).replace(file)
    except OSError as error:
        raise ConfigError(f"--samples {file}: cannot write there: {error}") from error
    return ExportedSamples(len(rows), with_tokens, len(found) - len(finished), len(chosen) - len(rows))


def _encoder_of(folder: Path) -> Callable[[dict[str, Any]], Encoded | None]:
    """Return a function that encodes a row as `sft` does, or returns None if `sft` would refuse the row."""
    document = read(RunFile(folder / "config.yaml", ()))[0]
    model, section = document.get("model"), document.get("dataset", {})
    known = {key: section[key] for key in ("template", "special_tokens") if key in section}
    rows = msgspec.convert({"use": "jsonl", **known}, DatasetConfig)
    vision = Vision(model, rows) if model is not None and is_vision_language(fetch_config(model)) else None
    tokenizer = load_tokenizer(model, rows)

    def encode(row: dict[str, Any]) -> Encoded | None:
        try:
            tokens, mask = prompt_and_answer(row, "completion", vision.of(row) if vision else tokenizer)
        except ConfigError:
            return None
        return Encoded(list(tokens), list(mask))

    return encode


def _best(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    best: dict[int, tuple[str, int, int, int]] = {}
    for sample in sorted(samples, key=lambda each: -each["reward"]):  # of equal rewards, the first
        best.setdefault(sample["ticket"], sample_of(sample))
    return [each for each in samples if sample_of(each) == best[each["ticket"]]]
