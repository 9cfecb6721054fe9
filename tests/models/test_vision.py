"""Rows with images, from the dataset to the training engine: the processors, the numbers, whole runs."""

import hashlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from fixture_types import Models, Start
from patience import patience
from stretto import Context
from stretto.algorithm import Loss
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose_mapping
from stretto.cli.start.checks import problems
from stretto.errors import ConfigError, EngineError
from stretto.models.images import images_of
from stretto.models.vision import Vision
from stretto.rl.batch import Batch
from stretto.training.config import LoraConfig
from stretto.training.engine import HFTraining
from stretto.training.model import names_in_files
from stretto_hf import HFConfig, HFDataset
from training_engines import NEARLY_LINEAR, loaded_engine, off, plain_loss, step_of
from vision_models import ARCHITECTURES, PLACE, TEXTS, picture

TOWERS = ("vision_tower.", "visual.")
"""How the names of a vision tower's tensors begin: LLaVA's, and Qwen's."""


def sequence_of(vision: Vision, seed: int, *sizes: tuple[int, int]) -> Batch:
    """One prompt with images of these sizes, and a random answer to be trained on."""
    generator = torch.Generator().manual_seed(seed)
    content = "<image>and " * len(sizes) + "how many?"
    images = [picture(seed, *size) for size in sizes]
    seen = vision.see([{"role": "user", "content": content}], images)
    answer = torch.randint(2, TEXTS, (9,), generator=generator)
    tokens = torch.cat([torch.from_numpy(seen.ids).long(), answer])
    return Batch(
        [len(tokens)],
        {
            "tokens": tokens,
            "loss_mask": torch.arange(len(tokens)) >= len(seen.ids),
            "advantages": torch.randn(len(tokens), generator=generator),
        },
        {"group": torch.tensor([seed])},
        [{name: torch.from_numpy(array) for name, array in seen.media.items()}],
    )


def batch_of(vision: Vision) -> Batch:
    """Sequences with one image, another, none, and three."""
    sizes = [[(20, 14)], [(50, 30)], [], [(16, 40), (30, 30), (12, 25)]]
    return Batch.concat([sequence_of(vision, seed, *each) for seed, each in enumerate(sizes)])


engine_of = partial(loaded_engine, **NEARLY_LINEAR)


# ------------------------------------------------------------------------------ images and prompts


def test_images_come_from_paths_bytes_and_pillow(tmp_path: Path) -> None:
    image, path = picture(0), str(tmp_path / "a.png")
    image.save(path)
    held = Path(path).read_bytes()
    forms: list[Any] = [path, {"bytes": held, "path": "a.png"}, {"bytes": None, "path": path}]
    forms += [image, image.convert("RGBA")]
    found = [*images_of({"images": forms}), *images_of({"image": forms[0]})]
    for each in found:
        assert each.pixels.mode == "RGB"
        assert each.pixels.tobytes() == image.tobytes()
    assert {each.digest for each in found[:3]} == {hashlib.sha256(held).hexdigest()}
    assert images_of({"prompt": "x", "images": []}) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_has_an_image_token_for_each_model_feature(vision_models: Models, architecture: str) -> None:
    vision = Vision(str(vision_models(architecture)))
    image = picture(0, 32, 24)
    tokens = 4 if architecture == "llava" else (24 // 8) * (32 // 8)  # 16 × 16 at 8; Qwen: 2 × 2 patches of 4
    parts = [{"type": "text", "text": "see "}, {"type": "image"}]
    messages = vision.see([{"role": "user", "content": parts}], [image])
    marked = vision.see([{"role": "user", "content": "see <image>"}], [image])
    text = vision.see(f"see {PLACE[architecture]}", [image])
    assert messages.ids.tolist() == marked.ids.tolist()
    assert [int((seen.ids == vision.image_token).sum()) for seen in (messages, text)] == [tokens] * 2
    np.testing.assert_array_equal(messages.media["pixel_values"], text.media["pixel_values"])
    assert messages.media["pixel_values"].dtype == np.float32
    assert vision.see("see", []).media == {}
    for wrong in (0, 2):
        with pytest.raises(ConfigError, match=f"does not go with its {wrong} images"):
            vision.see(f"see {PLACE[architecture]}", [image] * wrong)
    with pytest.raises(ConfigError, match="does not go with its 0 images"):
        vision.see([{"role": "user", "content": "see <image>"}], [])


def test_media_stay_with_their_sequences() -> None:
    lengths = [2, 3, 1]
    media = [{"pixels": torch.full((count, 2), float(count))} for count in (1, 2)] + [{}]
    batch = Batch(lengths, {"tokens": torch.arange(6)}, {"group": torch.tensor([0, 0, 1])}, media)
    assert batch.select([2, 1]).join_media()["pixels"].tolist() == [[2, 2], [2, 2]]
    assert [len(part.media) for part in batch.split([1, 2])] == [1, 2]
    again = Batch.concat(batch.with_columns({"rewards": torch.zeros(3)}).micro_batches(3)).to("cpu")
    assert again.join_media()["pixels"].tolist() == [[1, 1], [2, 2], [2, 2]]
    assert Batch([1], {"tokens": torch.zeros(1)}, {}).join_media() == {}
    wide = Batch([1, 1], {"tokens": torch.zeros(2)}, {}, [{"p": torch.ones(1, 1)}, {"p": torch.ones(1, 3)}])
    assert wide.join_media()["p"].tolist() == [[1, 0, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match="media of 1 sequences for 2 sequences"):
        Batch([1, 1], {}, {}, [{}])


# ---------------------------------------------------------------------------------- the torch engine


def test_logprobs_depend_on_the_images_and_not_on_the_batch(vision_folder: Path) -> None:
    engine = engine_of(vision_folder)
    batch = batch_of(Vision(str(vision_folder)))
    together = engine.forward(batch, temperature=1.0)
    alone = [engine.forward(part, temperature=1.0) for part in batch.split([1] * len(batch))]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=0)

    [first, *_] = batch.split([1] * len(batch))
    media = dict(first.media[0])
    shuffle = torch.randperm(media["pixel_values"].shape[-1], generator=torch.Generator().manual_seed(1))
    media["pixel_values"] = media["pixel_values"][..., shuffle]
    shuffled = engine.forward(Batch(first.lengths, first.tokens, {}, [media]), temperature=1.0)
    assert (shuffled - alone[0])[first["loss_mask"]].abs().max() > 0.01


def test_logprobs_equal_the_model_s_own_with_its_processor(vision_models: Models) -> None:
    # By the model's own processor and forward, M-RoPE positions and all.
    folder = vision_models("qwen2_5_vl")
    vision = Vision(str(folder))
    batch = sequence_of(vision, 3, (50, 30))
    model: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
    ids = batch["tokens"][None]
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == vision.image_token).long(),
            **batch.media[0],
        ).logits[0]
    expected = torch.log_softmax(logits[:-1], -1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    found = engine_of(folder).forward(batch, temperature=1.0)
    torch.testing.assert_close(found[1:], expected, atol=1e-5, rtol=0)


def gradients_of(engine: HFTraining, batch: Batch) -> dict[str, Tensor]:
    return step_of(engine, batch, Loss(plain_loss, "token"))[0]


def test_micro_batches_and_rows_change_no_gradient(vision_folder: Path) -> None:
    """Of the vision tower either. The batch has sequences with 0, 1 and 3 images."""
    batch = batch_of(Vision(str(vision_folder)))
    whole = gradients_of(engine_of(vision_folder), batch)
    towers = [name for name in whole if "vision_tower" in name or "visual" in name or "projector" in name]
    used = [name for name in towers if "post_layernorm" not in name]  # LLaVA reads what is before it
    assert all(whole[name].abs().max() > 0 for name in used)
    for packing in ("auto", "padded"):
        for tokens in (1, 40, 100):
            engine = engine_of(vision_folder, packing=packing, micro_batch_tokens=tokens)
            assert off(gradients_of(engine, batch), whole) < 1e-5


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # of names that peft uses
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_a_frozen_vision_tower(vision_folder: Path, lora: LoraConfig | None, tmp_path: Path) -> None:
    """It has no gradient, no state of the optimizer and no adapters, and is not published with the others."""
    engine = engine_of(vision_folder, freeze_vision_tower=True, lora=lora)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    for _ in range(2):
        engine.train(batch_of(Vision(str(vision_folder))), Loss(plain_loss, "token"), temperature=1.0)
    changed = {name for name, tensor in engine.weights() if not torch.equal(tensor, before[name])}
    assert changed == dict(engine.trained_weights()).keys()
    tower = {name for name in load_file(vision_folder / "model.safetensors") if name.startswith(TOWERS)}
    assert tower
    assert dict(engine.frozen_weights()).keys() == (tower if lora is None else set())
    engine.save(tmp_path)
    trained = [*load_file(tmp_path / "optimizer.safetensors"), *changed]
    assert trained
    assert not [name for name in trained if any(start in name for start in TOWERS)]
    own, saved = (load_file(each / "model.safetensors") for each in (vision_folder, tmp_path / "model"))
    assert {name for name in own if not torch.equal(own[name], saved[name])}.isdisjoint(tower)
    if lora is not None:  # peft puts the adapters where they were
        peft = pytest.importorskip("peft")
        plain: Any = AutoModelForImageTextToText.from_pretrained(vision_folder)
        merged = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().state_dict()
        whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").state_dict()
        for name, tensor in whole.items():
            torch.testing.assert_close(merged[name], tensor)


def test_a_checkpoint_is_what_transformers_and_the_engine_load(vision_folder: Path, tmp_path: Path) -> None:
    batch = batch_of(Vision(str(vision_folder)))
    engine = engine_of(vision_folder)
    engine.train(batch, Loss(plain_loss, "token"), temperature=1.0)
    engine.save(tmp_path)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    names = names_in_files(loaded, str(vision_folder))
    state = {names.get(name, name): tensor for name, tensor in loaded.state_dict().items()}
    for name, tensor in engine.weights():
        torch.testing.assert_close(state[name], tensor, atol=0, rtol=0)
    # Engines of other libraries look for the names of the model's own files.
    own, saved = (load_file(each / "model.safetensors") for each in (vision_folder, tmp_path / "model"))
    assert own.keys() == saved.keys() == dict(engine.weights()).keys()
    again = engine_of(vision_folder)
    again.load(tmp_path)
    one = engine.forward(batch, temperature=1.0)
    assert torch.equal(again.forward(batch, temperature=1.0), one)
    # The folder is a whole model, processor included.
    torch.testing.assert_close(engine_of(tmp_path / "model").forward(batch, temperature=1.0), one)
    assert batch_of(Vision(str(tmp_path / "model"))).lengths == batch.lengths


def test_what_cannot_be_is_one_clear_error(vision_models: Models, tiny_models: Models) -> None:
    folder = vision_models("llava")
    with pytest.raises(EngineError, match="reads images; leave it 'auto'"):
        engine_of(folder, packing="packed")
    with pytest.raises(EngineError, match="a value head on one is not supported"):
        engine_of(folder, head="value")
    with pytest.raises(EngineError, match=r"the batch carries images, and model .* reads none"):
        engine_of(tiny_models("qwen2")).forward(sequence_of(Vision(str(folder)), 0, (9, 9)), temperature=1.0)


SPLITS: list[tuple[dict[str, Any], list[list[int]]]] = [
    ({"micro_batch_tokens": 30}, [[2], [0, 1, 3]]),  # rank 0 has text alone, and fewer micro-batches
    ({"shard": False, "micro_batch_tokens": 60, "packing": "padded"}, [[2, 3], [1, 0]]),
    ({"micro_batch_tokens": 4096}, [[3], [0, 2, 1]]),
]
"""Options of fsdp2, and the sequences of each of two ranks."""


def train_as_rank(model: Path, folder: Path, rank: int) -> None:
    from stretto_fsdp2 import Fsdp2TrainingConfig
    from stretto_fsdp2.sharded import ShardedLayout

    for number, (options, split) in enumerate(SPLITS):
        config = Fsdp2TrainingConfig(
            use="fsdp2", processes=2, clip_norm=None, timeout_s=patience(60), **options
        )
        meeting = str(folder / f"rendezvous-{number}")
        context = Context(run="r", name="n", seed=1, model=str(model), rank=rank, rendezvous=meeting)
        engine = HFTraining(config, context, ShardedLayout(config, context))
        engine.load(None)
        found = gradients_of(engine, batch_of(Vision(str(model))).select(split[rank]))
        if rank == 0:
            save_file(found, folder / f"gradients-{number}.safetensors")
        engine.stop()


@pytest.mark.nightly
def test_ranks_change_no_gradient(vision_folder: Path, tmp_path: Path) -> None:
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}
    command = [sys.executable, __file__, vision_folder, tmp_path]
    ranks = [subprocess.Popen([*command, str(rank)], env=path) for rank in range(2)]
    whole = gradients_of(engine_of(vision_folder), batch_of(Vision(str(vision_folder))))
    assert [rank.wait(timeout=patience(120)) for rank in ranks] == [0, 0]
    for number in range(len(SPLITS)):
        found = load_file(tmp_path / f"gradients-{number}.safetensors")
        assert off(found, whole) < 1e-5, SPLITS[number]


# ---------------------------------------------------------------------------------------- datasets


def test_hf_gives_images_as_files_and_digests_what_is_in_them(tmp_path: Path) -> None:
    picture(0).save(tmp_path / "a.png")
    (tmp_path / "elsewhere").mkdir()
    picture(0).save(tmp_path / "elsewhere" / "b.png")
    prints: list[str] = []
    for number, path in enumerate(("a.png", "elsewhere/b.png")):
        features = datasets.Features(
            {"images": datasets.List(datasets.Image()), "prompt": datasets.Value("string")}
        )
        rows = {"images": [[str(tmp_path / path)]], "prompt": ["<image>how many?"]}
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / f"{number}")
        config = HFConfig(use="hf", path=str(tmp_path / f"{number}"), chat=True)
        dataset = HFDataset(config, Context(run="r", name="n", seed=1))
        prints.append(dataset.fingerprint)
        [image] = images_of(dataset[0])
        assert image.pixels.tobytes() == picture(0).tobytes()
        assert dataset[0]["prompt"] == [{"role": "user", "content": "<image>how many?"}]
    assert prints[0] == prints[1]


# -------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A jsonl of chat prompts with one image, with two, and with none, beside a folder of PNGs."""
    folder = tmp_path / "data"
    (folder / "pictures").mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for number in range(6):
        names = [f"pictures/{number}-{index}.png" for index in range((1, 2, 0)[number % 3])]
        for index, name in enumerate(names):
            picture(10 * number + index).save(folder / name)
        prompt = [{"role": "user", "content": "<image>" * len(names) + "how many?"}]
        lines.append({"prompt": prompt, "images": names, "answer": str(number), "target": str(number)})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


def errors_of(model: Path, rows: Path, severity: str = "error", **sections: Any) -> list[str]:
    usual = {"training": "torch", "inference": "mock", "reward": "exact", "name": "v", "steps": 2}
    sizes = {"algorithm": {"use": "grpo", "group_size": 2}, "queue": {"batch_size": 3}}
    dataset = {"use": "jsonl", "path": str(rows)}
    sampling = {"max_tokens": 16}
    run = {**usual, **sizes, "model": str(model), "dataset": dataset, "sampling": sampling, **sections}
    found = problems(Assembly(compose_mapping(run)))
    return [f"{each.path}: {each.message}" for each in found if each.severity == severity]


@pytest.mark.slow
def test_a_run_samples_from_images(start: Start, vision_models: Models, rows: Path, tmp_path: Path) -> None:
    """Logprobs of engine and trainer agree, and each image goes to the engine once."""
    (tmp_path / "reward.py").write_text(
        "def score(prompt, completion, **columns):\n"
        "    no_images = {'answer', 'target', 'completion_tokens', 'prompt_opened', 'reasoning_end'}\n"
        "    assert columns.keys() == no_images, columns\n"
        "    return len(completion) % 3\n"
    )
    run = start(
        f"model={vision_models('qwen2_5_vl')}",
        "algorithm.kl.coef=0.1",  # with a reference model, which reads the images too
        f"reward={{use: function, function: {tmp_path}/reward.py:score}}",
        *(f"dataset.path={rows}", "training=torch", "inference={use: torch, slots: 8, context_length: 256}"),
        "queue.max_failures=40",  # a random model also samples the token of images, which fails the ticket
        *("algorithm.group_size=2", "queue.batch_size=3", "sampling.max_tokens=4", "steps=3"),
    )
    run.assert_completed(3, batch_size=3)
    assert run.metrics()[0]["mismatch_max"] < 1e-4
    canary = run.summary()["canary"]
    assert canary["max"] < 1e-3, canary
    log = (run.folder / "logs" / "inference-0.jsonl").read_text()
    [came] = [line for line in map(json.loads, log.splitlines()) if line["event"] == "images came"]
    assert came["images"] <= 6, came  # as many as the rows have, however many samples and steps


@pytest.mark.slow
def test_a_run_of_sft_reads_images(start: Start, vision_models: Models, rows: Path) -> None:
    run = start(
        *(f"model={vision_models('llava')}", f"dataset.path={rows}", "steps=2"),
        *("algorithm=sft", "algorithm.completion_column=target", "training=torch", "training.lr=0.01"),
        *("queue.batch_size=3", "queue.max_staleness=0"),
    )
    run.assert_completed(2, batch_size=3, bound=0)


def test_the_rollout_worker_s_part_imports_no_torch(vision_models: Models, rows: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from stretto.dataset import DatasetConfig\n"
        "from stretto.workers import images as worker_images\n"
        "from stretto.workers.sampling import rollout\n"
        "from stretto.cli.start import row_check\n"
        f"vision = rollout._vision_of({str(vision_models('qwen2_5_vl'))!r}, DatasetConfig(use='jsonl'))\n"
        f"row = {{'prompt': 'a <|image_pad|>', 'image': {str(rows.parent / 'pictures' / '0-0.png')!r}}}\n"
        "ids, images = worker_images._encode_row(vision, row, ())\n"
        "assert (ids == vision.image_token).sum() > len(images) == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_check_refuses_what_cannot_work(vision_models: Models, tiny_models: Models, rows: Path) -> None:
    folder = vision_models("llava")
    frozen = {"use": "torch", "freeze_vision_tower": True}
    assert errors_of(folder, rows, training=frozen) == []
    errors = errors_of(tiny_models("qwen2"), rows, training=frozen)
    assert any(each.startswith("training.freeze_vision_tower: is true, but") for each in errors)
    tensor = {"use": "fsdp2", "processes": 2, "tensor_parallel": 2}
    errors = errors_of(folder, rows, inference={"use": "torch"}, training=tensor)
    assert any("reads images and cannot be split" in each for each in errors)
    [error] = errors_of(folder, rows, training={"use": "pipeline"}, queue={"batch_size": 4})
    assert error.startswith("training.use: 'pipeline' cannot split")
    [error] = errors_of(tiny_models("qwen2"), rows)
    assert error.startswith("dataset: the first row has images, but the model")


def test_check_reads_rows_with_the_processor(vision_models: Models, rows: Path) -> None:
    row = {"prompt": "<image><image>?", "images": ["pictures/0-0.png"], "answer": "1"}
    rows.write_text(json.dumps(row) + "\n")
    [error] = errors_of(vision_models("llava"), rows)
    assert re.match(
        r"dataset: the model cannot read 1 of 1 rows .*\s+row 1: .* its 1 images: .* 2 ", error
    ), error
    rows.write_text(json.dumps(row | {"prompt": "<image>?"}) + "\n" + json.dumps(row) + "\n")
    warnings = errors_of(vision_models("llava"), rows, severity="warning")
    assert any(
        re.match(r"dataset: the model cannot read 1 of 2 rows .*\s+row 2: ", each) for each in warnings
    )


if __name__ == "__main__":
    train_as_rank(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
