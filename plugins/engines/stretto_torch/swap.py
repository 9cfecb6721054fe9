"""The steps of a weight swap. Checking and hashing run outside the compute thread, without a pause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from stretto.errors import WeightsError, nearest
from stretto_torch.linear import Linear


@dataclass(frozen=True, slots=True)
class Target:
    """The place where a decoder keeps one tensor of the checkpoint."""

    into: Tensor  # a view of the decoder's own weights, shaped like the tensor
    order: Tensor | None = None  # order of the tensor's rows in `into`; None keeps the order
    factor: float = 1.0  # factor of the tensor's values in `into`

    def load(self, tensor: Tensor) -> None:
        """Copy the tensor into place, converting dtype and device."""
        self.into.copy_(tensor if self.order is None else tensor[self.order])
        if self.factor != 1.0:
            self.into.mul_(self.factor)


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of all tensors that a decoder serves, by Hugging Face name."""

    by_name: Mapping[str, Target]
    tied: frozenset[str] = frozenset()
    """Additional names that a checkpoint may hold, for tensors that share memory with one of `by_name`."""
    products: Sequence[Linear] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """The decoder's own weights, of which some may share memory."""
        return [target.into for target in self.by_name.values()]

    def unpack(self) -> None:
        """Drop the packed copies of weights until the next `load`."""
        for product in self.products:
            product.unpack()

    def renamed(self, names: Mapping[str, str]) -> Targets:
        """Return the same targets with new names. `names`: old name -> new name, for names that change."""
        by_name = {names.get(name, name): target for name, target in self.by_name.items()}
        tied = frozenset(names.get(name, name) for name in self.tied)
        return Targets(by_name, tied, self.products)

    def check(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Check that the tensors are the model's, by name, shape and kind of number."""
        for name, target in self.by_name.items():
            if name not in tensors:
                raise WeightsError(f"version {version} lacks the tensor {name!r}", version=version)
            tensor, expected = tensors[name], target.into
            if tensor.shape != expected.shape:
                raise WeightsError(
                    f"{name!r} of version {version} has shape {tuple(tensor.shape)};"
                    f" the model's has {tuple(expected.shape)}",
                    version=version,
                )
            if tensor.is_floating_point() != expected.is_floating_point():
                raise WeightsError(
                    f"{name!r} of version {version} is {tensor.dtype}; the model's is {expected.dtype}",
                    version=version,
                )
        for name in tensors:
            if name not in self.by_name and name not in self.tied:
                raise WeightsError(
                    f"version {version} has a tensor {name!r} that the model lacks"
                    f"{nearest(name, self.by_name)}",
                    version=version,
                )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into place; they belong to a set that passed `check`."""
        for name, tensor in tensors.items():
            if name not in self.tied:
                self.by_name[name].load(tensor)
        for product in self.products:
            product.pack()


def tied_names(state: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of tensors that share their memory with an earlier one. Checkpoints omit them."""
    pointers: set[int] = set()
    tied: set[str] = set()
    for name, tensor in state.items():
        if tensor.data_ptr() in pointers:
            tied.add(name)
        pointers.add(tensor.data_ptr())
    return frozenset(tied)
