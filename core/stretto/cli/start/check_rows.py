"""Check rows of the datasets before a run starts: for missing columns, faults and excess length."""

import importlib.util
import math
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from stretto.algorithm import Encode
from stretto.assembly.assembly import Assembly
from stretto.chat.prompts import prompt_ids
from stretto.cli.start.check_chat import chat_problems, has_tokenizer
from stretto.cli.start.row_check import RowFaults, checked_rows, drawn_rows, faults_of_rows
from stretto.component import Problem
from stretto.config import RunConfig
from stretto.dataset import Dataset, Row, SourcedDataset, first_of
from stretto.errors import ConfigError
from stretto.kernel.setup import curriculum_of
from stretto.models.files import known_config, positions_of, vocabulary_of
from stretto.models.images import has_images
from stretto.models.tokenizer import fault_of
from stretto.models.vision import is_vision_language
from stretto.rl.supervised import check_ids, cut_to_fit
from stretto.tokenizer import Tokenizer
from stretto.training.config import ModelTrainingConfig

_warning = partial(Problem, severity="warning")

_LOOK_S = 2.0  # time limit of the search for a prompt that is short enough
_IMAGES_S = 60.0  # time limit of reading rows with images
_MAX_FORMS = 3  # row forms that are tried besides the first row's

_MAX_S = 1.0  # for the rows of a dataset: the check of a large one stays short
_MAX_LEAK = 0.05
"""Warn above this share of held-out rows that are also training rows. A few may be equal by chance."""


@dataclass(eq=False)
class RowForm:
    """Rows with the same columns, whose values have the same types."""

    index: int
    row: Row
    count: int = 0


@dataclass
class ReadRows:
    """The rows of a dataset that were read: all, or a random part."""

    rows: int
    first: Row
    read: int = 0
    forms: dict[Set[tuple[str, type]], RowForm] = field(default_factory=dict[Set[tuple[str, type]], RowForm])
    faults: dict[int, str] = field(default_factory=dict[int, str])
    """Index of a row without a valid prompt -> its fault."""
    contents: set[bytes] = field(default_factory=set[bytes])
    """The rows without their ids, encoded."""
    sources: list[tuple[str, range]] = field(default_factory=list[tuple[str, range]])
    """Places of the rows that the run uses, if the dataset knows them."""

    def other_forms(self) -> list[RowForm]:
        """Return at most `_MAX_FORMS` forms that differ from the first row's form."""
        first = _form_of(self.first)
        return [each for form, each in self.forms.items() if form != first][:_MAX_FORMS]


def dataset_problems(assembly: Assembly, path: str, read: dict[str, ReadRows]) -> Iterator[Problem]:
    """Check the rows of a dataset. Store the read rows in `read` if the first row has a valid prompt."""
    config, source = assembly.config, assembly.graph.source
    dataset: Dataset = assembly.composed.make(path, assembly.trial_context)
    if len(dataset) == 0:
        yield Problem(path, "the dataset is empty; expected at least one row")
        return
    if path == "dataset":
        curriculum_of(assembly.composed, dataset)
    row = dataset[0]
    if "prompt" not in row:
        keys = ", ".join(row) or "none"
        yield Problem(
            path,
            f"the first row has no column 'prompt'; its columns: {keys}; set `prompt_column` or "
            "`prompt_template`",
        )
        return
    if fault := fault_of(row["prompt"]):
        yield Problem(path, f"the first row's prompt: {fault}")
        return
    read[path] = rows = _read_rows(dataset)
    if isinstance(dataset, SourcedDataset):
        used = config.evaluation.rows if path != "dataset" and config.evaluation else None
        rows.sources = [*first_of(dataset.sources, used)]
    if rows.faults:
        examples = RowFaults.of(rows.rows, rows.read, rows.faults).count_and_examples
        yield _warning(
            path,
            f"{len(rows.faults):,} of {rows.read:,} rows have no valid prompt, and their tickets would "
            f"fail {examples}",
        )
    yield from chat_problems(assembly, path, dataset)
    for key in ("template", "special_tokens", "max_tokens"):
        if path != "dataset" and getattr(assembly.composed.section(path), key):
            yield Problem(
                f"{path}.{key}", f"a run has one for all its rows; set dataset.{key}, which counts here"
            )
    if is_vision_language(model := known_config(config.model)):
        yield from _image_problems(assembly, path)
    elif model and has_images(row):
        yield Problem(
            path,
            f"the first row has images, but the model {config.model!r} does not read images; choose a "
            "vision-language model, or rows without the columns 'images' and 'image'",
        )
    elif source.encode is not None and (path == "dataset" or config.evaluates_loss):
        yield from _encoding_problems(assembly, source.encode, path, rows, dataset)
    elif config.model is None or Path(config.model, "tokenizer.json").exists():
        yield from _length_problems(assembly, path, dataset)
    if path != "dataset" and config.evaluation is not None and (config.evaluation.rows or 0) > len(dataset):
        yield _warning(
            "evaluation.rows",
            f"is {config.evaluation.rows}, but the dataset has {len(dataset)} rows: the run uses all of them",
        )
    if path != "dataset" and config.evaluates_loss:
        yield from _measured_rows_problems(assembly, len(dataset))
    if path == "dataset" and len(dataset) < config.queue.batch_size and config.steps:
        yield _warning(
            "queue.batch_size",
            f"is {config.queue.batch_size}, but the dataset has {len(dataset)} rows: one step would train on "
            "the same row several times",
        )


def _measured_rows_problems(assembly: Assembly, available: int) -> Iterator[Problem]:
    """Check that each data-parallel rank gets held-out rows to measure, and that images of all rows fit."""
    config, evaluation = assembly.config, assembly.config.evaluation
    assert evaluation is not None
    for call in assembly.graph.step_calls:
        if reason := assembly.placement.lack_of_rows(call, evaluation.first_rows(available), "held-out "):
            yield Problem("evaluation.rows", reason)
    if evaluation.rows is None and is_vision_language(known_config(config.model)):
        text = f"all {available:,} held-out rows are measured, and their images are in memory at once"
        yield _warning("evaluation.rows", f"{text}; set it to some hundreds")


def _answer_problems(config: RunConfig, path: str, row: Row, tokenizer: Tokenizer) -> Iterator[Problem]:
    samplings = dict(config.samplings())
    key = "evaluation.sampling" if path != "dataset" and "evaluation.sampling" in samplings else "sampling"
    answer, limit = row.get("answer"), samplings[key].max_tokens
    if isinstance(answer, str) and (length := len(tokenizer.encode_text(answer))) > limit:
        yield _warning(
            f"{key}.max_tokens",
            f"is {limit}, but the answer in the first row has {length} tokens: answers like it are cut",
        )


def _length_problems(assembly: Assembly, path: str, dataset: Dataset) -> Iterator[Problem]:
    config = assembly.config
    limit = assembly.composed.section(path).max_prompt_tokens
    tokenizer = assembly.tokenizer
    tokens = len(prompt_ids(dataset[0], tokenizer))
    max_total: int | None = getattr(config.workflow, "max_tokens", None)
    if max_total is not None and tokens >= max_total:
        yield _warning(
            "workflow.max_tokens",
            f"is {max_total}, but the first row's prompt has {tokens} tokens: there is no room for an answer",
        )
    if limit is not None and tokens > limit:
        yield from _limit_problems(f"{path}.max_prompt_tokens", limit, tokenizer, dataset)
        return
    if path != "dataset" or config.steps:
        yield from _answer_problems(config, path, dataset[0], tokenizer)
    if path == "dataset" and config.steps:
        longest = tokens + config.sampling.max_tokens
        context: int | None = getattr(config.inference, "context_length", None)
        if assembly.graph.samples and context is not None and longest > context:
            yield _warning(
                "inference.context_length",
                f"is {context}; the first row's prompt has {tokens} tokens, and with sampling.max_tokens, "
                f"{config.sampling.max_tokens}, a sample needs {longest}: the tickets of such rows fail",
            )
        for group in assembly.placement.groups.values():
            section = group.section
            if isinstance(section, ModelTrainingConfig) and section.tokens_per_pass < longest:
                yield _warning(
                    f"{group.path}.micro_batch_tokens",
                    f"is {section.tokens_per_pass}, but a sequence can have {longest} tokens: the first "
                    f"row's prompt has {tokens}, and sampling.max_tokens is {config.sampling.max_tokens}. A "
                    "sequence above the limit gets a micro-batch of its own, which takes more memory",
                )


def _limit_problems(path: str, limit: int, tokenizer: Tokenizer, dataset: Dataset) -> Iterator[Problem]:
    start, shortest, count = time.monotonic(), math.inf, 0
    while count < len(dataset) and time.monotonic() - start < _LOOK_S:
        shortest = min(shortest, len(prompt_ids(dataset[count], tokenizer)))
        count += 1
        if shortest <= limit:
            return
    read_all = count == len(dataset)
    yield Problem(
        path,
        f"is {limit}, but the prompts of {'all' if read_all else 'the first'} {count} rows are longer (the "
        f"shortest has {shortest} tokens): the run would skip these rows",
        "error" if read_all else "warning",
    )


def _image_problems(assembly: Assembly, path: str) -> Iterator[Problem]:
    """Read some rows with the model's processor in a child process, if the model is on this machine."""
    config = assembly.config
    if config.model is None or not Path(config.model).is_dir() or importlib.util.find_spec("PIL") is None:
        return
    try:
        document = msgspec.to_builtins(config)
        faults = faults_of_rows(document, path, "model", assembly.trial_context, _IMAGES_S)
    except TimeoutError:
        text = f"not verified: reading the images took longer than {_IMAGES_S:.0f} s"
        yield _warning(path, text)
    except ChildProcessError as error:
        yield Problem(path, f"the process that reads the images failed: {error}")
    else:
        text = f"the model cannot read {faults.faulty:,} of {faults.read:,} rows {faults.count_and_examples}"
        if faults.faulty:
            yield Problem(path, text, "warning" if faults.faulty < faults.read else "error")


def _encoding_problems(
    assembly: Assembly, encode: Encode, path: str, rows: ReadRows, dataset: Dataset
) -> Iterator[Problem]:
    model = assembly.config.model
    if model is not None and not has_tokenizer(model):
        return
    tokenizer, positions, vocabulary = assembly.tokenizer, positions_of(model), vocabulary_of(model)

    def fault_in(index: int) -> str:
        try:
            row = dataset[index]
            for sample in range(assembly.graph.source.samples):
                encoded = encode(row, sample, tokenizer)
                check_ids(encoded, row, vocabulary)
                tokens, _ = cut_to_fit(encoded, assembly.config.dataset, positions)
                assembly.longest_row = max(assembly.longest_row, len(tokens))
        except ConfigError as error:
            return str(error)
        return ""

    if fault := fault_in(0):
        yield Problem(path, f"the first row: {fault}")
        return
    read, faults = 0, dict[int, str]()
    for index in drawn_rows(len(dataset), _MAX_S):
        read += 1
        if index not in rows.faults and (fault := fault_in(index)):
            faults[index] = fault
    if faults:
        examples = RowFaults.of(len(dataset), read, faults).count_and_examples
        verb = "trained on" if path == "dataset" else "measured"
        text = f"{len(faults):,} of {read:,} rows cannot be {verb}, and the run would end at the first"
        yield _warning(path, f"{text} {examples}")


def _read_rows(dataset: Dataset) -> ReadRows:
    result = ReadRows(len(dataset), dataset[0])
    for index in drawn_rows(result.rows, _MAX_S):
        result.read += 1
        try:
            row = dataset[index]
        except ConfigError as error:
            result.faults[index] = str(error)
            continue
        if fault := fault_of(row["prompt"]) if "prompt" in row else "it has no column 'prompt'":
            result.faults[index] = fault
            continue
        form = result.forms.setdefault(_form_of(row), RowForm(index, row))
        form.count += 1
        if index < form.index:
            form.index, form.row = index, row
        content = {name: value for name, value in row.items() if name != "id"}
        result.contents.add(msgspec.json.encode(content, enc_hook=repr, order="sorted"))
    return result


def leaked_rows(read: Mapping[str, ReadRows]) -> Iterator[Problem]:
    """Warn if many held-out rows are equal to training rows, or if some are the same rows."""
    if len(read) < 2:
        return
    train, held_out = read["dataset"], read["evaluation.dataset"]
    shared = len(train.contents & held_out.contents)
    of_train, of_held_out = (checked_rows(each.read, each.rows) for each in (train, held_out))
    if shared > _MAX_LEAK * len(held_out.contents):
        yield _warning(
            "evaluation.dataset",
            f"{shared:,} of {held_out.read:,} held-out rows are also rows of `dataset`: their score does "
            f"not show what the policy learns for new rows (checked: {of_held_out}, and of `dataset` "
            f"{of_train}); remove them from one of the two",
        )
        return
    for source, rows in held_out.sources:
        for other, trained in train.sources:
            both = range(max(rows.start, trained.start), min(rows.stop, trained.stop))
            if source == other and both:
                yield _warning(
                    "evaluation.dataset",
                    f"rows {both.start + 1:,} to {both.stop:,} of {source} are held out and trained: their "
                    "score does not show what the policy learns for new rows; leave them out of one dataset",
                )


def _form_of(row: Mapping[str, Any]) -> Set[tuple[str, type]]:
    return frozenset((name, type(value)) for name, value in row.items() if name not in {"prompt", "id"})
