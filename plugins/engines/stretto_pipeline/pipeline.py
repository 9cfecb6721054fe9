"""The layout of `pipeline`: pipelines of stages, run by stretto's own 1F1B schedule.

Micro-batches may have any shape: every stage has the batch and knows the shapes that it receives. Stages
exchange only hidden states and their gradients. Each data-parallel part has its own pipeline (a "line" of
ranks); the ranks with the same stage add up their gradients at the end.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto import Context
from stretto.training.distributed import RankLayout
from stretto.training.token_head import ModelInputs
from stretto_pipeline import PipelineTrainingConfig
from stretto_pipeline.schedule import Neighbours, run_backward, run_forward
from stretto_pipeline.stage import Stage


class PipelineLayout(RankLayout):
    """The layout of one rank. `width` is the number of stages."""

    def __init__(self, config: PipelineTrainingConfig, context: Context) -> None:
        super().__init__(config, context, width=config.stages, inner="stage")
        self._index = context.rank % config.stages
        self._aliases: dict[str, str] = {}

    def connect(self) -> None:
        """Make the mesh and three groups for each pipeline: one for hidden states, one for gradients, as
        neither may wait for the other, and one of the first and the last stage."""
        if self._mesh is not None:
            return
        super().connect()
        width = self.width
        for part in range(self.parts):
            line = list(range(part * width, (part + 1) * width))
            groups: list[Any] = [dist.new_group(ranks) for ranks in (line, line, sorted({line[0], line[-1]}))]
            if self.rank in line:
                self._line, self._group, self._ends = line, groups[0], groups[2]
                self._neighbours = Neighbours(line, self._index, self.device, *groups[:2])

    def distribute(self, model: PreTrainedModel) -> None:
        """Cut the model down to this rank's stage."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._stage = Stage(model, self._index, self.width)
        self._tied = self._stage.tied if self.width > 1 else None
        if self._tied is not None:
            own_name = next(name for name, parameter in model.named_parameters() if parameter is self._tied)
            self._aliases = {own_name: names[id(self._tied)]}
        cast("nn.Module", model).to(self.device)

    def name(self, own: str) -> str:
        """Return a tensor's published name: a tied copy in the last stage has the name of the embedding."""
        return self._aliases.get(own, own)

    def stream(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Broadcast each tensor to the whole pipeline and yield it, stage after stage."""
        detached = {name: tensor.detach() for name, tensor in tensors}
        own_types = {name: (list(tensor.shape), str(tensor.dtype)[6:]) for name, tensor in detached.items()}
        sent: set[str] = set()
        for stage, names in enumerate(self.gather_ranks(own_types)[: self.width]):
            for name, (shape, dtype) in names.items():
                if name in sent:  # the copy of a tied embedding
                    continue
                sent.add(name)
                if stage == self._index:
                    tensor = detached[name].to(self.device).contiguous()
                else:
                    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                dist.broadcast(tensor, self._line[stage], group=self._group)
                yield name, tensor

    def local(self, tensor: Tensor) -> Tensor:
        """See `RankLayout`."""
        return tensor

    def counts(self, name: str, parameter: Tensor) -> bool:
        """Return True in the first pipeline, if the parameter is not a copy of a tied embedding."""
        del parameter
        return self.rank < self.width and self.name(name) == name

    def share(self, output: Tensor) -> Tensor:
        """Broadcast the output from the last stage to the others."""
        dist.broadcast(output, self._line[-1], group=self._group)
        return output

    def forward(
        self, model: nn.Module, rows: Sequence[ModelInputs], take: Callable[[int, Tensor], object]
    ) -> None:
        """Run all micro-batches through this stage, without gradients."""
        del model
        run_forward(self._neighbours, self._shapes(rows), self._compute_for(rows), take)

    def backward(
        self, model: nn.Module, rows: Sequence[ModelInputs], loss_of: Callable[[int, Tensor], Tensor]
    ) -> None:
        """Run 1F1B. Then the ranks of each stage add up their gradients, and the first and last stage those
        of a tied embedding."""
        run_backward(self._neighbours, self._shapes(rows), self._compute_for(rows), loss_of)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if self.parts > 1 and gradients:
            self.add_up(gradients, self.mesh.get_group("dp"))
        if self._tied is not None and self._tied.grad is not None:
            self.add_up([self._tied.grad], self._ends)

    def _shapes(self, rows: Sequence[ModelInputs]) -> list[tuple[int, ...]]:
        return [self._stage.shape(row.arguments) for row in rows]

    def _compute_for(self, rows: Sequence[ModelInputs]) -> Callable[[int, Tensor | None], Tensor]:
        def compute(index: int, hidden: Tensor | None) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self._low):
                return self._stage.compute(rows[index], hidden)

        return compute
