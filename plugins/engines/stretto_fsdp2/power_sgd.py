"""(torch) Gradients reduced over ranks as products of two thin matrices: PowerSGD.

PowerSGD (Vogels, Karimireddy, Jaggi 2019, arXiv 1905.13727, algorithms 1 and 2) approximates the mean
gradient M (n, m) of each matrix by P Qᵀ; ranks exchange only P (n, r) and Q (m, r). Each rank adds what the
approximation left out to its next gradient (error feedback). The arithmetic is that of PyTorch's hook for
DDP, with all gradients as one bucket after the last micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorch

from stretto.errors import EngineError

if TYPE_CHECKING:
    from stretto_fsdp2 import PowerSgdConfig

# PyTorch logs its hyperparameters and statistics as if there were something to do about them.
logging.getLogger(pytorch.__name__).setLevel(logging.WARNING)

_BUCKET = 0


class PowerSgd:
    """The reduction of gradients over the ranks of a group, with the state that it carries between steps."""

    def __init__(self, config: PowerSgdConfig, group: dist.ProcessGroup) -> None:
        self._config = config
        self._group = group
        self._state = self._new_state(steps=0)

    def add_up(self, gradients: Sequence[Tensor]) -> None:
        """Replace each rank's gradients by the approximate sum over all ranks, in place. If the sum is not
        finite, the optimizer skips the step, and the carried state, also not finite, is replaced."""
        bucket = _Bucket(gradients)
        pytorch.powerSGD_hook(self._state, bucket).wait()  # pyright: ignore[reportArgumentType]
        for gradient, mean in zip(gradients, bucket.gradients(), strict=True):
            gradient.copy_(mean.view_as(gradient)).mul_(self._group.size())
        if not bucket.buffer().isfinite().all():
            self._state = self._new_state(self._state.iter)

    @property
    def compression(self) -> float:
        """Size of the gradients / size of what was sent, in compressed steps; 0 before the first of these."""
        return float(self._state.compression_stats()[0])

    def carried(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the number of steps, the matrices, and the error of every rank; all ranks yield the same."""
        state = self._state
        yield "steps", torch.tensor(state.iter)
        yield "rank", torch.tensor(self._config.rank)
        if _BUCKET not in state.error_dict:
            return
        yield "p", state.p_memory_dict[_BUCKET]
        yield "q", state.q_memory_dict[_BUCKET]
        own_error = state.error_dict[_BUCKET]
        for rank in range(self._group.size()):
            error = own_error.clone() if rank == self._group.rank() else torch.empty_like(own_error)
            dist.broadcast(error, group=self._group, group_src=rank)
            yield f"error.{rank}", error

    def restore(self, carried: Mapping[str, Tensor], gradient_size: int, device: torch.device) -> None:
        """Restore the state that `carried` yielded. If the number of ranks changes, each gets an equal part
        of the sum of all errors. If the rank of the matrices changes, the matrices begin at random."""
        state = self._new_state(int(carried["steps"]))
        self._state = state
        errors = sum(name.startswith("error.") for name in carried)
        if not errors:
            return
        ranks, rank = self._group.size(), self._group.rank()
        if errors == ranks:
            error = carried[f"error.{rank}"]
        else:
            error = torch.stack([carried[f"error.{index}"] for index in range(errors)]).sum(0) / ranks
        if error.numel() != gradient_size:
            raise EngineError(
                f"the checkpoint has PowerSGD's errors of {error.numel()} numbers, and the gradients of this "
                f"model have {gradient_size}: was it saved with other lora.targets?"
            )
        state.error_dict[_BUCKET] = error.to(device)
        if int(carried["rank"]) == self._config.rank:
            state.p_memory_dict[_BUCKET] = carried["p"].to(device)
            state.q_memory_dict[_BUCKET] = carried["q"].to(device)

    def _new_state(self, steps: int) -> pytorch.PowerSGDState:
        state = pytorch.PowerSGDState(
            self._group,
            matrix_approximation_rank=self._config.rank,
            start_powerSGD_iter=self._config.after_steps,
            orthogonalization_epsilon=1e-8,  # pyright: ignore[reportArgumentType] - a gradient may be 0
        )
        state.iter = steps
        return state


class _Bucket:
    """All gradients as one bucket, with the methods of PyTorch's `GradBucket` that the hook calls."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._buffer = torch.cat([gradient.flatten().float() for gradient in gradients])
        pieces = self._buffer.split([gradient.numel() for gradient in gradients])
        self._gradients = [
            piece.view(gradient.shape or 1) for gradient, piece in zip(gradients, pieces, strict=True)
        ]

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def index(self) -> int:
        return _BUCKET

    def is_last(self) -> bool:
        return True
