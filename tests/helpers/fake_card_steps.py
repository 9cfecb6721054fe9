"""Steps of the real training engine on the fake card. Each line of the input is a case, each line of the
output what its second step did; a process of its own, because the device stays in it."""

# pyright: reportPrivateUsage=false

import gc
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import transformers

import stretto.training.engine
import stretto.training.layout
import stretto.training.model
import stretto.training.packing
import stretto.training.token_head
from fake_card import COUNTS, DEVICE
from stretto import Context
from stretto.component import Head
from stretto.engine import HeldModel
from stretto.rl.batch import Batch
from stretto.training.engine import HFTraining
from stretto_policy_gradients.grpo import GRPO, GRPOConfig
from stretto_ppo import PPO, PPOConfig
from stretto_torch import TorchTrainingConfig
from training_engines import batch_of_one_prompt

_SIZES = {
    "tiny": (64, 2, 4, 2, 128, 101, True),
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
}
_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    size: str
    lengths: list[int]
    shared: int = 0
    """Tokens that the sequences of a group of eight begin with."""
    trains: str = "actor"
    """The `actor`, the `critic`, or nothing: then a `reference` computes logprobs."""
    training: dict[str, Any] = {}
    counts: bool = False
    """Give the sum of the table of `check`."""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    form: str
    micro_batches: float
    reads: dict[str, int]
    products: dict[str, int]
    highest: int
    """The most bytes that lived on the card, in the two steps."""
    expected: int
    """The sum of the table of `check`; 0 without `counts`."""


def write_config(folder: Path, size: str) -> None:
    *shape, vocabulary, tied = _SIZES[size]
    config = transformers.AutoConfig.for_model(
        "qwen2",
        **dict(zip(_KEYS, shape, strict=True)),
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        dtype="bfloat16",
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)


def batch_of(case: Case) -> Batch:
    batch = batch_of_one_prompt(case.lengths, case.shared)
    names = ("behaviour_logprobs", "reference_logprobs", "values", "returns")
    columns = {name: torch.randn(batch.num_tokens) for name in names}
    answers = batch.positions() >= max(1, case.shared)
    group = torch.arange(len(case.lengths)) // 8
    return batch.with_columns({**columns, "loss_mask": answers, "group": group})


def run(case: Case, folder: Path) -> Done:
    section = {"gpus": 1, "varlen_attention": False, **case.training}
    config = msgspec.convert(section, TorchTrainingConfig)
    head = "value" if case.trains == "critic" else "policy"
    trainable = case.trains != "reference"
    context = Context(run="r", name="n", seed=1, model=str(folder), head=head, trainable=trainable)
    algorithm = (
        PPO(PPOConfig(use="ppo"), context)
        if case.trains == "critic"
        else GRPO(GRPOConfig(use="grpo"), context)
    )
    losses = {call.model: call.loss for call in algorithm.calls() if call.loss is not None}
    batch = batch_of(case)
    gc.collect()
    COUNTS.clear()
    before = COUNTS.live
    engine = HFTraining(config, context)
    engine.load(None)
    if (host := engine._host) is not None:  # on the way to the card, parameters lose their hooks
        for parameter in host.masters:
            parameter._post_accumulate_grad_hooks = None  # pyright: ignore[reportAttributeAccessIssue]
            parameter.register_post_accumulate_grad_hook(host._take_gradient)
    figures: dict[str, float] = {}
    for _ in range(2):
        COUNTS.reads.clear()
        COUNTS.products.clear()
        if trainable:
            figures = {**engine.train(batch, losses[case.trains], temperature=1.0)}
        else:
            engine.forward(batch, temperature=1.0)
    held = [HeldModel(str(folder), head, trainable)]
    memory = config.memory(held, max(case.lengths)) if case.counts else None
    return Done(
        form=engine.form,
        micro_batches=figures.get("micro_batches", 0.0),
        reads={**COUNTS.reads},
        products={**COUNTS.products},
        highest=COUNTS.highest - before,
        expected=sum(memory.parts.values()) if memory is not None else 0,
    )


def _load(source: str, config: Any, head: Head, device: torch.device, **options: Any) -> Any:
    """A model without files, with the memory of a loaded one."""
    options = {"dtype": torch.float32, **options}
    with torch.device("meta"):
        model = stretto.training.model._kind_of(config, head).from_config(config, **options)
    model.eval().to_empty(device=device).tie_weights()  # a change of the tensors' class unties them
    return model


def _without_numbers() -> ExitStack:
    """Trials read numbers, and there are none: here each passes."""
    stack = ExitStack()
    stack.enter_context(patch.object(stretto.training.model, "_load", _load))
    for module, name in (
        (stretto.training.packing, "compare_with_plain"),
        (stretto.training.engine, "compare_with_itself"),
        (stretto.training.token_head, "_compare"),
    ):
        stack.enter_context(patch.object(module, name, return_value=None))
    stack.enter_context(patch.object(stretto.training.layout, "compute_device", return_value=DEVICE))
    return stack


def main() -> None:
    for line in sys.stdin.buffer:
        case = msgspec.json.decode(line, type=Case)
        with TemporaryDirectory() as folder, _without_numbers():
            write_config(Path(folder), case.size)
            done = run(case, Path(folder))
        sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
