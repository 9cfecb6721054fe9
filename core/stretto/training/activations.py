"""(torch) Count what a micro-batch of a model holds in memory, before a run starts and without its weights.

The model's own code runs on fake tensors, which have a shape and a dtype but no memory. So the count holds
for each architecture that transformers can build, with autocast, adapters, checkpointing and the head's
chunks. `stretto check` counts in a child process, because importing torch takes seconds.
"""

import sys
import weakref
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from stretto.rl.batch import Batch
from stretto.training.config import LoraConfig
from stretto.training.lora import add_adapters, linear_parameters
from stretto.training.memory import CHUNK_BYTES, Counted, MicroBatchShape
from stretto.training.model import checkpoint_activations, empty_model
from stretto.training.packing import InputRows
from stretto.training.token_head import ModelInputs, Wanted, return_figures
from stretto.training.trial import attempt

__all__ = ["count"]


def count(micro_batch: MicroBatchShape) -> Counted:
    """Count the bytes of a micro-batch and of its model."""
    counted, fault = attempt(partial(_count, micro_batch))
    if counted is None and micro_batch.may_be_packed:  # the trainer's trial fails as well, and it pads rows
        counted, fault = attempt(partial(_count, replace(micro_batch, may_be_packed=False)))
    return counted or Counted(fault=fault)


def _count(micro_batch: MicroBatchShape) -> Counted:
    with torch.device("meta"):
        model, rows = empty_model(micro_batch.model, micro_batch.head, micro_batch.may_be_packed)
        if micro_batch.rank:
            adapters = LoraConfig(rank=micro_batch.rank, targets=micro_batch.targets)
            add_adapters(model, adapters, micro_batch.head)
        elif not micro_batch.trainable:
            model.requires_grad_(False)
        if micro_batch.gradient_checkpointing:
            checkpoint_activations(model)
    chunk = CHUNK_BYTES[micro_batch.on_gpu]
    chunk_bytes = chunk if micro_batch.chunked_logits else None
    return_figures(model, micro_batch.head, None, chunk_bytes=chunk_bytes)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        _make_fake(model, micro_batch)
    parameters = list(model.parameters())
    # FSDP2 keeps float32 and casts what it gathers.
    weights = sum(4 * weight.numel() if micro_batch.gathered else weight.nbytes for weight in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    number = sum(parameter.numel() for parameter in parameters)
    inputs = _inputs(rows, micro_batch)

    def measure() -> tuple[int, int]:
        with fake, _Meter(model) as meter:
            _compute(model, inputs, micro_batch)
        return meter.casts, meter.activations

    layers = _equal_layers(model)
    more = max(0, len(layers) - 3)  # each adds the same bytes, so two and three layers tell those of all
    del layers[len(layers) - more :]
    casts, activations = measure()
    if more:
        del layers[2:]
        less_casts, less_activations = measure()
        casts += more * (casts - less_casts)
        activations += more * (activations - less_activations)
    return Counted(weights, number, trained, casts, activations)


def _equal_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the model's list of layers, if they do not differ; otherwise an empty list."""
    number = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == number]
    return lists[0] if len(lists) == 1 and len({*map(_form, lists[0])}) == 1 else nn.ModuleList()


def _form(layer: nn.Module) -> str:
    """Return the modules of a layer with their numbers and names, and the shapes of its weights."""
    values = [
        (type(part), name, value)
        for part in layer.modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float | str) and name != "layer_idx"
    ]
    return str((values, [weight.shape for weight in layer.parameters()]))


def _make_fake(model: PreTrainedModel, micro_batch: MicroBatchShape) -> None:
    """Replace meta tensors by fake ones, in the dtypes that the engine keeps."""
    cast_once = {
        id(weight)
        for weight in linear_parameters(model)
        if (micro_batch.has_masters if weight.requires_grad else micro_batch.lossless)
    }
    made: dict[int, nn.Parameter] = {}

    def fake_of(parameter: nn.Parameter) -> nn.Parameter:
        is_low = micro_batch.low and (id(parameter) in cast_once or micro_batch.gathered)
        data = torch.empty(parameter.shape, dtype=torch.bfloat16 if is_low else torch.float32)
        fake = nn.Parameter(data, requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            fake.register_post_accumulate_grad_hook(_drop_gradient)
        return fake

    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                made[id(parameter)] = fake_of(parameter)
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _drop_gradient(parameter: Tensor) -> None:
    """Free a new gradient. A real one is added to the gradient of earlier micro-batches, and then freed."""
    parameter.grad = None


def _inputs(rows: InputRows, micro_batch: MicroBatchShape) -> ModelInputs:
    number, rest = divmod(micro_batch.tokens, micro_batch.length)
    lengths = [micro_batch.length] * number + ([rest] if rest else [])
    batch = Batch(lengths, {"tokens": torch.zeros(micro_batch.tokens, dtype=torch.long)}, {})
    at = (batch.positions() > 0).nonzero().squeeze(1) - 1
    inputs = rows.inputs(batch, Wanted(at, batch["tokens"][at + 1]), torch.device("cpu"))
    inputs.arguments.pop("attention_mask", None)  # some models read its numbers, and there are none
    return inputs


def _compute(model: Any, inputs: ModelInputs, micro_batch: MicroBatchShape) -> None:
    low = micro_batch.low and not micro_batch.gathered
    with torch.set_grad_enabled(micro_batch.trainable):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            figures: Tensor = model(**inputs.arguments, wanted=inputs.wanted)
        if micro_batch.trainable:
            figures.sum().backward()


class _Meter(TorchDispatchMode):
    """Counts the bytes of the tensors that live, of those made inside it, and keeps the highest sum."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = {id(parameter.untyped_storage()) for parameter in model.parameters()}
        self._sizes: dict[int, tuple[int, bool]] = {}
        """Storage -> its bytes, and whether it is a copy of a parameter in another dtype."""
        self._now = {True: 0, False: 0}
        self.casts, self.activations = 0, 0
        """Bytes at the moment with the highest sum."""

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        is_cast = (
            function is torch.ops.aten._to_copy.default and id(args[0].untyped_storage()) in self._parameters
        )
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage(), is_cast)
        return result

    def _add(self, storage: torch.UntypedStorage, is_cast: bool) -> None:
        key = id(storage)
        if key in self._sizes or key in self._parameters:
            return
        self._sizes[key] = storage.nbytes(), is_cast
        self._now[is_cast] += storage.nbytes()
        weakref.finalize(storage, self._remove, key)
        if sum(self._now.values()) > self.casts + self.activations:
            self.casts, self.activations = self._now[True], self._now[False]

    def _remove(self, key: int) -> None:
        size, is_cast = self._sizes.pop(key)
        self._now[is_cast] -= size


def _main() -> None:
    for line in sys.stdin.buffer:
        with redirect_stdout(sys.stderr):  # a model's code may print
            counts = [count(each) for each in msgspec.json.decode(line, type=list[MicroBatchShape])]
        sys.stdout.buffer.write(msgspec.json.encode(counts) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _main()
