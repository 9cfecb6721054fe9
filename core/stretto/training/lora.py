"""(torch) LoRA adapters of a Hugging Face model in training, under the names of the model's files."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.component import Head
from stretto.errors import EngineError
from stretto.models.lora_files import FACTOR_A, FACTOR_B
from stretto.training.config import LoraConfig

__all__ = [
    "adapter_config",
    "adapter_factors",
    "add_adapters",
    "cast_frozen",
    "file_name",
    "linear_parameters",
    "merge_adapters",
    "published_tensors",
]


def add_adapters(model: PreTrainedModel, config: LoraConfig, head: Head, without: str = "") -> None:
    """Freeze the model and add adapters, in place, except in the module `without`. A value or reward head is
    trained in full. Raise EngineError if a target matches no linear module."""
    from peft import inject_adapter_in_model

    # A head with tied weights gets no adapter: the adapter would not change the embeddings.
    embeddings: Any = model.get_input_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if _is_linear(module) and cast("Any", module).weight is not embeddings.weight
        if not (without and name.startswith(f"{without}."))
    ]
    for target in config.targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            names = sorted({name.rpartition(".")[2] for name in linear})
            raise EngineError(
                f"training.lora.targets: {target!r} is no linear module of {type(model).__name__}; "
                f"there are {', '.join(names)}"
            )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    inject_adapter_in_model(adapter_config(model, config, "policy", "", without), model)
    if head != "policy":
        for name, parameter in model.named_parameters():
            if not name.startswith(f"{model.base_model_prefix}."):
                parameter.requires_grad_(True)


def cast_frozen(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the frozen weights of linear modules, in place, as autocast would at each use. A weight that
    the dtype cannot hold stays in float32, so no number changes. Embeddings, heads and norms stay in float32
    too, and so do the states between layers."""
    for parameter in linear_parameters(model):
        if not parameter.requires_grad:
            low = parameter.data.to(dtype)
            if torch.equal(low.float(), parameter.data):
                parameter.data = low


def linear_parameters(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    """Yield the parameters of linear modules, except embeddings and heads."""
    apart: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    others = {id(parameter) for module in apart if module is not None for parameter in module.parameters()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False) if _is_linear(module) else ():
            if id(parameter) not in others:
                yield parameter


def adapter_config(
    model: PreTrainedModel, config: LoraConfig, head: Head, source: str, without: str = ""
) -> Any:
    """Return peft's config of the adapters, and of a head that is trained in full; see `add_adapters`."""
    from peft import LoraConfig as PeftConfig

    heads = sorted(
        {name.partition(".")[0] for name, _ in model.named_parameters()} - {model.base_model_prefix}
    )
    return PeftConfig(
        base_model_name_or_path=source,
        task_type="CAUSAL_LM" if head == "policy" else "TOKEN_CLS",
        r=config.rank,
        lora_alpha=cast("Any", config.alpha),
        target_modules=[*config.targets],
        exclude_modules=rf"{re.escape(without)}\..*" if without else None,
        modules_to_save=None if head == "policy" else heads,
        fan_in_fan_out=any(_is_transposed(module) for module in model.modules()),
        inference_mode=bool(source),
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """Return whether this is a linear module of GPT-2, which has its own class and transposed weights."""
    return type(module).__name__ == "Conv1D"


def file_name(name: str) -> str:
    """Return a parameter's name in files: without the names that peft adds for its wrapper and adapter."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")


def published_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters (tied ones once) and the buffers that files contain, under the model's names."""
    saved_names = model.state_dict().keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in saved_names:
            yield name, tensor.detach()


def merge_adapters(
    tensors: Iterable[tuple[str, Tensor]], model: nn.Module, config: LoraConfig | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's own tensors with adapters merged, under the names of the files. `tensors` come
    as from `published_tensors`: a weight, then its adapter's factors. `model` may be one rank's share."""
    transposed = _transposed(model)
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        module, _, factor = name.partition(".lora_")
        if name.endswith(".base_layer.weight"):
            waiting[name.removesuffix(".base_layer.weight")] = tensor
        elif factor.startswith("A"):
            waiting[f"{module}.A"] = tensor
        elif factor.startswith("B"):
            assert config is not None
            delta = config.alpha / config.rank * (tensor @ waiting.pop(f"{module}.A"))
            weight = waiting.pop(module)
            delta = (delta.T if module in transposed else delta).to(weight.device)
            yield f"{module}.weight", weight + delta
        else:
            yield file_name(name), tensor


def adapter_factors(
    tensors: Iterable[tuple[str, Tensor]], model: nn.Module, config: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield adapters in the form of `stretto.models.lora_files`. `tensors` are full, named as in the files,
    A of a module before B. `model` may hold only this rank's parameters."""
    transposed = _transposed(model)
    a: Tensor | None = None
    for name, tensor in tensors:
        if name.endswith(FACTOR_A):
            a = tensor
            continue
        module, scale = name.removesuffix(FACTOR_B), config.alpha / config.rank
        assert a is not None
        left, right = (a.T, tensor.T) if module in transposed else (tensor, a)
        yield f"{module}{FACTOR_A}", right.contiguous()
        yield f"{module}{FACTOR_B}", (scale * left).contiguous()


def _transposed(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if getattr(module, "fan_in_fan_out", False)}
