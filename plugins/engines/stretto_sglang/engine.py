"""Send requests to an SGLang server, and read its replies.

Streams go to /generate with token ids. The server returns segments of token ids with the logprobs of
`log_softmax(logits / temperature)`; the last segment names the weight versions. The server loads weights from
disk; the endpoints that unpickle (/update_weights_from_tensor) are never used.
"""

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio.to_thread
import msgspec

from stretto.component import Context
from stretto.engine import Sampling
from stretto.errors import EngineError, WeightsError
from stretto.launcher import ALLOCATOR_VARIABLES
from stretto.serving.config import Flag, flags, interpreter_of
from stretto.serving.engine import ServerEngine
from stretto.serving.images import ServerText
from stretto.serving.server import Server, ServerCommand, ServerLost, ServerRefused
from stretto.serving.streams import FINISH_REASONS, Ask, StreamChunk, VersionSpan
from stretto.weights import WeightUpdate
from stretto_sglang import LIKELIEST, SglangConfig
from stretto_sglang.checksums import Checksums

_SERVE = Path(__file__).with_name("in_server") / "serve.py"
_MODELS = "stretto_in_sglang"  # a package beside serve.py
_CALL_S = 30.0  # deadline of a call that needs no loading
_LOAD_S = 300.0  # deadline of a call that loads or reads all weights
_SPARE = 16  # tokens of the context length, of which SGLang reserves a few
_GPU_SHARE = 0.85  # of the worker's share of the GPU; the rest is for activations and CUDA itself


class _Reason(msgspec.Struct, gc=False):
    type: str
    message: str = ""


class _Meta(msgspec.Struct, gc=False):
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    output_token_sampling_logprobs: list[float | None] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    finish_reason: _Reason | None = None
    weight_versions: list[VersionSpan] = []
    cached_tokens: int | None = None


class _SGLangFault(msgspec.Struct, gc=False):
    message: str = ""


class _SGLangEvent(msgspec.Struct, gc=False):
    output_ids: list[int] = []
    prompt_token_ids: msgspec.Raw = msgspec.Raw()  # every event repeats it; only the first one is read
    meta_info: _Meta | None = None
    error: _SGLangFault | None = None


_EVENT = msgspec.json.Decoder(_SGLangEvent)
_IDS = msgspec.json.Decoder(list[int] | None)


class SglangEngine(ServerEngine):
    """An engine whose server is SGLang 0.5."""

    health = "/health"

    def __init__(self, config: SglangConfig, context: Context) -> None:
        super().__init__(config, context)
        self._sglang = config
        exact = not config.gpus and not config.urls and config.tensor_parallel == 1
        self._checksums = Checksums(config.compute_dtype, exact=exact)

    def command(self, port: int, key: str) -> ServerCommand:
        """Return the command of SGLang's own launcher, behind `in_server/serve.py`."""
        config = self._sglang
        opts: dict[str, Flag] = {
            "--model-path": self._model,
            "--host": "127.0.0.1",
            "--port": port,
            "--tp-size": config.tensor_parallel,
            "--max-running-requests": config.most_running,
            "--context-length": self._room + _SPARE,
            "--dtype": config.compute_dtype,
            "--skip-tokenizer-init": True,
            "--incremental-streaming-output": True,
            "--sampling-mask-max-tokens": LIKELIEST,
            "--log-level-http": "warning",
        }
        if self._reads_images:
            # stretto's own image processors resize with Pillow; torchvision differs.
            opts["--image-processor-backend"] = "pil"
        # The spare tokens may exceed the model's own context length; no sample reaches them.
        env = {"STRETTO_SERVER_KEY": key, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        if self._reads_images:
            env |= {"SGLANG_EXTERNAL_MODEL_PACKAGE": _MODELS, "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": _MODELS}
        if config.gpus:
            opts["--enable-memory-saver"] = config.sleeps
            if config.sleeps:  # its memory pool refuses expandable segments, which a user's shell may set
                env |= dict.fromkeys(ALLOCATOR_VARIABLES, "")
            if config.share < 1:
                opts["--mem-fraction-static"] = round(_GPU_SHARE * config.share, 3)
        else:
            # The default attention of SGLang's CPU engine needs AMX.
            opts |= {"--device": "cpu", "--attention-backend": "torch_native"}
            opts["--max-total-tokens"] = config.most_running * (self._room + _SPARE)
            env["SGLANG_USE_CPU_ENGINE"] = "1"
        if Path(self._model).is_dir():
            env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        return ServerCommand(
            (interpreter_of(config), str(_SERVE), *flags(opts, config.args)), env | config.env
        )

    async def greet(self, server: Server) -> None:
        """Check the server's key and settings, such as streams of segments instead of whole answers."""
        try:
            info = await server.get("/server_info", deadline_s=_CALL_S)
            room, segments, dtype = (
                info[name] for name in ("context_length", "incremental_streaming_output", "dtype")
            )
            image_backend = info["image_processor_backend"]
        except (ServerRefused, ServerLost, KeyError, TypeError) as error:
            raise EngineError(f"the server at {server.url} cannot be used as SGLang: {error!r}") from error
        if not segments:
            raise EngineError(f"the server at {server.url} lacks --incremental-streaming-output")
        if self._reads_images and image_backend != "pil":
            raise EngineError(f"the server at {server.url} lacks --image-processor-backend pil")
        if room is not None and room < self._room + _SPARE:
            raise EngineError(
                f"{server.url} has a context length of {room}; it needs inference.context_length,"
                f" {self._room}, and {_SPARE} tokens that SGLang reserves"
            )
        if dtype != self._sglang.compute_dtype:
            raise EngineError(
                f"{server.url} computes in {dtype}; inference.dtype is {self._sglang.compute_dtype}"
            )
        self._checksums.begin(await self._read_checksums(server))

    async def stream(self, server: Server, ask: Ask) -> AsyncGenerator[StreamChunk]:
        """See `ServerEngine`."""
        body = {
            "rid": ask.id,
            **_prompt(ask.text, ask.salt),
            "stream": True,
            "return_logprob": True,
            "extra_key": ask.salt,
            "return_sampling_mask": _restricts(ask.sampling),
            "sampling_params": _sampling(ask.sampling) | {"max_new_tokens": ask.max_tokens},
        }
        must_check_ids, first = bool(ask.text.images), True
        async for event in server.stream("/generate", body, _EVENT):
            if event.error is not None or event.meta_info is None:
                message = event.error.message if event.error is not None else "an event without meta_info"
                yield StreamChunk((), (), "error", message)
                return
            if must_check_ids:
                must_check_ids = False
                prompt_ids = _IDS.decode(event.prompt_token_ids) if event.prompt_token_ids else None
                if difference := ask.text.difference(prompt_ids):
                    yield StreamChunk((), (), "error", difference)
                    return
            piece = _piece(event.output_ids, event.meta_info)
            piece.cached_tokens = event.meta_info.cached_tokens if first else None
            first = False
            yield piece

    async def abort_streams(self, server: Server, ids: Sequence[str]) -> None:
        """See `ServerEngine`. All ids have the same length, because SGLang ends every request whose id begins
        with the id it receives."""
        for id in ids:
            await server.post("/abort_request", {"rid": id}, deadline_s=_CALL_S)

    async def prepare_weights(self, server: Server, update: WeightUpdate, folder: Path) -> None:
        """Do nothing: SGLang reads the files when it loads them."""

    async def load_weights(
        self, server: Server, update: WeightUpdate, folder: Path, *, forget: bool
    ) -> Mapping[str, str]:
        """Ask the server to load the folder, and compare its checksums with the files."""
        version = update.note.version
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": forget,
            "abort_all_requests": False,
        }
        try:
            await server.post("/update_weights_from_disk", body, deadline_s=_LOAD_S)
        except ServerRefused as error:
            if "weights iterator" in error.reason:  # this error comes before anything is loaded
                raise WeightsError(
                    f"the server refuses version {version}: {error.reason}", version=version
                ) from error
            raise ServerLost(f"it may have loaded a part of version {version}: {error.reason}") from error
        checksums = await self._read_checksums(server)
        return await anyio.to_thread.run_sync(self._checksums.hashes, update.hashes(), folder, checksums)

    async def free_memory(self, server: Server) -> None:
        """See `ServerEngine`. A server that is not idle would end."""
        body = {"tags": ["weights", "kv_cache"]}
        await server.change("/release_memory_occupation", body, deadline_s=_LOAD_S)

    async def take_memory(self, server: Server, part: Literal["weights", "kv_cache"]) -> None:
        """See `ServerEngine`."""
        await server.change("/resume_memory_occupation", {"tags": [part]}, deadline_s=_LOAD_S)

    async def score(self, server: Server, text: ServerText) -> list[float]:
        """See `ServerEngine`."""
        body = {
            **_prompt(text, f"v{self._version}"),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        }
        answer = await server.post("/generate", body, deadline_s=_CALL_S)
        if text.images and (difference := text.difference(answer.get("prompt_token_ids"))):
            raise EngineError(difference)
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]

    async def _read_checksums(self, server: Server) -> Mapping[str, str]:
        """Return the server's checksum of each of its tensors; checksums of several ranks are joined."""
        answer = await server.change("/weights_checker", {"action": "checksum"}, deadline_s=_LOAD_S)
        checksums: dict[str, str] = {}
        for rank in answer["ranks"]:
            for name, checksum in rank["checksums"].items():
                checksums[name] = f"{checksums.get(name, '')} {checksum}".strip()
        return checksums


def _prompt(text: ServerText, salt: str) -> dict[str, Any]:
    """Return the fields of a prompt. With images, SGLang also returns the prompt's ids. It caches the vision
    tower's output by the image's hash, even across loads, so the hash depends on the version in the salt."""
    if not text.images:
        return {"input_ids": text.sent}
    return {
        "input_ids": text.sent,
        "image_data": [image.url for image in text.images],
        "mm_hashes": [image.key(salt) for image in text.images],
        "return_prompt_token_ids": True,
    }


def _restricts(sampling: Sampling) -> bool:
    """Return True if top_p, top_k or min_p removes tokens. SGLang then adds the drawn token's logprob among
    the remaining tokens, if these are not too many."""
    restricts = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    return restricts and sampling.temperature > 0


def _sampling(sampling: Sampling) -> dict[str, Any]:
    top_k = sampling.top_k or -1
    if _restricts(sampling):
        top_k = min(sampling.top_k or LIKELIEST, LIKELIEST)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": top_k,
        "min_p": sampling.min_p,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "stop_token_ids": sampling.stop_token_ids or None,
        "ignore_eos": sampling.ignore_eos,
    }


def _piece(tokens: list[int], meta: _Meta) -> StreamChunk:
    logprobs = meta.output_token_sampling_logprobs
    if logprobs is None:
        logprobs = [entry[0] for entry in meta.output_token_logprobs]
    finite_logprobs = [logprob for logprob in logprobs if logprob is not None and math.isfinite(logprob)]
    if len(finite_logprobs) < len(tokens):
        return StreamChunk((), (), "error", "the server's logits are not finite")
    versions = [span.version for span in meta.weight_versions]
    reason = meta.finish_reason
    kept_ids = meta.output_token_sampling_mask
    if reason is None:
        return StreamChunk(tokens, finite_logprobs, kept=kept_ids)
    finish = FINISH_REASONS.get(reason.type, "error")
    if finish == "abort":
        # SGLang does not check whether aborted tokens end the answer, so they are drawn again later.
        return StreamChunk((), (), finish, "", versions)
    error = reason.message if finish == "error" else ""
    return StreamChunk(tokens, finite_logprobs, finish, error, versions, kept_ids)
