"""The torch engines together: whose logprobs are whose, and runs that repeat bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bus_testing import until
from fixture_types import Models, Start
from stretto import Context, Sampling
from stretto.algorithm import Loss
from stretto.array import Array
from stretto.engine import Chunk, GenerateRequest
from stretto.models.version_files import FolderPublisher, RunFolders
from stretto.rl.batch import Batch
from stretto.training.engine import HFTraining
from stretto_file import FileSubscriber
from stretto_torch import TorchInferenceConfig, TorchTrainingConfig
from stretto_torch.inference import TorchInferenceEngine
from training_engines import push_up, random_batch

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


class Collected:
    """Chunks of an engine, put together by (request, sample)."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[str, int], list[Chunk]] = {}
        self.finished = 0

    def emit(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            assert chunk.finish != "error", chunk.error
            self.chunks.setdefault((chunk.request, chunk.sample), []).append(chunk)
            self.finished += bool(chunk.finish)

    def column(self, key: tuple[str, int], name: str) -> np.ndarray[Any, Any]:
        return np.concatenate([getattr(chunk, name) for chunk in self.chunks[key]])

    async def until(self, finished: int) -> None:
        await until(lambda: self.finished >= finished)


def transport_ends(folder: Path) -> tuple[FolderPublisher, FileSubscriber]:
    folders = RunFolders(Context(run=folder.name, name="test", seed=1), None)
    return FolderPublisher(folder / "weights", 3, 2.0), FileSubscriber(folders)


def context(model: Path, folder: Path) -> Context:
    return Context(run=folder.name, name="test", seed=1, model=str(model), folder=str(folder))


@pytest.mark.parametrize("on_swap", ["recompute", "keep_cache"])
async def test_logprobs_are_those_of_each_tokens_own_version(
    tiny_models: Models, tmp_path: Path, on_swap: Literal["recompute", "keep_cache"]
) -> None:
    """Three swaps, each with 8 x 8 samples in flight, against the training engine's forward."""
    model = tiny_models("qwen2")
    trainer = HFTraining(TorchTrainingConfig(lr=3e-3, warmup_steps=0), context(model, tmp_path))
    trainer.load(None)
    publisher, subscriber = transport_ends(tmp_path)
    config = TorchInferenceConfig(on_swap=on_swap, slots=64, context_length=128)
    engine = TorchInferenceEngine(config, context(model, tmp_path))
    collected, saved, prompts = Collected(), dict[int, Path](), dict[str, np.ndarray[Any, Any]]()
    random = np.random.default_rng(0)
    sampling = Sampling(max_tokens=60, temperature=0.9)

    async def ask(version: int) -> None:
        for name in [f"{version}-{group}" for group in range(8)]:
            prompts[name] = random.integers(2, 97, random.integers(3, 20), dtype=np.int32)
            engine.generate(GenerateRequest(name, Array.of(prompts[name]), (*range(8),), sampling, 0))
        await until(lambda: (f"{version}-7", 7) in collected.chunks)

    async def publish(version: int) -> None:
        trainer.save(folder := tmp_path / f"version-{version}")
        saved[version] = folder
        note = publisher.publish(version, trainer.weights())
        update = await subscriber.receive(note)
        if version:
            await ask(version)
        report = await engine.swap(update)
        assert report.digest == note.digest
        assert report.version == version

    async with anyio.create_task_group() as tasks:
        await engine.start(collected.emit, tasks)
        await publish(0)
        for version in (1, 2, 3):
            trainer.train(random_batch(version), Loss(push_up, "token"), temperature=1.0)
            await publish(version)
        await collected.until(3 * 8 * 8)
        await engine.stop()

    keys = sorted(collected.chunks)
    versions = [collected.column(key, "versions") for key in keys]
    assert {int(version) for part in versions for version in part} == {0, 1, 2, 3}
    assert sum(len(set(part.tolist())) > 1 for part in versions) >= 20  # swaps met samples in flight
    assert all((np.diff(part) >= 0).all() for part in versions)
    sequences = [np.concatenate([prompts[key[0]], collected.column(key, "tokens")]) for key in keys]
    tokens = torch.from_numpy(np.concatenate(sequences)).long()
    batch = Batch([len(sequence) for sequence in sequences], {"tokens": tokens}, {})
    worst = 0.0
    for version, folder in saved.items():
        trainer.load(folder)
        forward = trainer.forward(batch, temperature=0.9).split(batch.lengths)
        for key, row, whose in zip(keys, forward, versions, strict=True):
            own = row.numpy()[-len(whose) :][whose == version]
            reported = collected.column(key, "logprobs")[whose == version]
            worst = max(worst, float(np.abs(own - reported).max(initial=0)))
    if on_swap == "recompute":
        assert worst <= 1e-4
    else:
        assert 1e-4 < worst < 10  # going on over an old cache is something else, and it can be measured


# -------------------------------------------------------------------------------- bit for bit


GROUP, BATCH, STEPS = 4, 4, 3


@pytest.fixture(scope="module")
def deterministic(
    tiny_models: Models, module_start: Start, tmp_path_factory: pytest.TempPathFactory
) -> Start:
    """A synchronous, deterministic run of the torch engines on a model that has something to learn."""
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    length_and_digit = "len(completion) / 10 + completion.count(answer[0])"
    reward.write_text(f"def score(prompt, completion, answer): return {length_and_digit}\n")
    overrides = [
        f"model={tiny_models('qwen2')}",
        *("training=torch", "training.lr=1e-2", "inference=torch", "inference.deterministic=true"),
        *("reward=function", f"reward.function={reward}:score", "sampling.max_tokens=24"),
        *("queue.max_staleness=0", f"steps={STEPS}", f"algorithm.group_size={GROUP}", "seed=5"),
    ]

    def start_run(out: str, *more: str) -> Any:
        return module_start(*overrides, *more, out=out)

    return start_run


@pytest.fixture(scope="module")
def undisturbed(deterministic: Start) -> Any:
    """Such a run from its beginning to its end, which others must equal."""
    run = deterministic("undisturbed")
    assert run.end() == 0, run.text()
    return run


def final_weights(run: Any) -> dict[str, Tensor]:
    return load_file(run.folder / "checkpoints" / f"step-{STEPS:06d}" / "model" / "model.safetensors")


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_two_runs_reach_the_same_weights_bit_for_bit(
    deterministic: Start, undisturbed: Any, tiny_models: Models
) -> None:
    one = undisturbed
    two = deterministic("two", "inference.slots=8", "inference.replicas=2", "rollout.concurrency=3")
    assert two.end() == 0, two.text()
    initial = load_file(tiny_models("qwen2") / "model.safetensors")
    assert not equal(final_weights(one), initial)  # it has trained
    assert equal(final_weights(one), final_weights(two))
    assert one.metrics()[0]["mismatch_max"] < 1e-4
    size = sum(tensor.nbytes for tensor in initial.values())
    assert all(size < line["version_bytes"] < 1.1 * size for line in one.metrics()[1:])
    assert all(line["publish_s"] > 0 < line["receive_s"] for line in one.metrics()[1:])


@pytest.mark.slow
def test_a_killed_kernel_and_a_killed_engine_change_no_bit(
    deterministic: Start, undisturbed: Any, start: Start
) -> None:
    two = deterministic("killed", "checkpoint.every=1")
    two.until_step(1)
    two.until(lambda: two.worker("inference-0")).kill()
    two.until_step(2)
    two.kill()
    again = start(resume=two)
    assert again.end() == 0, again.text()
    assert equal(final_weights(undisturbed), final_weights(again))


@pytest.mark.nightly
def test_models_train_alike_in_any_layout_and_go_on_in_another(deterministic: Start, start: Start) -> None:
    """PPO with a KL: actor and reference in one worker group, the critic in another."""
    several = [
        *("algorithm.use=ppo", "algorithm.kl={coef: 0.1, target: 1.0}", "training.lr=1e-3"),
        *("models.critic.group=critics", "checkpoint.every=1", "checkpoint.keep=5"),
    ]
    alone = deterministic("alone", *several, "groups.critics={use: torch, lr: 1e-3}")
    assert alone.end() == 0, alone.text()
    critics = "groups.critics={use: pipeline, processes: 2, stages: 2, lr: 1e-3}"
    spread = deterministic("spread", *several, critics, "training.use=fsdp2", "training.processes=2")
    assert spread.end() == 0, spread.text()
    expected = alone.metrics()[0]
    for name in ("loss", "grad_norm", "entropy", "kl_coef", "critic/loss", "critic/grad_norm"):
        assert spread.metrics()[0][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    # One process takes over where six were: what was sampled is used, what is trained next is the same.
    for step in range(2, STEPS + 1):
        shutil.rmtree(spread.folder / "checkpoints" / f"step-{step:06d}")
    (spread.folder / "summary.json").unlink()
    shutil.copy(alone.folder / "config.yaml", spread.folder / "config.yaml")
    again = start(resume=spread)
    assert again.end() == 0, again.text()
    assert again.summary()["ledger"]["trained"] == STEPS * BATCH
    assert again.metrics()[1]["kl_coef"] == pytest.approx(alone.metrics()[1]["kl_coef"], rel=1e-3)
    for name in ("critic/loss", "critic/grad_norm", "grad_norm"):
        assert again.metrics()[1][name] == pytest.approx(alone.metrics()[1][name], rel=0.02), name


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "count"), [(1, 5), (2, 3)])
def test_the_held_out_loss_is_that_of_the_model_after_the_step(
    start: Start, tmp_path: Path, processes: int, count: int
) -> None:
    """DPO, whose reference is in another group. The loss is computed again from the checkpoint."""
    pairs = (QUICKSTART / "pairs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "held.jsonl").write_text("".join(pairs[:6]))
    (tmp_path / "train.jsonl").write_text("".join(pairs[8:24]))
    run = start(
        *("algorithm=dpo", f"model={QUICKSTART / 'model'}", "steps=3", "queue.batch_size=4", "reward=null"),
        *(f"training={{use: fsdp2, processes: {processes}, lr: 1e-3}}", "training.micro_batch_tokens=64"),
        *(f"groups={{other: {{use: fsdp2, processes: {processes}}}}}", "models={reference: {group: other}}"),
        f"evaluation={{dataset: {{use: jsonl, path: {tmp_path}/held.jsonl}}, every: 2, rows: {count}}}",
        f"dataset.path={tmp_path}/train.jsonl",
    )
    run.assert_completed(3, bound=0)
    assert [line["step"] for line in run.metrics() if "held_out/loss" in line] == [1, 2, 3]
    rows = [json.loads(line) for line in pairs[:count]]
    margins = torch.tensor([_margin(row, run.folder / "checkpoints/step-000003/model") for row in rows])
    margins -= torch.tensor([_margin(row, QUICKSTART / "model") for row in rows])
    expected = -torch.nn.functional.logsigmoid(0.1 * margins).mean().item()
    last = run.metrics()[-1]
    assert last["held_out/loss"] == pytest.approx(expected, abs=2e-6)
    assert last["held_out/accuracy"] == pytest.approx((margins > 0).double().mean().item())


def _margin(row: dict[str, str], folder: Path) -> float:
    """Return the logprob of the chosen answer − that of the rejected one."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.encode(row["prompt"])

    def logprob(answer: str) -> float:
        ids = torch.tensor([[*prompt, *tokenizer.encode(answer), tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model(ids).logits.log_softmax(-1)
        return logprobs[0, :-1].gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum().item()

    return logprob(row["chosen"]) - logprob(row["rejected"])


@pytest.mark.slow
def test_only_finite_weights_are_published(start: Start, tiny_models: Models, tmp_path: Path) -> None:
    shutil.copytree(tiny_models("qwen2"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][3] = torch.inf
    save_file(weights, file, metadata={"format": "pt"})
    run = start(f"model={tmp_path}/model", "training=torch", "inference=mock", "inference.canary=null")
    assert run.end() == 1, run.text()
    fault = "1 of 64 values of tensor 'model.norm.weight' are NaN or infinite"
    assert f"version 0 is not published: weights are not finite: {fault}" in run.summary()["reason"]
    run.assert_nothing_is_left()
