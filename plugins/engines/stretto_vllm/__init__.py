"""The inference engine `vllm`: each inference worker has its own vLLM server."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from stretto import Component, Problem, hookimpl
from stretto.component import PositiveInt
from stretto.config import RunConfig
from stretto.engine import Sampling
from stretto.models.files import text_config
from stretto.serving.config import ServerEngineConfig, check_server_engine

__all__ = ["VllmConfig"]

_CPU_HEAD_DIM = 32  # smallest that vLLM supports
_TEMPERATURES = 0.01, 2.0  # smallest and largest that vLLM supports, besides 0

_RESERVED = {
    "--model": "model",
    "--served-model-name": "",
    "--host": "",
    "--port": "",
    "--uds": "",
    "--api-key": "",
    "--middleware": "",
    "--tensor-parallel-size": "inference.tensor_parallel",
    "--max-num-seqs": "inference.slots",
    "--max-model-len": "inference.context_length",
    "--dtype": "inference.dtype",
    "--gpu-memory-utilization": "inference.share",
    "--logprobs-mode": "",
    "--enable-scale-out": "",
    "--worker-extension-cls": "",
    "--mm-processor-kwargs": "",
}


class VllmConfig(ServerEngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vLLM server. Without `gpus` it runs on the CPU, where attention heads of a dimension below 32 are not
    supported."""

    requirements: ClassVar[Path | None] = Path(__file__).with_name("requirements")

    kv_cache_gb: PositiveInt = 1
    """Without GPUs: memory of the KV cache in GiB. On GPUs the cache gets the memory that `share` leaves."""

    def unfit(self, sampling: Sampling) -> str:
        """Refuse temperatures that vLLM refuses, or replaces by 0.01 without a message."""
        low, high = _TEMPERATURES
        if sampling.temperature and not low <= sampling.temperature <= high:
            return (
                f"temperature {sampling.temperature:g}: vLLM supports 0 and {low:g} to {high:g}; set one of "
                "these, or use another engine"
            )
        return ""


def _check(config: VllmConfig, run: RunConfig) -> Iterator[Problem]:
    yield from check_server_engine(config, run, "vllm", _RESERVED)
    model = text_config(run.model)
    heads, width = model.get("num_attention_heads"), model.get("hidden_size")
    dim = model.get("head_dim") or (width // heads if heads and width else None)
    if not config.urls and not config.gpus and dim is not None and dim < _CPU_HEAD_DIM:
        yield Problem(
            "model",
            f"has attention heads of dimension {dim}; vLLM on CPU needs at least {_CPU_HEAD_DIM}: use another"
            " engine or GPUs",
        )


@hookimpl
def stretto_inference() -> Iterable[Component[VllmConfig]]:
    yield Component(
        name="vllm",
        factory="stretto_vllm.engine:VllmEngine",
        config=VllmConfig,
        summary="a vLLM server in its own interpreter, on GPU or CPU: exact versions, live swaps",
        check=_check,
        reads_images=True,
    )
