"""Every algorithm against golden vectors; tests/conformance has its gradient over splits of the batch.

The vectors in `golden/` come from `reference.py`, which shares no code with what is tested.
"""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import msgspec
import pytest
import torch
from torch import Tensor

from stretto import Context
from stretto.algorithm import Algorithm, Call, Encoded, Group
from stretto.assembly.dataflow import graph_of
from stretto.assembly.plugins import Plugins
from stretto.config import RunConfig
from stretto.engine import Sampling
from stretto.errors import ConfigError
from stretto.models.tokenizer import ByteTokenizer
from stretto.rl.batch import Batch
from stretto.rl.correction import Correction
from stretto.rl.functional import loss_weights
from stretto.rl.policy_gradient import PolicyConfig

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.json"))
POLICY_GRADIENTS = ["cispo", "dapo", "distill", "gspo", "grpo", "m2po", "ppo", "reinforce_pp", "rloo", "sapo"]
PREFERENCES = ["dpo", "reward_model"]
ALGORITHMS = [*POLICY_GRADIENTS, *PREFERENCES, "sft"]

# What the loss on each model is given: what its head says now.
CURRENT = {"actor": "logprobs", "critic": "current_values", "reward": "scores"}
DTYPES = {"loss_mask": torch.bool, "group": torch.long, "sample": torch.long}


def made(name: str, **options: Any) -> Any:
    component = Plugins().get("algorithm", name)
    if issubclass(component.config, PolicyConfig):
        # Two minibatches, so that the proximal policy is a column and not the current one.
        options = {"minibatches": 2, **options}
    config = msgspec.convert({"use": name, **options}, component.config)
    return component.make(config, Context(run="r", name="n", seed=1))


def problems(name: str, temperature: float = 1.0, **options: Any) -> list[str]:
    component = Plugins().get("algorithm", name)
    config = msgspec.convert({"use": name, **options}, component.config)
    run = SimpleNamespace(
        queue=SimpleNamespace(max_staleness=2),
        sampling=Sampling(temperature=temperature),
        algorithm=config,
        model=None,
        models={},
    )
    assert component.check is not None
    return [problem.path for problem in component.check(config, cast("RunConfig", run))]


def batch_of(lengths: Any, **inputs: Any) -> Batch:
    inputs = {"sample": [*range(len(lengths))], **inputs}  # each sequence is one, unless it is said
    columns = {
        name: torch.tensor(values, dtype=DTYPES.get(name, torch.float32)) for name, values in inputs.items()
    }
    return Batch(lengths, {}, {}).with_columns(columns)


def prepared(algorithm: Algorithm, batch: Batch) -> Batch:
    """The batch with all that the functions of the dataflow write, each given what it says it reads."""
    for call in graph_of(algorithm.calls(), algorithm.models).calls:
        if call.function is not None:
            written = call.function(told(call, batch))
            assert sorted(written) == sorted(call.writes)
            batch = batch.with_columns(written)
    return batch


def trains(algorithm: Algorithm) -> list[Call]:
    return [call for call in algorithm.calls() if call.op == "train"]


def told(call: Call, batch: Batch) -> Batch:
    """The batch with no more than a call says it reads."""
    columns = {key: batch[key] for key in call.reads if key not in ("tokens", "versions")}
    return Batch(batch.lengths, {}, {}).with_columns(columns)


def losses_of(call: Call, current: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    assert call.loss is not None
    losses, statistics = call.loss.function(current, batch)
    assert losses.shape == current.shape
    return torch.where(batch["loss_mask"], losses, 0.0), statistics


def weights_of(call: Call, batch: Batch) -> Tensor:
    assert call.loss is not None
    mask, index = batch["loss_mask"], batch.sequence_index()
    return loss_weights(mask, index, len(batch), call.loss.reduction)


def close(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_golden_vectors(file: Path) -> None:
    golden = json.loads(file.read_text())
    algorithm = made(golden["algorithm"], **golden["options"])
    batch = prepared(algorithm, batch_of(**golden["inputs"]))
    divisor: float = getattr(algorithm.config, "loss_divisor", 1.0)
    for column in golden["expected"].keys() & {"advantages", "returns"}:
        close(batch[column], golden["expected"][column])
    for call in trains(algorithm):
        assert call.model is not None
        expected = golden["expected"].get(call.model, golden["expected"])
        losses, statistics = losses_of(call, batch[CURRENT[call.model]], told(call, batch))
        close(losses * divisor, expected["losses"])
        loss = float((losses * weights_of(call, batch)).sum())
        assert loss == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
        for name, mean in expected.get("statistics", {}).items():
            assert float(statistics[name][batch["loss_mask"]].mean()) == pytest.approx(mean, rel=1e-4)
    if (state := golden["expected"].get("state")) is not None:
        assert algorithm.state() == pytest.approx(state, rel=1e-6)


def test_every_algorithm_correction_and_kl_has_a_vector() -> None:
    found = [json.loads(file.read_text()) for file in GOLDEN]
    assert {golden["algorithm"] for golden in found} == set(ALGORITHMS)
    kinds = {golden["options"].get("correction", {}).get("use", "behaviour") for golden in found}
    assert kinds == set(get_args(Correction))
    kls = {(kl.get("estimator"), kl.get("where")) for golden in found if (kl := golden["options"].get("kl"))}
    assert {(estimator, where) for estimator in ("k1", "k2", "k3") for where in ("loss", "reward")} <= kls


def test_the_golden_vectors_are_what_the_reference_writes(tmp_path: Path) -> None:
    for file in GOLDEN:
        case = json.loads(file.read_text())
        case["inputs"] = case["expected"] = {}
        (tmp_path / file.name).write_text(json.dumps(case))
    program = shutil.copy(GOLDEN[0].with_name("reference.py"), tmp_path)
    subprocess.run([sys.executable, program], check=True)
    written = {file.name: file.read_text() for file in tmp_path.glob("*.json")}
    assert written == {file.name: file.read_text() for file in GOLDEN}


# ------------------------------------------------------------------------------------ single promises


def test_dapo_leaves_out_groups_that_teach_nothing() -> None:
    same, mixed = Group((1.0, 1.0), (3, 4)), Group((1.0, 0.0), (3, 4))
    assert [made("dapo").keep(group) for group in (same, mixed)] == [False, True]
    assert made("dapo", dynamic_sampling=False).keep(same)


def test_m2po_always_asks_for_the_proximal_policy() -> None:
    names = [call.name for call in made("m2po", minibatches=1).calls()]
    assert "forward(actor)" in names
    assert "forward(actor)" not in [call.name for call in made("gspo", minibatches=1).calls()]


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_a_reference_is_there_only_for_a_kl(name: str) -> None:
    without, with_kl = made(name), made(name, kl={"coef": 0.1})
    assert "reference" not in without.models
    assert [call for call in without.calls() if call.model == "reference"] == []
    assert not with_kl.models["reference"].trainable
    graph = graph_of(with_kl.calls(), with_kl.models)
    assert [call.name for call in graph.calls if call.model == "reference"] == ["forward(reference)"]


def test_a_kl_in_the_loss_pulls_towards_the_reference_but_for_k1() -> None:
    # Advantages are 0, so the gradient is the KL's: coef · (1, d, 1 - exp(-d)) with d = ln 2, by 2 tokens.
    pair: dict[str, Any] = {"lengths": [2, 2], "loss_mask": [0, 1, 0, 1], "group": [0, 0], "rewards": [1, 1]}
    policies = {"behaviour_logprobs": [0, -1, 0, -1], "reference_logprobs": [0, -1 - math.log(2), 0, -1]}
    batch = batch_of(**pair, **policies)
    for estimator, expected in (("k1", [1.0, 1.0]), ("k2", [math.log(2), 0.0]), ("k3", [0.5, 0.0])):
        algorithm = made("grpo", minibatches=1, kl={"coef": 0.5, "estimator": estimator})
        columns = prepared(algorithm, batch)
        [call] = trains(algorithm)
        logprobs = torch.tensor([0.0, -1.0, 0.0, -1.0], requires_grad=True)
        losses, _ = losses_of(call, logprobs, columns)
        (losses * weights_of(call, columns)).sum().backward()
        assert logprobs.grad is not None
        close(logprobs.grad[batch["loss_mask"]], [0.25 * value for value in expected])


def test_what_cannot_work_is_told_beforehand() -> None:
    assert problems("grpo", group_size=1) == ["algorithm.group_size"]
    assert problems("grpo", kl={"coef": 0.1, "estimator": "k1"}) == ["algorithm.kl.estimator"]
    assert problems("grpo", kl={"coef": 0.1, "estimator": "k1", "where": "reward"}) == []
    assert problems("ppo", correction={"use": "none"}) == ["algorithm.correction.use"]
    assert problems("ppo", group_size=1) == problems("reinforce_pp", group_size=1) == []
    assert problems("reinforce_pp", group_size=1, baseline=True) == ["algorithm.group_size"]
    assert problems("distill", group_size=1) == []
    assert problems("distill", group_size=1, reward_weight=1.0) == ["algorithm.group_size"]
    assert problems("sft", temperature=0.7) == problems("dpo", temperature=0.7) == ["sampling.temperature"]
    for name in PREFERENCES:
        assert problems(name) == []
        assert problems(name, rejected_column="chosen") == ["algorithm.rejected_column"]


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="target needs coef above 0"):
        made("ppo", kl={"target": 6.0})
    with pytest.raises(msgspec.ValidationError, match="expected where: reward"):
        made("ppo", kl={"coef": 0.1, "target": 6.0, "where": "loss"})
    with pytest.raises(msgspec.ValidationError, match="label_smoothing is for variant 'sigmoid'"):
        made("dpo", variant="ipo", label_smoothing=0.1)
    with pytest.raises(msgspec.ValidationError, match="group_size"):
        made("sft", group_size=2)


def test_the_kl_controller_weighs_each_batch_by_its_state() -> None:
    algorithm = made("ppo", kl={"coef": 0.2, "target": 1.0, "horizon": 10.0})
    file = GOLDEN[0].with_name("ppo_adaptive_kl.json")
    batch = batch_of(**json.loads(file.read_text())["inputs"])
    assert prepared(algorithm, batch)["kl_coef"].tolist() == pytest.approx([0.2] * len(batch))
    coef = algorithm.state()["kl_coef"]
    assert coef != 0.2
    assert prepared(algorithm, batch)["kl_coef"].tolist() == pytest.approx([coef] * len(batch))


def test_ppo_without_a_kl_target_has_no_coefficient_to_report() -> None:
    writes = {key for call in made("ppo", kl={"coef": 0.1}).calls() for key in call.writes}
    assert "kl_coef" not in writes


# -------------------------------------------------------------------------------------------- rows


CHAT = [{"role": "user", "content": "ab"}]
CALLS = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]


def encoded(name: str, row: dict[str, Any], index: int = 0, **options: Any) -> Encoded:
    return made(name, **options).encode(row, index, ByteTokenizer())


def test_sft_trains_on_the_answer_alone() -> None:
    tokens, mask = encoded("sft", {"prompt": "ab", "completion": "cde"})
    assert bytes(tokens) == b"abcde"
    assert list(mask) == [False, False, True, True, True]
    row = {"prompt": [{"role": "user", "content": "ab"}], "reply": [{"role": "assistant", "content": "c"}]}
    tokens, mask = encoded("sft", row, completion_column="reply")
    assert bytes(tokens) == b"ab\nc"
    assert list(mask) == [False, False, False, True]


def test_the_first_token_of_a_sequence_is_never_trained_on() -> None:
    assert list(encoded("sft", {"prompt": "", "completion": "cd"}).loss_mask) == [False, True]


def test_a_pair_is_the_chosen_answer_and_then_the_rejected_one() -> None:
    row = {"prompt": "a", "chosen": "bc", "rejected": "d"}
    assert [bytes(encoded("dpo", row, index).tokens) for index in (0, 1)] == [b"abc", b"ad"]
    assert list(encoded("dpo", row).loss_mask) == [False, True, True]
    assert list(encoded("reward_model", row).loss_mask) == [False, False, True]
    turned = encoded("dpo", row, chosen_column="rejected", rejected_column="chosen")
    assert bytes(turned.tokens) == b"ad"


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "sft",
            {"prompt": "a", "competion": "b", "id": 7},
            "column 'completion' of row 7: is not there; did you mean 'competion'?; "
            "the row's columns: prompt, competion, id",
        ),
        ("sft", {"completion": "b"}, "column 'prompt': is not there"),
        ("sft", {"prompt": "a", "completion": 3}, "expected text or chat messages"),
        ("sft", {"prompt": [{"role": "user", "content": 42}], "completion": "a"}, "expected text or chat"),
        ("sft", {"prompt": "a", "completion": ""}, "column 'completion': is empty: no token to train on"),
        ("sft", {"prompt": "", "completion": "b"}, "is one token, and the prompt is empty"),
        *(
            (name, {"prompt": CHAT, column: CALLS, "chosen": CALLS}, "drops or changes its 'tool_calls'")
            for name, column in (("sft", "completion"), ("dpo", "rejected"), ("reward_model", "rejected"))
        ),
        ("reward_model", {"prompt": "a", "rejected": "b"}, "column 'chosen': is not there"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(name: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        encoded(name, row)
    assert message in str(caught.value)
