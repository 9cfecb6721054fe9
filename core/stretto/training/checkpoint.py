"""(torch) The checkpoint files of a Hugging Face model in training, the same for every layout.

    model/              Hugging Face format: config, weights in safetensors, tokenizer
    adapter/            only with LoRA: peft format; model/ then holds the merged weights
    optimizer*.safetensors   full tensors named `<parameter>.<key>`
    random.safetensors  states of the random number generators
    engine.json         number of optimizer steps; a skipped step counts too

Every rank iterates over all full tensors; the ranks write files of about 1 GiB in turn.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from stretto.errors import EngineError
from stretto.models.safetensors import save_tensors
from stretto.training.device import is_gpu
from stretto.training.layout import Layout

__all__ = [
    "Copies",
    "catch_error",
    "optimizer_tensors",
    "random_tensors",
    "read_random",
    "restore_optimizer",
    "restore_parameters",
    "tensor_files",
    "write_tensors",
]

_FILE_BYTES = 2**30  # limit of a checkpoint's file: the ranks write files in turn


class Copies:
    """Copies of tensors in memory, at most `room` bytes, and the functions that write them to files. When a
    tensor does not fit, all copies are written, and later tensors are written at once."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._writes: list[Callable[[], object]] = []

    def take(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the CPU: as long as there is room, a copy that later steps do not change."""
        self._room = max(0, self._room - tensor.nbytes)
        on_cpu = tensor.detach().cpu().contiguous()
        return on_cpu.clone() if self._room and on_cpu.data_ptr() == tensor.data_ptr() else on_cpu

    def add(self, write: Callable[[], object]) -> None:
        """Queue a function that writes a file. If there is no room, call all queued functions now."""
        self._writes.append(write)
        if not self._room:
            self.write()

    def write(self) -> None:
        """Call the queued functions in order. Raise OSError if a file cannot be written."""
        while self._writes:
            self._writes.pop(0)()

    def writer(self) -> Callable[[], None] | None:
        """Return `write`; None if no function is queued."""
        return self.write if self._writes else None


def write_tensors(
    folder: Path,
    stem: str,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    writes: Callable[[int], bool],
    copies: Copies,
) -> str:
    """Iterate over all tensors; write this rank's share to `<stem>.safetensors`, or several files and an
    index under Hugging Face's names. Return the error as text, or an empty string. It is not raised, because
    all ranks assemble each tensor together: this rank must not stop before the others do.

    Args:
        writes: number of a file, from 0 -> whether this rank writes it. The rank of file 0 writes the index.
        copies: tensors that fit into its memory are written later.
    """
    files = _Files(folder, stem, writes, copies)
    problem = catch_error(lambda: folder.mkdir(parents=True, exist_ok=True))
    for name, tensor in tensors:
        if not problem:
            problem = catch_error(files.add, name, tensor)
    return problem or catch_error(files.close)


def catch_error(act: Callable[..., object], *arguments: Any) -> str:
    """Call a function that works on files. Return its error as text, or an empty string."""
    try:
        act(*arguments)
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of every error
        return f"{type(error).__name__}: {error}"
    return ""


class _Files:
    """The files of `write_tensors`. They are renamed at the end: the names contain the number of files."""

    def __init__(self, folder: Path, stem: str, writes: Callable[[int], bool], copies: Copies) -> None:
        self._folder = folder
        self._stem = stem
        self._writes = writes
        self._copies = copies
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._bytes = 0
        self._names: list[str] = []
        self._names_by_file: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._names and self._pending_bytes + size > _FILE_BYTES:
            self._flush()
        self._names.append(name)
        if self._writes(len(self._names_by_file)):
            self._pending[name] = self._copies.take(tensor)
        self._pending_bytes += size
        self._bytes += size

    def close(self) -> None:
        self._flush()
        self._copies.add(self._name_files)

    def _name_files(self) -> None:
        count = len(self._names_by_file)
        if count == 1:
            self._rename(0, f"{self._stem}.safetensors")
            return
        places: dict[str, str] = {}
        for index, names in enumerate(self._names_by_file):
            file = f"{self._stem}-{index + 1:05d}-of-{count:05d}.safetensors"
            self._rename(index, file)
            places |= dict.fromkeys(names, file)
        if self._writes(0):
            index_file = self._folder / f"{self._stem}.safetensors.index.json"
            index_file.write_text(json.dumps({"metadata": {"total_size": self._bytes}, "weight_map": places}))

    def _rename(self, index: int, name: str) -> None:
        if self._writes(index):
            self._part(index).rename(self._folder / name)

    def _flush(self) -> None:
        index = len(self._names_by_file)
        if self._writes(index):
            self._copies.add(partial(self._write, self._part(index), self._pending))
        self._names_by_file.append(self._names)
        self._names, self._pending, self._pending_bytes = [], {}, 0

    def _write(self, part: Path, tensors: dict[str, Tensor]) -> None:
        save_tensors(tensors, part, {"format": "pt"})
        part.chmod(self._folder.stat().st_mode & 0o666)  # without this, only the owner could read the file

    def _part(self, index: int) -> Path:
        return self._folder / f"{self._stem}-{index + 1:05d}.part"


def tensor_files(folder: Path, stem: str) -> dict[str, Any]:
    """Return tensor name -> the open safetensors file of `write_tensors` that has it; EngineError if there is
    no file."""
    paths = sorted(folder.glob(f"{stem}*.safetensors"))
    if not paths:
        raise EngineError(
            f"{folder} has no file {stem}.safetensors; without this folder the run resumes "
            "from an older checkpoint"
        )
    files: dict[str, Any] = {}
    for path in paths:
        file: Any = safe_open(path, framework="pt")
        files |= dict.fromkeys(file.keys(), file)
    return files


@torch.no_grad()
def restore_parameters(
    folder: Path, stem: str, parameters: Mapping[str, nn.Parameter], layout: Layout, prefix: str
) -> None:
    """Fill parameters from tensors `<prefix><name>`; EngineError if one is missing or of another shape."""
    files = tensor_files(folder, stem)
    for name, parameter in parameters.items():
        if (saved := f"{prefix}{name}") not in files:
            raise EngineError(
                f"{folder} has no tensor {prefix}{name!r}; was it saved with other lora.targets?"
            )
        _take(layout, parameter.data, files[saved].get_tensor(saved), name)


def _take(layout: Layout, into: Tensor, full: Tensor, name: str) -> None:
    if full.shape != into.shape:
        raise EngineError(f"{name!r} was saved with shape {tuple(full.shape)}; expected {tuple(into.shape)}")
    layout.take(into, full)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's tensors of the optimizer's state. Plain numbers in the state are left out."""
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{name}.{key}", value


@torch.no_grad()
def restore_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], layout: Layout
) -> None:
    """Restore the state that `optimizer_tensors` yielded. Another layout may have saved it."""
    for key, file in tensor_files(folder, "optimizer").items():
        name, _, entry = key.rpartition(".")
        if (parameter := parameters.get(name)) is None:
            continue
        full: Tensor = file.get_tensor(key)
        state = full.to(parameter.device)
        if full.ndim:
            state = torch.zeros_like(parameter, requires_grad=False)
            _take(layout, state, full, key)
        optimizer.state[parameter][entry] = state


def random_tensors(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the states of the random number generators."""
    yield "cpu", torch.get_rng_state()
    if is_gpu(device):
        yield "cuda", torch.get_device_module(device).get_rng_state()


def read_random(folder: Path, device: torch.device) -> None:
    """Set the random number generators to the saved states."""
    states = load_file(folder / "random.safetensors")
    torch.set_rng_state(states["cpu"])
    if is_gpu(device) and "cuda" in states:
        torch.get_device_module(device).set_rng_state(states["cuda"])
