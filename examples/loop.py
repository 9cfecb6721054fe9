"""The algorithm of a stretto run, once and flat: sample, score, compute advantages, train, swap weights.

    python examples/loop.py      # the model and the rows of examples/quickstart; two cores are enough

To try an idea, change `reward`, `advantages` or `loss`: after three steps only the loss shows it, after 20
the reward does. docs/own-algorithm.md shows how to make a plugin of it. A run adds what is missing here:
processes, which may fail and resume; generation during training, with a smaller learning rate while samples
are far off-policy; evaluations; and records of everything.

The trained weights are bit for bit those of `stretto run examples/quickstart/run.yaml queue.max_staleness=0
inference.deterministic=true inference.slots=64` after as many steps (tests/runs/test_loop.py).

Shapes: a batch holds S answers, each after its prompt, T tokens in total, end to end without padding. (S,) is
one number for each answer, and (T,) one for each token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import structlog
import torch
from anyio.abc import ObjectReceiveStream
from torch import Tensor

from stretto.algorithm import Loss
from stretto.array import Array
from stretto.component import Context
from stretto.engine import Chunk, GenerateRequest, InferenceEngine, Sampling, sample_seed
from stretto.errors import EngineError
from stretto.models.tokenizer import answer_text, load_tokenizer
from stretto.models.version_files import FolderPublisher, open_version
from stretto.rl.batch import Batch
from stretto.rl.functional import clipped_objective, group_normalise
from stretto.tokenizer import Tokenizer
from stretto.training.engine import HFTraining
from stretto.workflow import Answer, Score, Trajectory
from stretto_torch import TorchInferenceConfig, TorchTrainingConfig
from stretto_torch.inference import TorchInferenceEngine

QUICKSTART = Path(__file__).parent / "quickstart"
SEED = 1
GROUP_SIZE = 8  # answers to each prompt


# ------------------------------------------------------------------------------------ the algorithm


def reward(completion: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the answer is the expected one, else 0."""
    return float(completion.strip() == row["answer"])


def advantages(batch: Batch) -> Tensor:
    """Return (T,) float32, GRPO's advantages: the reward of an answer minus the mean reward of all answers to
    its prompt, divided by their standard deviation. It is the same for all tokens of the answer."""
    relative = group_normalise(batch["rewards"], batch["group"])  # (S,)
    return relative[batch.sequence_index()] * batch["loss_mask"]  # (T,)


def loss(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the loss of each token, (T,), and statistics, (T,) each. The trainer takes the means.

    `logprobs`, (T,) with gradient, are those of the weights in training. The clipped ratio is the one to the
    weights that sampled the token, so it also corrects for tokens of older weights. Decoupled PPO takes the
    ratio to `logprobs.detach()` and multiplies the loss by `stretto.rl.functional.importance_weight`.
    """
    losses, clipped, _ = clipped_objective(
        logprobs, batch["behaviour_logprobs"], batch["advantages"], eps_clip=0.2, c_clip=3.0
    )
    return losses, {"clipped": clipped.float()}


async def train(steps: int, batch_size: int, out: Path | None) -> None:
    """Take `steps` optimizer steps, on the answers to `batch_size` prompts each. Save the model in `out`, an
    empty folder."""
    torch.set_num_threads(1)  # for a model as small as this, more are slower
    rows = [json.loads(line) for line in (QUICKSTART / "train.jsonl").read_bytes().splitlines()]
    order = row_order(len(rows))
    context = Context(run="loop", name="loop", seed=SEED, model=str(QUICKSTART / "model"))
    tokenizer = load_tokenizer(context.model)
    sampling = Sampling(max_tokens=32, stop_token_ids=tokenizer.form.stop_ids)
    # Deterministic: the bits of an answer do not depend on the answers that are sampled beside it.
    inference = TorchInferenceConfig(slots=64, context_length=96, deterministic=True)
    engine = TorchInferenceEngine(inference, context)
    trainer = HFTraining(TorchTrainingConfig(lr=3e-4), context)
    trainer.load(None)

    with tempfile.TemporaryDirectory() as folder:
        publisher = FolderPublisher(Path(folder), keep=2, shard_gb=1)
        async with serve(engine) as chunks:
            for version in range(steps):
                # The engine loads the weights of this version. Both sides hash every tensor.
                note = publisher.publish(version, trainer.weights())
                report = await engine.swap(open_version(note, Path(note.address)))
                assert report.digest == note.digest, "the engine serves other weights than the trainer has"

                # Sample a group of answers to each prompt, all at the same time.
                asked = [rows[place] for place in itertools.islice(order, batch_size)]
                prompts = [tokenizer.encode_prompt(row["prompt"]) for row in asked]
                requests: list[GenerateRequest] = []
                for ticket, prompt in enumerate(prompts, version * batch_size):
                    seeds = tuple(sample_seed(f"{SEED}/train/{ticket}", "1", i) for i in range(GROUP_SIZE))
                    request = GenerateRequest(f"{ticket}", Array.of(prompt), seeds, sampling, version)
                    requests.append(request)
                groups = await sample(engine, chunks, requests, tokenizer)

                # Score the answers.
                scored = [
                    [Trajectory.of(prompt, answer, Score(reward(answer.text, row))) for answer in answers]
                    for row, prompt, answers in zip(asked, prompts, groups, strict=True)
                ]
                batch = batch_of(scored)
                assert (batch["versions"][batch["loss_mask"]] == version).all(), "tokens of older weights"

                # One optimizer step on the whole batch.
                batch = batch.with_columns({"advantages": advantages(batch)})
                figures = trainer.train(batch, Loss(loss, "token"), temperature=sampling.temperature)
                mean_reward, mean_loss = batch["rewards"].mean(), figures["loss"]
                print(f"step {version + 1}: reward {mean_reward:.4f}, loss {mean_loss:+.4f}")

    if out is not None:
        trainer.save(out)
    trainer.stop()


# ---------------------------------------------------------------------------------------- its parts


def row_order(rows: int) -> Iterator[int]:
    """Yield the indices of all rows in a random order, then in another one, and so on without an end."""
    for epoch in itertools.count():
        yield from np.random.default_rng([SEED, epoch]).permutation(rows).tolist()


@asynccontextmanager
async def serve(engine: InferenceEngine) -> AsyncGenerator[ObjectReceiveStream[list[Chunk]]]:
    """Start the engine, and stop it at the end. From the stream come the pieces of answers that it sends."""
    send, receive = anyio.create_memory_object_stream[list[Chunk]](math.inf)
    try:
        async with send, receive, anyio.create_task_group() as tasks:
            await engine.start(send.send_nowait, tasks)
            yield receive
            tasks.cancel_scope.cancel()  # its tasks would replace a server that stops
    finally:
        with anyio.CancelScope(shield=True):
            await engine.stop()


async def sample(
    engine: InferenceEngine,
    stream: ObjectReceiveStream[list[Chunk]],
    requests: Sequence[GenerateRequest],
    tokenizer: Tokenizer,
) -> list[list[Answer]]:
    """Return the answers to each request, when all have ended. Raise EngineError if the engine fails."""
    parts: dict[tuple[str, int], list[Chunk]] = {
        (request.id, index): [] for request in requests for index in range(len(request.seeds))
    }
    for request in requests:
        engine.generate(request)
    unfinished = len(parts)
    while unfinished:
        for chunk in await stream.receive():
            if chunk.finish in ("abort", "error"):
                raise EngineError(f"the engine gave up request {chunk.request}: {chunk.error}")
            parts[chunk.request, chunk.sample].append(chunk)
            unfinished -= bool(chunk.finish)
    return [
        [join(request, parts[request.id, index], tokenizer) for index in range(len(request.seeds))]
        for request in requests
    ]


def join(request: GenerateRequest, chunks: Sequence[Chunk], tokenizer: Tokenizer) -> Answer:
    """Return one answer: its tokens, each with the logprob and the version of the weights that sampled it."""
    tokens = np.concatenate([chunk.tokens for chunk in chunks])
    logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
    versions = np.concatenate([chunk.versions for chunk in chunks])
    finish = chunks[-1].finish
    text = answer_text(request.prompt_ids.numpy(), tokens, finish, tokenizer)
    return Answer(tokens, logprobs, versions, finish, text, engine="")


def batch_of(groups: Sequence[Sequence[Trajectory]]) -> Batch:
    """Return the batch of the answers to each prompt."""
    answers = list(itertools.chain(*groups))

    def column(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(answer, name) for answer in answers]))

    tokens = {
        "tokens": column("tokens").long(),  # of prompts and answers
        "loss_mask": column("loss_mask"),  # True for the tokens of answers
        "behaviour_logprobs": column("logprobs"),
        "versions": column("versions"),
    }
    sequences = {
        "rewards": torch.tensor([answer.score.reward for answer in answers], dtype=torch.float64),
        "group": torch.tensor([number for number, group in enumerate(groups) for _ in group]),
    }
    return Batch([len(answer.tokens) for answer in answers], tokens, sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the quickstart's model in one process.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32, help="prompts of each step")
    parser.add_argument("--out", type=Path, help="new folder for the trained model")
    options = parser.parse_args()
    if options.out is not None:
        options.out.mkdir(parents=True)  # before the training, because it fails for a folder that exists
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    anyio.run(train, options.steps, options.batch_size, options.out)


if __name__ == "__main__":
    main()
