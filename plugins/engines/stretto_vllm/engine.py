"""Send requests to a vLLM server, and read its replies.

Streams go to /inference/v1/generate with token ids. The server returns token ids with logprobs of the
distribution they were drawn from (`--logprobs-mode processed_logprobs`), and at the end the weight versions.
Weights go through stretto's worker extension (`in_server/stretto_in_vllm.py`).
"""

import json
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec

from stretto.component import Context
from stretto.engine import Finish, Sampling
from stretto.errors import EngineError, WeightsError
from stretto.launcher import ALLOCATOR_VARIABLES
from stretto.serving.config import Flag, flags, interpreter_of
from stretto.serving.engine import ServerEngine
from stretto.serving.images import ServerText
from stretto.serving.server import Server, ServerCommand, ServerLost, ServerRefused
from stretto.serving.streams import FINISH_REASONS, Ask, StreamChunk, VersionSpan
from stretto.weights import WeightUpdate
from stretto_vllm import VllmConfig

_IN_SERVER = Path(__file__).with_name("in_server")
_EXTENSION = "stretto_in_vllm.Weights"
_CALL_S = 30.0  # deadline of a call that needs no loading
_READ_S = 300.0  # time to read the files of a version
_LOAD_S = 300.0  # deadline of a load
_ASK_EVERY_S = 0.02
_BATCH = 2048  # tokens that a step on CPU may compute; more if the longest sample has more
_PILLOW = '{"use_fast": false}'  # stretto's own image processors resize with Pillow; torchvision differs
_GPU_SHARE = 0.9  # of the worker's share of the GPU: vLLM does not count the memory that CUDA itself needs


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob]


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


class _VLLMFault(msgspec.Struct, gc=False):
    message: str = ""
    code: int = 500


class _PromptUsage(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens_details: _PromptUsage | None = None


class _VLLMEvent(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: _VLLMFault | None = None


_EVENT = msgspec.json.Decoder(_VLLMEvent)


class VllmEngine(ServerEngine):
    """An engine whose server is vLLM 0.32."""

    health = "/health"

    def __init__(self, config: VllmConfig, context: Context) -> None:
        super().__init__(config, context)
        self._vllm = config
        self._hashes: Mapping[str, str] = {}

    def command(self, port: int, key: str) -> ServerCommand:
        """Return the command `vllm serve`, with the development endpoints for weights, all behind the key."""
        config = self._vllm
        opts: dict[str, Flag] = {
            "--host": "127.0.0.1",
            "--port": port,
            "--served-model-name": "policy",
            "--tensor-parallel-size": config.tensor_parallel,
            "--max-num-seqs": config.most_running,
            "--max-model-len": self._room,
            "--dtype": config.compute_dtype,
            "--logprobs-mode": "processed_logprobs",
            "--enable-scale-out": True,
            "--enable-prompt-tokens-details": True,
            "--worker-extension-cls": _EXTENSION,
            "--middleware": "stretto_in_vllm.RequireKey",
            "--uvicorn-log-level": "warning",
            "--enforce-eager": not config.gpus,  # compiling takes minutes
        }
        if self._reads_images:
            opts["--mm-processor-kwargs"] = _PILLOW
        env = {
            "PYTHONPATH": str(_IN_SERVER),
            "VLLM_API_KEY": key,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if config.gpus:
            opts["--enable-sleep-mode"] = config.sleeps
            if config.sleeps:  # its memory pool refuses expandable segments, which a user's shell may set
                env |= dict.fromkeys(ALLOCATOR_VARIABLES, "")
            opts["--gpu-memory-utilization"] = round(_GPU_SHARE * config.share, 3)
        else:
            # vLLM 0.32 on CPU crashes on a seeded sample whose prompt is computed in chunks.
            opts |= {"--no-enable-chunked-prefill": True, "--max-num-batched-tokens": max(_BATCH, self._room)}
            # Without "nobind" vLLM uses all cores, whatever `threads` of the worker is.
            env |= {"VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gb), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if Path(self._model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        module = (interpreter_of(config), "-m", "vllm.entrypoints.cli.main", "serve", self._model)
        return ServerCommand((*module, *flags(opts, config.args)), env | config.env)

    async def greet(self, server: Server) -> None:
        """Check the server's key, extension and settings, such as logprobs of the sampled distribution."""
        try:
            models = await server.get("/v1/models", deadline_s=_CALL_S)
            room = models["data"][0]["max_model_len"]
            info = await server.get("/server_info?config_format=json", deadline_s=_CALL_S)
            images = info["vllm_config"]["model_config"]["multimodal_config"]
            block = info["vllm_config"]["cache_config"]["block_size"]
            await self._rpc(server, "stretto_loads", deadline_s=_CALL_S)
        except (ServerRefused, ServerLost, KeyError, IndexError, TypeError) as error:
            raise EngineError(
                f"the server at {server.url} cannot be used: {error}; a server for inference.urls needs"
                f" VLLM_SERVER_DEV_MODE=1, PYTHONPATH={_IN_SERVER}, --enable-scale-out,"
                f" --logprobs-mode processed_logprobs and --worker-extension-cls {_EXTENSION}"
            ) from error
        if "processed_logprobs" not in str(info):
            raise EngineError(f"the server at {server.url} lacks --logprobs-mode processed_logprobs")
        if self._reads_images and (images or {}).get("mm_processor_kwargs") != json.loads(_PILLOW):
            raise EngineError(f"the server at {server.url} lacks --mm-processor-kwargs '{_PILLOW}'")
        if self._reads_images and images["language_model_only"]:
            raise EngineError(f"the server at {server.url} reads no images: it has --language-model-only")
        self._samples.block = max(self._samples.block, block)  # of `--block-size`
        if room < self._room:
            raise EngineError(
                f"{server.url} has room for {room} tokens; inference.context_length is {self._room}"
            )

    async def stream(self, server: Server, ask: Ask) -> AsyncGenerator[StreamChunk]:
        """See `ServerEngine`."""
        body = {
            "request_id": ask.id,
            **_prompt(ask.text),
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": ask.salt,
            "sampling_params": _sampling(ask.sampling)
            | {"max_tokens": ask.max_tokens, "seed": ask.seed, "logprobs": 0, "detokenize": False},
        }
        must_check_ids = bool(ask.text.images)
        async for event in server.stream("/inference/v1/generate", body, _EVENT):
            if must_check_ids and event.choices:
                must_check_ids = False
                if difference := ask.text.difference(event.prompt_token_ids):
                    yield StreamChunk((), (), "error", difference)
                    return
            if event.error is not None:
                if event.error.code >= 500:
                    raise ServerLost(event.error.message)
                yield StreamChunk((), (), "error", event.error.message)
            for choice in event.choices:
                yield _piece(choice)
            if event.usage and (prompt := event.usage.prompt_tokens_details):
                yield StreamChunk((), (), cached_tokens=prompt.cached_tokens)

    async def abort_streams(self, server: Server, ids: Sequence[str]) -> None:
        """See `ServerEngine`."""
        names = [f"generate-tokens-{id}" for id in ids]
        await server.post("/abort_requests", {"request_ids": names}, deadline_s=_CALL_S)

    async def prepare_weights(self, server: Server, update: WeightUpdate, folder: Path) -> None:
        """Make the server read the files, and store their hashes. Raise WeightsError if reading fails."""
        await self._rpc(server, "stretto_read", str(folder), deadline_s=_CALL_S)
        with anyio.move_on_after(_READ_S):
            while not (state := await self._rpc(server, "stretto_have_read", deadline_s=_CALL_S))["done"]:
                await anyio.sleep(_ASK_EVERY_S)
            if state["error"]:
                version = update.note.version
                raise WeightsError(f"the server refuses version {version}: {state['error']}", version=version)
            self._hashes = state["hashes"]
            return
        raise ServerLost(f"it did not read {folder} within {_READ_S:g} s")

    async def load_weights(
        self, server: Server, update: WeightUpdate, folder: Path, *, forget: bool
    ) -> Mapping[str, str]:
        """Ask the server to load the tensors that it has read."""
        await self._rpc(server, "stretto_load", deadline_s=_LOAD_S)
        version = {"new_version": str(update.note.version)}
        await server.change("/update_weight_version", version, deadline_s=_CALL_S)
        if forget:
            await server.change("/reset_prefix_cache", deadline_s=_CALL_S)
        if self._reads_images:  # vLLM caches image embeddings of the previous weights
            await server.change("/reset_encoder_cache", deadline_s=_CALL_S)
        return self._hashes

    async def free_memory(self, server: Server) -> None:
        """See `ServerEngine`. At level 2, vLLM keeps no copy of the weights."""
        await server.change("/sleep?level=2", deadline_s=_LOAD_S)

    async def take_memory(self, server: Server, part: Literal["weights", "kv_cache"]) -> None:
        """See `ServerEngine`."""
        await server.change(f"/wake_up?tags={part}", deadline_s=_LOAD_S)

    async def score(self, server: Server, text: ServerText) -> list[float]:
        """See `ServerEngine`. vLLM does not use its prefix cache when it returns logprobs of a prompt."""
        body = {
            **_prompt(text),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": 0,
                "detokenize": False,
            },
        }
        answer = await server.post("/inference/v1/generate", body, deadline_s=_CALL_S)
        if text.images and (difference := text.difference(answer.get("prompt_token_ids"))):
            raise EngineError(difference)
        by_position = answer["prompt_logprobs"]
        return [by_position[i][str(token)]["logprob"] for i, token in enumerate(text.tokens) if i]

    async def _rpc(self, server: Server, method: str, *arguments: str, deadline_s: float) -> Any:
        """Call all workers; return their common answer. Raise ServerLost if a call fails or answers vary."""
        body = {"method": method, "args": arguments}
        try:
            answer = await server.post("/collective_rpc", body, deadline_s=deadline_s)
        except ServerRefused as error:
            raise ServerLost(f"{method}: {error.reason}") from error
        results: list[Any] = answer["results"]
        if method == "stretto_have_read" and not all(result["done"] for result in results):
            return {"done": False}
        if any(result != results[0] for result in results):
            raise ServerLost(f"{method}: the server's workers do not agree: {results}")
        return results[0]


def _prompt(text: ServerText) -> dict[str, Any]:
    """Return the fields of a prompt. With images, vLLM returns the prompt's ids. Digests identify images."""
    parts = [{"type": "image_url", "url": image.url, "uuid": image.digest} for image in text.images]
    images = {"content_parts": parts, "return_token_ids": True} if parts else {}
    return {"token_ids": text.sent, **images}


def _sampling(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
    }


def _piece(choice: _Choice) -> StreamChunk:
    logprobs = [token.logprob for token in choice.logprobs.content]
    if not all(map(math.isfinite, logprobs)):
        return StreamChunk((), (), "error", "the server's logits are not finite")
    versions = [span.version for span in choice.weight_versions or ()]
    finish: Finish = FINISH_REASONS.get(choice.finish_reason, "error") if choice.finish_reason else ""
    error = f"the server ended the answer with {choice.finish_reason!r}" if finish == "error" else ""
    return StreamChunk(choice.token_ids, logprobs, finish, error, versions)
