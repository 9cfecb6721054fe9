"""(torch) The base of distributed layouts: the process group, the exchange of figures, the gradient norm.

Nothing is pickled: ranks send figures as JSON. On one machine the ranks find each other through a file, on
several machines through a store that rank 0 serves. Gloo listens on one network interface only.
"""

import json
import math
import os
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stretto.component import Context
from stretto.errors import EngineError
from stretto.machine.interfaces import address_towards, interface_with
from stretto.training.config import GroupTrainingConfig
from stretto.training.layout import Layout

__all__ = ["RankLayout"]

_LOOPBACK = "127.0.0.1"
# Number of engines in this process that use its process group.
_users = 0


class RankLayout(Layout):
    """A model over `processes` ranks: `parts` rows of `width` consecutive ranks. The ranks of a row compute
    one part together; `inner` names the mesh dimension along a row."""

    def __init__(self, config: GroupTrainingConfig, context: Context, *, width: int, inner: str) -> None:
        super().__init__(config, context)
        self._config = config
        self._context = context
        self._inner = inner
        self.rank = context.rank
        self.width = width
        self.parts = config.processes // width
        self._mesh: DeviceMesh | None = None

    @property
    def staging(self) -> torch.device:
        """The host's memory: the whole model may not fit on a device."""
        return torch.device("cpu")

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of shape (parts, width). Its dimensions are `dp` and the one that `inner` names."""
        assert self._mesh is not None, "connect comes first"
        return self._mesh

    def connect(self) -> None:
        """Join the process group, or create it; all engines of a process share it. Raise EngineError if the
        group has another number of ranks, or if there is no rendezvous; OSError if rank 0 is unreachable."""
        global _users
        if self._mesh is not None:
            return
        if not dist.is_initialized():
            self._begin()
        elif dist.get_world_size() != self._config.processes:
            raise EngineError(
                f"training.processes is {self._config.processes}; another engine of this process has a group "
                f"of {dist.get_world_size()}; put both models into one group, or into groups of the same size"
            )
        _users += 1
        names = ("dp", self._inner)
        self._mesh = init_device_mesh(self.device.type, (self.parts, self.width), mesh_dim_names=names)

    def _begin(self) -> None:
        config, context = self._config, self._context
        host, port = _address_in(context.rendezvous)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if config.interface or variable not in os.environ:
                os.environ[variable] = config.interface or interface_with(address_towards(host))
        # Gloo always carries the figures, and the parameters that are in the host's memory.
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if port:
            store: Any = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                host,
                port,
                config.processes,
                is_master=context.rank == 0,
                timeout=timedelta(seconds=config.timeout_s),
            )
        elif context.rendezvous:
            # Do not pass the path as `init_method`: in a URL, `#` and `%` have another meaning.
            store = dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
                context.rendezvous, config.processes
            )
        elif config.processes == 1:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        else:
            raise EngineError(
                f"{config.processes} ranks need a place to meet; Context.rendezvous is empty; "
                "give the path of a file, or tcp://HOST:PORT"
            )
        dist.init_process_group(
            backend,
            rank=context.rank,
            world_size=config.processes,
            timeout=timedelta(seconds=config.timeout_s),
            store=store,
        )

    def close(self) -> None:
        """Stop using the process group. The last engine that used it destroys it."""
        global _users
        if self._mesh is None:
            return
        self._mesh = None
        _users -= 1
        if not _users:
            dist.destroy_process_group()

    def gather_ranks(self, value: Any) -> list[Any]:
        """Return the value of every rank, in the order of the ranks; all ranks get the same list."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        ranks = self._config.processes
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(ranks)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = int(max(sizes))
        padded = torch.cat([data, torch.zeros(longest - len(data), dtype=torch.uint8)])
        gathered = [torch.zeros(longest, dtype=torch.uint8) for _ in range(ranks)]
        dist.all_gather(gathered, padded)
        return [
            json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(gathered, sizes, strict=True)
        ]

    @abstractmethod
    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's shard of a tensor. It shares the tensor's memory."""

    @abstractmethod
    def counts(self, name: str, parameter: Tensor) -> bool:
        """Return whether a sum over all ranks includes this shard: another rank may have the same numbers."""

    def add_up(
        self, tensors: Sequence[Tensor], group: dist.ProcessGroup, dtype: torch.dtype = torch.float32
    ) -> None:
        """Sum tensors over a group's ranks, in place, in one flat reduction in this dtype."""
        flat = torch.cat([tensor.flatten().to(dtype) for tensor in tensors])
        dist.all_reduce(flat, group=group)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))

    def clip(self, model: nn.Module, limit: float | None) -> float:
        """Clip the gradient by its norm over the shards of all ranks; each number counts once."""
        squares = torch.zeros((), dtype=torch.float64)
        gradients: list[Tensor] = []
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients.append(self.local(parameter.grad))
                if self.counts(name, parameter):
                    squares += gradients[-1].float().pow(2).sum(dtype=torch.float64).cpu()
        norm = math.sqrt(sum(self.gather_ranks(float(squares))))
        if limit is not None and math.isfinite(norm):
            factor = min(1.0, limit / (norm + 1e-6))
            for gradient in gradients:
                gradient.mul_(factor)
        return norm


def _address_in(rendezvous: str) -> tuple[str, int]:
    """Return the host and port of `tcp://HOST:PORT`; loopback and port 0 for the path of a file."""
    if not rendezvous.startswith("tcp://"):
        return _LOOPBACK, 0
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
