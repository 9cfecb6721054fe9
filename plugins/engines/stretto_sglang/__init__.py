"""The inference engine `sglang`: each inference worker has its own SGLang server."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from stretto import Component, Problem, hookimpl
from stretto.config import RunConfig
from stretto.engine import Sampling
from stretto.models.files import known_config
from stretto.serving.config import ServerEngineConfig, check_server_engine

__all__ = ["LIKELIEST", "SglangConfig"]

LIKELIEST = 1024
"""Maximum number of tokens to draw from if `top_p`, `top_k` or `min_p` is used."""

_RESERVED = {
    "--model-path": "model",
    "--model": "model",
    "--config": "",
    "--host": "",
    "--port": "",
    "--api-key": "",
    "--admin-api-key": "",
    "--device": "inference.gpus",
    "--tp-size": "inference.tensor_parallel",
    "--tensor-parallel-size": "inference.tensor_parallel",
    "--max-running-requests": "inference.slots",
    "--context-length": "inference.context_length",
    "--dtype": "inference.dtype",
    "--mem-fraction-static": "inference.share",
    "--skip-tokenizer-init": "",
    "--incremental-streaming-output": "",
    "--weight-version": "",
    "--image-processor-backend": "",
    "--disable-fast-image-processor": "",
}


class SglangConfig(ServerEngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An SGLang server. Without `gpus` it runs on the CPU, with PyTorch's own attention; its cache then holds
    `slots` times `context_length` tokens. SGLang ignores the seeds of samples."""

    requirements: ClassVar[Path | None] = Path(__file__).with_name("requirements")
    sends_kept_tokens: ClassVar[bool] = True

    def unfit(self, sampling: Sampling) -> str:
        """Refuse `top_k` with `top_p`."""
        # A top_k of `LIKELIEST` always applies: the server returns at most this number of kept ids.
        if 0 < sampling.top_k < LIKELIEST and sampling.top_p < 1 and sampling.temperature > 0:
            return (
                f"top_k {sampling.top_k} with top_p {sampling.top_p:g}: SGLang applies top_p to the"
                " probability of all tokens, not to that of the top_k tokens; set only one of the two, or use"
                " another engine"
            )
        return ""


def _check(config: SglangConfig, run: RunConfig) -> Iterator[Problem]:
    yield from check_server_engine(config, run, "sglang", _RESERVED)
    kind = str(known_config(run.model).get("model_type", ""))
    if kind.startswith("llava"):
        yield Problem(
            "model", f"is of type {kind!r}: SGLang reads only its first image, in float16; use another engine"
        )


@hookimpl
def stretto_inference() -> Iterable[Component[SglangConfig]]:
    yield Component(
        name="sglang",
        factory="stretto_sglang.engine:SglangEngine",
        config=SglangConfig,
        summary="an SGLang server in its own interpreter, on GPU or CPU: exact versions, live swaps",
        check=_check,
        reads_images=True,
    )
