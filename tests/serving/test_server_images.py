"""Prompts with images, on their way to servers: what is sent, and what becomes of an answer to another
prompt. Real servers are in `integration/`."""

import base64
import hashlib
import io
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image

from stretto.component import Context
from stretto.engine import Sampling
from stretto.errors import EngineError, RequestError
from stretto.models.vision import newest_name
from stretto.serving.config import ServerEngineConfig
from stretto.serving.engine import ServerEngine
from stretto.serving.images import RequestImages, ServerText
from stretto.serving.server import Server
from stretto.serving.streams import Ask, StreamChunk, StreamQueue
from stretto_sglang import SglangConfig
from stretto_sglang.engine import SglangEngine
from stretto_vllm import VllmConfig
from stretto_vllm.engine import VllmEngine

IMAGE = 9
TOKENS = [1, IMAGE, IMAGE, 2, IMAGE, 3, IMAGE]
"""A prompt with two images, and an answer `3 9`."""


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (14, 20, 3), dtype=np.uint8))


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def images_of(*files: bytes) -> RequestImages:
    return RequestImages(IMAGE, files, [hashlib.sha256(file).hexdigest() for file in files])


async def two_images() -> ServerText:
    """The tokens of the prompt and the answer, with both images."""
    return await images_of(file_of(picture(0)), file_of(picture(1))).text(TOKENS)


async def test_a_server_gets_one_token_and_the_decoded_pixels_of_each_image() -> None:
    jpeg, png = file_of(picture(0), "JPEG"), file_of(picture(1))
    text = await images_of(jpeg, png).text(TOKENS)
    assert (text.tokens, text.sent) == (TOKENS, [1, IMAGE, 2, IMAGE, 3, IMAGE])
    assert [image.digest for image in text.images] == [
        hashlib.sha256(each).hexdigest() for each in (jpeg, png)
    ]
    for image, file in zip(text.images, (jpeg, png), strict=True):
        kind, _, data = image.url.partition(",")
        assert kind == "data:image/png;base64"
        sent = Image.open(io.BytesIO(base64.b64decode(data)))
        assert np.array_equal(np.asarray(sent), np.asarray(Image.open(io.BytesIO(file))))
    assert len({image.key(salt) for image in text.images for salt in ("v1", "v2")}) == 4


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (TOKENS, ""),
        (None, "does not say which ids"),
        (TOKENS[:-1], "made 6 tokens of a prompt of 7"),
        ([1, IMAGE, IMAGE, IMAGE, 2, IMAGE, 3], f"has token {IMAGE} at position 3, the trained one 2"),
    ],
)
def test_other_ids_than_the_trained_ones_are_told(found: list[int] | None, message: str) -> None:
    difference = ServerText(TOKENS, TOKENS).difference(found)
    assert message in difference
    assert bool(message) == bool(difference)


async def test_images_that_do_not_go_with_the_prompt_are_refused() -> None:
    engine = VllmEngine(VllmConfig(use="vllm"), Context(run="r", name="n", seed=1))
    queue = StreamQueue(engine, slots=1, room=100, model="")
    prompt, file = np.array(TOKENS[:4], np.int32), file_of(picture(0))
    with pytest.raises(RequestError, match="the model reads none that is known here"):
        queue.images(prompt, [file], ["d"])
    queue.learn(100, frozenset(), IMAGE)
    assert queue.images(prompt[:1], [], []) is None
    with pytest.raises(RequestError, match=r"1 runs of image tokens \(id 9\) and 2 images"):
        queue.images(prompt, [file, file], ["d", "d"])
    with pytest.raises(RequestError, match=r"1 runs of image tokens .* and 0 images"):
        queue.images(prompt, [], [])
    broken = queue.images(prompt, [b"no image"], ["d"])
    assert broken is not None
    with pytest.raises(RequestError, match="an image cannot be read"):
        await broken.text(TOKENS[:4])


# ------------------------------------------------------------------------------------- both servers

Made = tuple[ServerEngine, dict[str, Any]]


@pytest.fixture(params=["vllm", "sglang"])
def made(request: pytest.FixtureRequest) -> Made:
    """An engine of a vision-language model, and what its server answers: `prompt`, and `info`."""
    kinds: dict[str, tuple[Callable[[Any, Context], ServerEngine], type[ServerEngineConfig]]] = {
        "vllm": (VllmEngine, VllmConfig),
        "sglang": (SglangEngine, SglangConfig),
    }
    engine, config = kinds[request.param]
    context = Context(run="r", name="n", seed=1, model=str(Path("examples/vision/model").resolve()))
    return engine(config(use=request.param, urls=("http://a:1",)), context), {}


@asynccontextmanager
async def server_of(answers: dict[str, Any]) -> AsyncGenerator[Server]:
    """A server that answers every path as either kind of server would."""
    asked = answers.setdefault("asked", [])

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response(answers["info"])
        asked.append(body := await request.json())
        if request.path == "/collective_rpc":
            return web.json_response({"results": [{}]})
        prompt = answers["prompt"]
        logprobs = [{"logprob": -1.0}]
        event = {
            "prompt_token_ids": prompt,
            "choices": [{"token_ids": [5], "logprobs": {"content": logprobs}, "finish_reason": "stop"}],
            "output_ids": [5],
            "meta_info": {
                "output_token_logprobs": [[-1.0, 5, None]],
                "input_token_logprobs": [[None, 0, None]] + [[-2.0, 0, None]] * (len(TOKENS) - 1),
                "finish_reason": {"type": "stop"},
            },
            "prompt_logprobs": [None, *({str(token): {"logprob": -2.0}} for token in TOKENS[1:])],
        }
        if not body.get("stream"):
            return web.json_response(event)
        return web.Response(text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", answer)])
    async with TestServer(app) as running:
        server = Server(f"http://127.0.0.1:{running.port}", None)
        try:
            yield server
        finally:
            await server.stop()


async def chunks_of(engine: ServerEngine, server: Server) -> list[StreamChunk]:
    ask = Ask("0001", await two_images(), max_tokens=4, seed=1, sampling=Sampling(max_tokens=9), salt="v3")
    return [chunk async for chunk in engine.stream(server, ask)]


async def test_the_trained_prompt_gives_a_streams_tokens_and_is_scored(made: Made) -> None:
    engine, answers = made
    answers["prompt"] = TOKENS
    async with server_of(answers) as server:
        chunks = await chunks_of(engine, server)
        assert await engine.score(server, await two_images()) == [-2.0] * (len(TOKENS) - 1)
    assert [token for chunk in chunks for token in chunk.tokens] == [5]
    body = answers["asked"][0]
    assert (body.get("token_ids") or body["input_ids"]) == [1, IMAGE, 2, IMAGE, 3, IMAGE]
    urls = body.get("image_data") or [part["url"] for part in body["content_parts"]]
    assert len(urls) == 2
    assert all(url.startswith("data:image/png;base64,") for url in urls)


@pytest.mark.parametrize("prompt", [TOKENS[:-1], None])
async def test_a_stream_of_another_prompt_is_an_error(made: Made, prompt: list[int] | None) -> None:
    engine, answers = made
    answers["prompt"] = prompt
    async with server_of(answers) as server:
        [chunk] = await chunks_of(engine, server)
        assert chunk.finish == "error"
        assert "prompt" in chunk.error
        with pytest.raises(EngineError, match="prompt"):
            await engine.score(server, await two_images())


async def test_an_attached_server_that_resizes_otherwise_is_refused(made: Made) -> None:
    engine, answers = made
    engine._reads_images = True  # pyright: ignore[reportPrivateUsage] - `start` learns it
    answers["info"] = {
        "data": [{"max_model_len": 512}],
        "vllm_config": {
            "model_config": {"multimodal_config": {"mm_processor_kwargs": None}},
            "cache_config": {"block_size": 16},
        },
        "logprobs": "processed_logprobs",
        "context_length": 1000,
        "incremental_streaming_output": True,
        "dtype": "float32",
        "image_processor_backend": "auto",
    }
    async with server_of(answers) as server:
        with pytest.raises(EngineError, match=r"lacks --(mm-processor-kwargs|image-processor-backend)"):
            await engine.greet(server)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("visual.blocks.0.norm1.weight", "model.visual.blocks.0.norm1.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.language_model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("vision_tower.x", "model.vision_tower.x"),
    ],
)
def test_both_names_of_a_tensor_are_the_same(older: str, newer: str) -> None:
    assert newest_name(older) == newest_name(newer) == newer
