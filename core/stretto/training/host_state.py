"""(torch) Trained parameters in float32 on the host, and the copies with which a model computes."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.training.lora import linear_parameters

__all__ = ["HostState"]


class HostState:
    """The float32 masters of a model's trained parameters. The model gets copies, which may move to a GPU.

    Copies of linear modules have `dtype`, to which autocast would convert them at each use, so no number
    changes. The gradient of each micro-batch is added to that of the master, in float32, and then freed.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        linear = {id(parameter) for parameter in linear_parameters(model)}
        self.masters: dict[Tensor, nn.Parameter] = {}
        """Parameter of the model -> its master."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                self.masters[parameter] = nn.Parameter(parameter.data)
                copy_dtype = dtype if id(parameter) in linear else parameter.dtype
                parameter.data = parameter.data.to(copy_dtype, copy=True)
                parameter.register_post_accumulate_grad_hook(self._take_gradient)

    def _take_gradient(self, parameter: Tensor) -> None:
        master, gradient = self.masters[parameter], parameter.grad
        assert gradient is not None
        parameter.grad = None
        if master.grad is None:
            master.grad = gradient.to(master)
        else:
            master.grad += gradient.to(master)

    @torch.no_grad()
    def update_copies(self) -> None:
        """Give the model the numbers of the masters."""
        for parameter, master in self.masters.items():
            parameter.copy_(master)
