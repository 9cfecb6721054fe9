"""Tensor parallelism for decoders of the Llama type: how each module is split.

Projections of queries, keys, values and feed-forward inputs are split by output, output projections by input,
embedding and head by vocabulary. Between modules every rank has all hidden states and logits.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from stretto.errors import EngineError
from stretto.training.model import layers_of

_BY_OUTPUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_BY_INPUT = ("self_attn.o_proj", "mlp.down_proj")


def split_by_tensor(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split a model over the ranks of a one-dimensional mesh, in place."""
    check_splits(model, mesh.size())
    layer_plan: dict[str, Any] = {name: ColwiseParallel() for name in _BY_OUTPUT}
    layer_plan |= {name: RowwiseParallel() for name in _BY_INPUT}
    for layer in layers_of(model):
        parallelize_module(layer, mesh, layer_plan)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    if isinstance(head, nn.Module):
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
        if tied:  # parallelize_module gives embedding and head separate weights
            head.weight = embedding.weight


def check_splits(model: PreTrainedModel, ranks: int) -> None:
    """Raise EngineError if a model cannot be split over this number of ranks."""
    kind = type(model).__name__
    layers = layers_of(model)
    if not layers:
        raise EngineError(f"training.tensor_parallel: the layers of {kind} are not known")
    for layer in layers:
        linear_names = {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        expected = {*_BY_OUTPUT, *_BY_INPUT}
        if linear_names != expected:
            raise EngineError(
                f"training.tensor_parallel does not know how to split {kind}: its layers have the linear "
                f"modules {', '.join(sorted(linear_names))}; expected {', '.join(sorted(expected))}; "
                "set it to 1: fsdp2 alone shards such a model"
            )
        module_names = {name.rpartition(".")[2] for name, _ in layer.named_modules()}
        if norms := sorted(module_names & {"q_norm", "k_norm"}):
            raise EngineError(
                f"training.tensor_parallel does not know how to split {kind}: its attention has "
                f"{' and '.join(norms)}, whose full gradients no rank would have; set it to 1: "
                "fsdp2 alone shards such a model"
            )
    config: Any = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, key) % ranks:
            raise EngineError(
                f"training.tensor_parallel is {ranks}; it must divide {key}, {getattr(config, key)}"
            )
