"""The layout of `fsdp2`: data-parallel ranks that shard or copy the model, optionally split by tensor.

On a mesh (dp, tp), parameters are split by tensor first, then sharded over dp. FSDP2 averages the ranks'
gradients. A rank's loss is its part of the batch's loss, so it is multiplied by the number of ranks.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stretto import Context
from stretto.training.distributed import RankLayout
from stretto.training.model import layers_of
from stretto.training.token_head import ModelInputs
from stretto_fsdp2 import Fsdp2TrainingConfig
from stretto_fsdp2.tensor_parallel import split_by_tensor

_M_MMAP_THRESHOLD = -3  # of malloc.h


class ShardedLayout(RankLayout):
    """The layout of one rank. `width` is the number of tensor-parallel ranks."""

    def __init__(self, config: Fsdp2TrainingConfig, context: Context) -> None:
        super().__init__(config, context, width=config.tensor_parallel, inner="tp")
        self._shards = config.shard
        self.offloads = config.state == "host"
        self._reduce_dtype: torch.dtype = getattr(torch, config.reduce_dtype)
        self.autocast = not config.shard

    def distribute(self, model: PreTrainedModel) -> None:
        """Split the model by tensor, then shard it or move a full copy to the device."""
        if self.width > 1:
            split_by_tensor(model, self.mesh["tp"])
        if not self._shards:
            cast("nn.Module", model).to(self.device)
            return
        low = torch.bfloat16 if self._low else None
        root = MixedPrecisionPolicy(low, self._reduce_dtype, torch.float32 if low else None)
        # Only the root casts its output: the next layer expects the dtype that this one computes in.
        inner = MixedPrecisionPolicy(low, self._reduce_dtype)
        offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self.offloads else OffloadPolicy()
        for module in [*layers_of(model), model]:
            fully_shard(
                module,
                mesh=self.mesh["dp"],
                # By default the root's parameters stay gathered, and a later forward would use old ones.
                reshard_after_forward=True,
                mp_policy=root if module is model else inner,
                offload_policy=offload,
            )
        self._move_buffers(model)
        if self.device.type == "cpu":
            _return_freed_memory()

    def _move_buffers(self, model: nn.Module) -> None:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))

    def stream(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Gather and yield each full tensor, one after the other."""
        for name, tensor in tensors:
            if isinstance(tensor, DTensor):
                # Offloaded tensors are gathered on the device, because the mesh is there.
                tensor = cast("DTensor", tensor.detach().to(self.device)).full_tensor()
            yield name, tensor

    def take(self, into: Tensor, full: Tensor) -> None:
        """Copy this rank's shard of a full tensor: split by tensor, then over dp, like torch.chunk."""
        if isinstance(into, DTensor):
            mesh, placements = into.device_mesh, into.placements
            for dimension in reversed(range(mesh.ndim)):
                # Do not test for class Shard: a tensor split twice along one dimension has another class.
                placement: Any = placements[dimension]
                if not placement.is_replicate():
                    full = _piece(full, placement.dim, mesh.size(dimension), mesh.get_local_rank(dimension))
        self.local(into).copy_(full)

    def local(self, tensor: Tensor) -> Tensor:
        """See `RankLayout`."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def counts(self, name: str, parameter: Tensor) -> bool:
        """Return True if this rank is the first of the ranks that have the same data of the parameter."""
        del name
        sharded: set[str] = set()
        if isinstance(parameter, DTensor):
            placements = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
            sharded = {name for name, placement in placements if not placement.is_replicate()}
        return all(name in sharded or self.mesh.get_local_rank(name) == 0 for name in ("dp", "tp"))

    def backward(
        self, model: nn.Module, rows: Sequence[ModelInputs], loss_of: Callable[[int, Tensor], Tensor]
    ) -> None:
        """Run all micro-batches. FSDP2 reduces the gradient of each; full copies reduce once at the end."""
        if self._shards:
            super().backward(model, rows, lambda index, output: loss_of(index, output) * self.parts)
            return
        super().backward(model, rows, loss_of)
        gradients = [self._own_gradient(weight) for weight in model.parameters() if weight.grad is not None]
        if self.parts > 1 and gradients:
            self.add_up(gradients, self.mesh.get_group("dp"), self._reduce_dtype)

    def _own_gradient(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a gradient; autograd may have split it differently than the weight."""
        if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        assert parameter.grad is not None
        return self.local(parameter.grad)


def _return_freed_memory() -> None:
    """Make glibc return freed blocks of 1 MiB or more. By default it keeps blocks of up to 32 MiB, which
    gathering and freeing layers fragments so much that sharding saves no memory."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**20)


def _piece(full: Tensor, dim: int, count: int, index: int) -> Tensor:
    size = -(-full.shape[dim] // count)
    start = min(index * size, full.shape[dim])
    return full.narrow(dim, start, min(size, full.shape[dim] - start))
