"""The engine `torch` samples from prompts with images what the model's own forward says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForImageTextToText

from stretto.array import Array
from stretto.component import Context
from stretto.engine import GenerateRequest, Sampling
from stretto.models.images import OpenImage, decode, file_of
from stretto.models.vision import Vision
from stretto.testing.served_engine import Sample, ServedEngine
from stretto.training.model import names_in_files
from stretto_torch import TorchInferenceConfig
from stretto_torch.inference import TorchInferenceEngine
from vision_models import picture

TOLERANCE = 1e-4


def image_of(seed: int, width: int = 20, height: int = 14) -> OpenImage:
    file = file_of(picture(seed, width, height))
    return OpenImage(file, decode(file))


class SeenModel:
    def __init__(self, folder: Path, seed: int | None = None) -> None:
        self.vision = Vision(str(folder))
        self._model: Any = AutoModelForImageTextToText.from_pretrained(folder).eval().requires_grad_(False)
        self._names = names_in_files(self._model, str(folder))
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for parameter in self._model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)

    def tensors(self) -> Mapping[str, Tensor]:
        named: Iterable[tuple[str, Tensor]] = self._model.named_parameters()
        return {self._names.get(name, name): parameter.data for name, parameter in named}

    def logprobs(self, asked: Asked, answer: Sequence[int]) -> NDArray[np.float32]:
        ids = torch.tensor([[*asked.request.prompt_ids.numpy().tolist(), *answer]])
        media = {name: torch.from_numpy(array) for name, array in asked.media.items()}
        if "image_grid_thw" in media:
            media["mm_token_type_ids"] = (ids == self.vision.image_token).long()
        logits = self._model(input_ids=ids, **media).logits[0]
        logits[:, self.vision.image_token] -= 100.0  # as `Asked` asks for
        start = ids.shape[1] - len(answer)
        return logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy()


class Asked:
    def __init__(
        self, vision: Vision, name: str, images: Sequence[OpenImage], text: str = "how many?", **changes: Any
    ) -> None:
        content = "<image>and " * len(images) + text
        seen = vision.see([{"role": "user", "content": content}], [image.pixels for image in images])
        self.media = seen.media
        self.files = [image.file for image in images]
        n = changes.pop("n", 1)
        sampling: Any = {"max_tokens": 12, "ignore_eos": True, "logit_bias": {vision.image_token: -100.0}}
        self.request = GenerateRequest(
            id=f"{name}/1/0",
            prompt_ids=Array.of(seen.ids, np.int32),
            seeds=tuple(range(n)),
            sampling=Sampling(**{**sampling, **changes}),
            min_version=0,
            images=tuple(image.digest for image in images),
        )


@pytest.fixture
def model(vision_folder: Path) -> SeenModel:
    return SeenModel(vision_folder)


def serve(folder: Path, run: Path, **options: Any) -> ServedEngine:
    config = TorchInferenceConfig(slots=6, context_length=256, threads=1, **options)
    context = Context(run="run", name="test", seed=0, model=str(folder))
    return ServedEngine(TorchInferenceEngine(config, context), run)


@pytest.fixture
def served(vision_folder: Path, model: SeenModel, tmp_path: Path) -> Iterator[ServedEngine]:
    with serve(vision_folder, tmp_path).running() as engine:
        engine.swap(model)  # type: ignore[arg-type]
        yield engine


def answers(served: ServedEngine, *asked: Asked) -> list[list[Sample]]:
    for each in asked:
        served.ask(each.request, images=each.files)
    return [served.finished(each.request) for each in asked]


def off(model: SeenModel, asked: Asked, sample: Sample) -> NDArray[np.float32]:
    return np.abs(model.logprobs(asked, sample.tokens) - np.array(sample.logprobs, np.float32))


def test_answers_to_0_1_and_3_images_have_the_logprobs_of_the_plain_forward(
    served: ServedEngine, model: SeenModel
) -> None:
    """The mean over 200 answers. Prompts of all kinds are decoded together."""
    asked = [
        Asked(
            model.vision,
            f"{number}",
            [image_of(10 * number + i, 16 + number, 30 - i) for i in range((0, 1, 3)[number % 3])],
            n=4,
        )
        for number in range(51)
    ]
    differences = [
        off(model, each, sample)
        for each, samples in zip(asked, answers(served, *asked), strict=True)
        for sample in samples
    ]
    assert len(differences) == 204
    assert np.concatenate(differences).mean() < TOLERANCE


def test_the_next_turn_reads_its_own_images_from_the_cache_and_no_others(
    served: ServedEngine, model: SeenModel
) -> None:
    """The prompts have the same tokens; only the images differ."""
    text = "what do you see in this picture? answer with one word and a full stop. " * 2
    one, same, other = (
        Asked(model.vision, name, [image_of(seed)], text, max_tokens=4)
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    for each in (one, same, other):
        [[sample]] = answers(served, each)
        assert off(model, each, sample).max() < TOLERANCE
    batcher: Any = served.engine._batcher  # type: ignore[attr-defined]
    assert batcher.slots.prefix_hits == 1


@pytest.mark.parametrize("on_swap", ["keep_cache", "recompute"])
def test_new_weights_in_the_middle_of_an_answer(
    vision_folder: Path, model: SeenModel, on_swap: str, tmp_path: Path
) -> None:
    newer = SeenModel(vision_folder, seed=1)
    with serve(vision_folder, tmp_path, on_swap=on_swap).running() as served:
        served.swap(model)  # type: ignore[arg-type]
        asked = Asked(model.vision, "long", [image_of(1), image_of(2, 30, 30)], max_tokens=120)
        served.ask(asked.request, images=asked.files)
        served.until((asked.request.id, 0), tokens=20)
        served.swap(newer)  # type: ignore[arg-type]
        [sample] = served.finished(asked.request)
    versions = np.array(sample.versions)
    assert set(versions) == {0, 1}
    assert off(model, asked, sample)[versions == 0].max() < TOLERANCE
    if on_swap == "recompute":
        assert off(newer, asked, sample)[versions == 1].max() < TOLERANCE


def test_what_cannot_be_served_is_one_clear_error(served: ServedEngine, model: SeenModel) -> None:
    whole = Asked(model.vision, "damaged", [image_of(1)])
    served.ask(whole.request, images=[whole.files[0][:-40]])
    [sample] = served.finished(whole.request)
    assert sample.finish == "error"
    assert "image" in sample.error or "truncated" in sample.error

    two = Asked(model.vision, "two", [image_of(1), image_of(2)])
    served.ask(two.request, images=two.files[:1])
    [sample] = served.finished(two.request)
    assert re.search(r"a prompt has \d+ image tokens .* its 1 images have \d+", sample.error)

    again = Asked(model.vision, "again", [image_of(1)])
    [[sample]] = answers(served, again)
    assert off(model, again, sample).max() < TOLERANCE


def test_an_abort_while_the_images_are_read_ends_the_request(served: ServedEngine, model: SeenModel) -> None:
    asked = Asked(model.vision, "gone", [image_of(1, 300, 300)], n=3)
    served.ask(asked.request, images=asked.files)
    served.abort(asked.request.id)
    assert {sample.finish for sample in served.finished(asked.request)} == {"abort"}
    served.until_load(lambda load: load.running == load.waiting == 0)
