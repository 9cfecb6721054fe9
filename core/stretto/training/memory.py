"""What a training process of Hugging Face models takes of its device. Importing it imports no torch.

A small model gets an upper bound, from the shapes in its files. For any other model, a child process counts
(`stretto.training.activations`), and the result is kept in the user's cache.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import math
import re
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import msgspec

from stretto.component import Head
from stretto.machine.child_process import last_line
from stretto.machine.private_file import cache_folder, write_private
from stretto.models.files import cache_bytes, known_config, tensors_of_model, text_config

__all__ = ["CHUNK_BYTES", "Counted", "MicroBatchShape", "counted", "is_lossless"]

_SMALL = 2**29
"""Bytes of activations up to which they are bounded from shapes, not counted in a child process."""
_BYTES_OF_A_CHANNEL = 12
"""Bound of a token's activations for each input and output channel of each matrix. 5 to 6 bytes were counted
for the Llama, Qwen2 and GPT-2 types in float32, without checkpointing."""
_CHUNKS = 5
"""Tensors of a chunk's logits that live at once, at most."""
CHUNK_BYTES = {False: 2**26, True: 2**29}
"""Whether a GPU computes -> bytes of a chunk's float32 logits. Smaller chunks spend most time on adding up
the head's gradient."""
_OUTER = re.compile("embed|wte|wpe|lm_head")  # in names of tensors of the embeddings and the head
_COUNT_S = 180.0
_NOTICE_S = 2.0  # a longer count is announced
_failed: dict[Path, Counted] = {}  # this process asks for them no second time


class MicroBatchShape(msgspec.Struct, frozen=True, kw_only=True):
    """A micro-batch of a model, whose memory is to be counted."""

    model: str
    """Folder or hub id of the model. Only its config is read."""
    head: Head
    trainable: bool
    rank: int
    """Rank of the adapters; 0 without adapters."""
    targets: tuple[str, ...]
    """Linear modules that get an adapter."""
    gradient_checkpointing: bool
    chunked_logits: bool
    may_be_packed: bool
    low: bool
    """Whether the passes compute in bfloat16."""
    lossless: bool
    """Whether bfloat16 can hold the numbers in the model's files."""
    has_masters: bool
    """Whether the parameters that the optimizer changes are others; see `state` of `ModelTrainingConfig`."""
    gathered: bool
    """Whether the engine casts all parameters that it gathers, as FSDP2 does, and uses no autocast."""
    on_gpu: bool
    tokens: int
    """Number of tokens in the micro-batch."""
    length: int
    """Number of tokens of each of its sequences."""


class Counted(msgspec.Struct, frozen=True):
    """What a model and a micro-batch hold in one process, in bytes, if nothing is split over processes."""

    weights: int = 0
    parameters: int = 0
    trained: int = 0
    """Number of parameters that have a gradient."""
    casts: int = 0
    """Copies of float32 parameters in the dtype of the computation, when activations are largest."""
    activations: int = 0
    """All other tensors of a forward and backward pass, at their largest sum."""
    fault: str = ""
    """Why the model's code cannot be counted; then `casts` and `activations` are 0."""


def counted(micro_batches: Sequence[MicroBatchShape]) -> list[Counted]:
    """Count each micro-batch. Small ones get upper bounds."""
    bounds = [_from_shapes(micro_batch) for micro_batch in micro_batches]
    small = [bound for bound in bounds if bound is not None and bound.activations <= _SMALL]
    # The bound holds for layers of attention and feed-forward.
    if len(small) == len(bounds) and all(cache_bytes(each.model, 1) for each in micro_batches):
        return small
    counts = _from_cache(micro_batches)
    return [
        msgspec.structs.replace(bound, casts=0, activations=0, fault=count.fault)
        if count.fault and bound
        else count
        for count, bound in zip(counts, bounds, strict=True)
    ]


def is_lossless(model: str) -> bool:
    """Return whether bfloat16 can hold the numbers in a model's files."""
    if dtypes := {place.dtype for place in tensors_of_model(model).values()}:
        return dtypes <= {"BF16"}
    config = known_config(model)
    return config.get("dtype", config.get("torch_dtype")) == "bfloat16"


def _from_cache(micro_batches: Sequence[MicroBatchShape]) -> list[Counted]:
    """Count each micro-batch, in one child process or from the user's cache."""
    files = [_cache_file(micro_batch) for micro_batch in micro_batches]
    unknown = {
        file: batch
        for file, batch in zip(files, micro_batches, strict=True)
        if file not in _failed and not file.is_file()
    }
    counts = _ask_child([*unknown.values()]) if unknown else []
    for file, count in zip(unknown, counts, strict=True):
        if count.fault:
            _failed[file] = count
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_private(file, msgspec.json.encode(count))
    return [_failed.get(file) or msgspec.json.decode(file.read_bytes(), type=Counted) for file in files]


def _ask_child(micro_batches: Sequence[MicroBatchShape]) -> list[Counted]:
    try:
        return _answer(micro_batches)
    except TimeoutError:
        fault = f"counting took longer than {_COUNT_S:.0f} s"
    except OSError as error:  # no memory for a process, or a process that ended
        fault = str(error)
    end_counting()
    return [Counted(fault=fault)] * len(micro_batches)


@cache
def _child() -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Return a process that answers questions until its input ends, and the file of its errors."""
    atexit.register(end_counting)
    errors = TemporaryFile()  # noqa: SIM115 - `end_counting` closes it
    command = (sys.executable, "-m", "stretto.training.activations")
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors), errors


def _answer(micro_batches: Sequence[MicroBatchShape]) -> list[Counted]:
    """Raise TimeoutError, or OSError with the last words of a child that ended."""
    child, errors = _child()
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(BrokenPipeError):  # then the child has ended, as its empty answer says
        child.stdin.write(msgspec.json.encode(micro_batches) + b"\n")
        child.stdin.flush()
    if not select.select([child.stdout], [], [], _NOTICE_S)[0]:
        _say(", ".join({each.model: None for each in micro_batches}))
        if not select.select([child.stdout], [], [], _COUNT_S)[0]:
            raise TimeoutError
    if line := child.stdout.readline():
        return msgspec.json.decode(line, type=list[Counted])
    errors.seek(0)
    raise OSError(f"counting ended with status {child.wait()}: {last_line(errors.read())}")


@cache
def _say(models: str) -> None:
    print(f"note: counting activations of {models}", file=sys.stderr, flush=True)


def end_counting() -> None:
    """End the child process that counts, if there is one. The next question starts another."""
    if _child.cache_info().currsize:
        child, errors = _child()
        child.kill()
        child.communicate()
        errors.close()
        _child.cache_clear()


def _cache_file(micro_batch: MicroBatchShape) -> Path:
    """Return the file for a micro-batch of any model with the same config, wherever the model is."""
    versions = [_version(name) for name in ("stretto", "torch", "transformers", "peft")]
    unnamed = msgspec.structs.replace(micro_batch, model="")
    question = msgspec.json.encode((unnamed, known_config(micro_batch.model), versions))
    return cache_folder("memory") / f"{hashlib.sha256(question).hexdigest()}.json"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _from_shapes(micro_batch: MicroBatchShape) -> Counted | None:
    """Return numbers from the shapes in the model's files, with an upper bound for activations; None without
    files."""
    shapes = {name: place.shape for name, place in tensors_of_model(micro_batch.model).items()}
    if not shapes:
        return None
    inner = {name: shape for name, shape in shapes.items() if len(shape) == 2 and not _OUTER.search(name)}
    parameters = sum(map(math.prod, shapes.values()))
    suffixes = tuple(f".{target}.weight" for target in micro_batch.targets)
    adapted = sum(sum(shape) for name, shape in inner.items() if name.endswith(suffixes))
    adapters = adapted * micro_batch.rank
    trained = adapters if micro_batch.rank else parameters if micro_batch.trainable else 0
    # Either all matrices are trained, or only adapters, which are small.
    is_cast_once = micro_batch.low and (
        micro_batch.lossless if trained < parameters else micro_batch.has_masters
    )
    kept_low = sum(map(math.prod, inner.values())) if is_cast_once else 0
    channels = sum(map(sum, inner.values())) + adapted
    vocabulary = int(text_config(micro_batch.model).get("vocab_size", 0))
    return Counted(
        weights=4 * (parameters + adapters) - 2 * kept_low,
        parameters=parameters + adapters,
        trained=trained,
        casts=2 * (parameters - kept_low) if micro_batch.low else 0,
        activations=micro_batch.tokens * _BYTES_OF_A_CHANNEL * channels
        + _CHUNKS * min(CHUNK_BYTES[micro_batch.on_gpu], 4 * micro_batch.tokens * vocabulary),
    )
