"""`stretto export`: what a run has made, for other programs.

- The model of a checkpoint as a folder that `transformers` loads, or its adapter as one that `peft` loads,
  with the tokenizer, the generation config and a model card. `--push-to-hub` uploads it.
- Kept samples as rows for supervised training: `prompt` and `completion`, both text or both chat messages.
  The algorithm `sft` reads them, and so does TRL's `SFTTrainer`.

A model card names no file of this machine and no value of the run file that could be a secret: it has a fixed
list of keys, and numbers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Literal, cast

from stretto.cli.folders import is_free
from stretto.cli.samples import open_samples
from stretto.errors import ConfigError, StrettoError
from stretto.kernel.checkpoint import find_checkpoint
from stretto.models.images import names_in
from stretto.records.metrics import ACCURACY, is_figure
from stretto.records.run import RunRecord
from stretto.records.samples import SampleFilter

__all__ = ["ExportedSamples", "export_model", "export_samples", "push_to_hub"]

Form = Literal["merged", "adapter"]

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_KEYS = (
    *("algorithm.use", "algorithm.group_size", "reward.use", "dataset.use", "training.use", "training.lr"),
    *("queue.batch_size", "queue.max_staleness", "sampling.temperature", "sampling.max_tokens", "seed"),
)
"""Keys of the run file whose values a model card shows."""
_FIGURES = ("reward", "length", "entropy", "staleness")
"""Keys of `metrics.jsonl` whose values a model card shows, of the step that made the version."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json")
"""Files of a model that its adapter does without."""


# ------------------------------------------------------------------------------------------- models


def export_model(run: RunRecord, version: str | None, form: Form, to: Path | None) -> Path:
    """Write the model of a checkpoint to a folder, and return the folder. It is complete or absent.

    Args:
        version: a version of the run, or the name of a checkpoint; None for the newest intact one.
        form: the whole model, with adapters merged, or only the adapter.
        to: a folder that does not exist, or is empty. None: `<run>-step-000040` in the working directory.

    Raises:
        ConfigError: if there is no such checkpoint, if it has no model or no adapter, or if the folder is not
            empty or cannot be written.
    """
    checkpoint = find_checkpoint(run.folder, version)
    source, model = checkpoint / ("model" if form == "merged" else "adapter"), checkpoint / "model"
    if not model.is_dir():
        engine = run.document["training"]["use"]
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
            _name_base(aside / "adapter_config.json", run)
        (aside / "README.md").write_text(_card(run, checkpoint, form))
    return to


def push_to_hub(folder: Path, repository: str) -> str:
    """Upload a folder to a repository of the Hugging Face hub, and return its address. A repository that does
    not exist is made, as a private one. The token is that of `hf auth login`, or of HF_TOKEN.

    Raises:
        StrettoError: if the hub refuses it. The text does not contain the token.
    """
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
        # Without the cause: its traceback has the request and its headers.
        raise StrettoError(f"--push-to-hub {repository}: {reason}") from None
    return str(address)


@contextmanager
def _written_aside(to: Path) -> Generator[Path]:
    """Give a new folder beside `to`, and rename it to `to` at the end of the block. Remove it after an
    error."""
    if not is_free(to):
        raise ConfigError(f"{to} exists and is not empty; give another folder with --to")
    aside = to.absolute().with_name(f".{to.name}-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        yield aside
        aside.replace(to)
    except OSError as error:
        raise ConfigError(f"{to}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _name_base(file: Path, run: RunRecord) -> None:
    """Name the base model of an adapter by its hub id; a folder of this machine by its last part."""
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "base_model_name_or_path": _base_of(run)[0]}, indent=2) + "\n")


def _base_of(run: RunRecord) -> tuple[str, bool]:
    """Return the name of the model that the run started from, and whether it is one of the hub."""
    model = str(run.document.get("model") or "")
    if "$" in model:  # it is read from the environment
        return "unknown", False
    on_hub = _HUB_ID.fullmatch(model) is not None and not Path(model).exists()
    return (model, True) if on_hub else (Path(model).name or "unknown", False)


def _card(run: RunRecord, checkpoint: Path, form: Form) -> str:
    base, on_hub = _base_of(run)
    architectures = json.loads((checkpoint / "model" / "config.json").read_text()).get("architectures") or []
    algorithm = run.document["algorithm"]["use"]
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
        *_table("figure", list(_figures(run, version))),
        *_table("key of the run file", list(_values(run))),
    ]
    return "\n".join(lines)


def _figures(run: RunRecord, version: int) -> Iterator[tuple[str, str]]:
    for line in (line for line in run.evaluations if line["step"] == version):
        if is_figure(accuracy := line.get(ACCURACY)):
            yield "held-out accuracy", f"{accuracy:.4g}"
    for line in (line for line in run.steps if line["step"] == version):
        yield from ((key, f"{line[key]:.4g}") for key in _FIGURES if is_figure(line.get(key)))


def _values(run: RunRecord) -> Iterator[tuple[str, str]]:
    for key in _KEYS:
        value: Any = run.document
        for part in key.split("."):
            value = cast("dict[str, Any]", value).get(part) if isinstance(value, dict) else None
        if value is not None and "$" not in str(value):
            yield key, str(value)


def _table(title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    return [f"| {title} | value |", "|---|---|", *(f"| `{name}` | {value} |" for name, value in rows), ""]


# ------------------------------------------------------------------------------------------ samples


@dataclass(frozen=True)
class ExportedSamples:
    """What `export_samples` has written."""

    rows: int
    truncated: int
    """Samples that reached the limit of tokens. They are left out: a model would learn to stop there."""
    unusable: int
    """Samples that are left out because the run did not keep their whole prompt or conversation, or because
    the dataset has their images in itself."""


def export_samples(
    folder: Path, file: Path, *, min_reward: float | None = None, best_of_group: bool = False
) -> ExportedSamples:
    """Write the training samples of a run as JSON lines with `id`, `prompt`, `completion` and `reward`, and
    with `images`, if the rows have some.

    A conversation makes one row for each turn of the assistant, with the tool calls and results that belong
    to it: the turns before it are the prompt.

    Args:
        file: is replaced if it exists. It is complete or unchanged.
        min_reward: leave out samples with a lower reward.
        best_of_group: take only the sample with the highest reward of each group; of equal ones, the first.

    Raises:
        ConfigError: if the run keeps no samples, if none fits, or if the file cannot be written.
    """
    wanted = SampleFilter(purpose="train", reward=(min_reward, None))
    found = [row for row in open_samples(folder).find(wanted, limit=None) if row["reward"] is not None]
    whole = [row for row in found if row["finish"] == "stop"]
    chosen = _best(whole) if best_of_group else whole
    parts = Counter(map(_sample_of, whole))
    rows = [(sample, list(_rows_of(sample, parts[_sample_of(sample)]))) for sample in chosen]
    lines = [json.dumps(row, ensure_ascii=False) for _, of_sample in rows for row in of_sample]
    if not lines:
        raise ConfigError(
            f"{folder} has no sample to export: {len(found)} have a reward that fits, and {len(whole)} of "
            "these ended by themselves; a row also needs the whole prompt, and images that are files"
        )
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.absolute().parent, delete=False) as aside:
            aside.writelines(f"{line}\n" for line in lines)
        Path(aside.name).replace(file)
    except OSError as error:
        raise ConfigError(f"--samples {file}: cannot write there: {error}") from error
    unusable = sum(not of_sample for _, of_sample in rows)
    return ExportedSamples(len(lines), len(found) - len(whole), unusable)


def _best(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all rows of the sample with the highest reward of each group."""
    best: dict[Any, dict[str, Any]] = {}
    for sample in samples:
        former = best.setdefault(sample["ticket"], sample)
        if sample["reward"] > former["reward"]:
            best[sample["ticket"]] = sample
    chosen = set(map(_sample_of, best.values()))
    return [each for each in samples if _sample_of(each) in chosen]


def _sample_of(row: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return what all trajectories of a sample share."""
    return row["ticket"], row["attempt"], row["sample"]


def _rows_of(sample: Mapping[str, Any], parts: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a trajectory; none if its prompt or its conversation was not kept as a whole, if the
    dataset has its images in itself, or if it is a conversation with images.

    Args:
        parts: number of trajectories of its sample. Only the last one has the conversation.
    """
    row, text = sample["dataset_row"], sample["text"]
    columns = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    reward = {"reward": sample["reward"]}
    messages, images = sample["messages"], names_in(columns)
    if messages:
        if isinstance(messages, list) and not images and sample["images"] is None:
            for number, (prompt, answer) in enumerate(_turns(cast("list[Any]", messages))):
                yield {"id": f"{sample['id']}/{number}", "prompt": prompt, "completion": answer, **reward}
        return
    if not all(isinstance(name, str) for name in images):
        return
    shared = {**reward, "images": images} if images else reward
    prompt = columns.get("prompt")
    # In a longer conversation without messages, the turns of others are part of the text.
    if prompt and text and parts == 1 and sample["metrics"].get("turns", 1) == 1:
        answer = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        yield {"id": sample["id"], "prompt": prompt, "completion": answer, **shared}


def _turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield each turn of the assistant with the messages before it. The results of the tools that it called,
    and what it says about them, are part of the turn."""
    start: int | None = None
    for end, message in enumerate([*messages, {"role": "user"}]):
        own = message["role"] in ("assistant", "tool")
        if own and start is None:
            start = end
        elif not own and start is not None:
            yield list(messages[:start]), list(messages[start:end])
            start = None
