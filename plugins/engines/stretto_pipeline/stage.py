"""One stage of a model: the Hugging Face model itself, without the modules of the other stages.

Placeholders that return their input replace the layers of other stages. So every module keeps its name, and
every layer keeps its number, by which the model chooses the layer's mask.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.errors import EngineError
from stretto.training.token_head import ModelInputs


class _Elsewhere(nn.Module):
    """The placeholder of a layer that another stage computes."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class Stage:
    """Stage `index` of `count`, with the modules that it computes. Removes the others from the model."""

    def __init__(self, model: PreTrainedModel, index: int, count: int) -> None:
        self.is_first = index == 0
        self.is_last = index == count - 1
        self._base: Any = model.base_model
        missing = [name for name in ("embed_tokens", "layers", "norm") if not hasattr(self._base, name)]
        if missing:
            raise EngineError(
                f"pipeline does not know how to split {type(model).__name__}: it has no "
                f"{', '.join(missing)}; use fsdp2"
            )
        self._model: Any = model
        self.hidden_size: int = model.config.get_text_config().hidden_size
        tied = _tied_weight(model)
        self.tied = tied if self.is_first or self.is_last else None
        """The tied weight in the first and the last stage, which both hold it; None in other stages."""
        layers = len(self._base.layers)
        if layers < count:
            raise EngineError(f"training.stages is {count}; it must be at most the model's layers, {layers}")
        numbers = range(index * layers // count, (index + 1) * layers // count)
        self._keep_layers(numbers)

    def _keep_layers(self, numbers: range) -> None:
        base, model = self._base, self._model
        layers = {number: base.layers[number] for number in numbers}
        norm = base.norm
        base.layers = nn.ModuleList([_Elsewhere() for _ in range(len(base.layers))])
        base.norm = nn.Identity()
        _check_nothing_else(model)
        for number, layer in layers.items():
            base.layers[number] = layer
        if self.is_last:
            base.norm = norm
        else:
            for name, _ in list(model.named_children()):
                if name != model.base_model_prefix:
                    setattr(model, name, nn.Identity())
        if not self.is_first:
            base.embed_tokens = nn.Identity()

    def shape(self, arguments: dict[str, Any]) -> tuple[int, ...]:
        """Return the shape of the hidden states of a micro-batch."""
        return (*arguments["input_ids"].shape, self.hidden_size)

    def compute(self, inputs: ModelInputs, hidden: Tensor | None) -> Tensor:
        """Return the hidden states for the next stage; in the last stage, the wanted tokens' figures."""
        arguments = dict(inputs.arguments)
        if hidden is not None:
            del arguments["input_ids"]
            arguments["inputs_embeds"] = hidden
        if self.is_last:
            return self._model(**arguments, wanted=inputs.wanted)
        return self._base(**arguments).last_hidden_state


def _tied_weight(model: PreTrainedModel) -> nn.Parameter | None:
    embedding, head = cast("Any", model.get_input_embeddings()), cast("Any", model.get_output_embeddings())
    return head.weight if head is not None and head.weight is embedding.weight else None


@torch.no_grad()
def _check_nothing_else(model: Any) -> None:
    """Check that the model computes nothing but layers and norm: every stage would repeat other work."""
    base = model.base_model
    ids = torch.arange(4, device=model.device)[None]
    embedded = base.embed_tokens(ids)
    for arguments in ({"input_ids": ids}, {"inputs_embeds": embedded}):
        try:
            output = base(**arguments, use_cache=False).last_hidden_state
        except (AttributeError, TypeError, ValueError) as error:
            raise EngineError(
                f"pipeline does not know how to split {type(model).__name__}: {error}; use fsdp2"
            ) from error
        if not torch.equal(output, embedded):
            raise EngineError(
                f"pipeline does not know how to split {type(model).__name__}: it computes something "
                "between its embedding, layers and norm; use fsdp2"
            )
