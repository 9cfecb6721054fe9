"""The dataflow: edges from keys, an order that respects them, and words about what cannot run."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import Context
from stretto.algorithm import Call, Encoded, Loss, Model, forward, function, generate, read, score, train
from stretto.assembly.dataflow import graph_of
from stretto.errors import ConfigError
from stretto.rl.correction import CorrectionConfig
from stretto_policy_gradients import GRPO, GRPOConfig

MODELS = {"actor": Model(), "reference": Model(trainable=False), "critic": Model()}


def advantages(batch: Any) -> Mapping[str, Any]:
    return {}


def loss() -> Loss:
    return Loss(lambda logprobs, batch: (logprobs, {}), "token")


def ppo() -> list[Call]:
    """Listed in no good order."""
    return [
        train("actor", loss(), reads=["advantages", "proximal_logprobs"]),
        train("critic", loss(), reads=["returns"]),
        function(advantages, reads=["rewards", "values", "ref_logprobs"], writes=["advantages", "returns"]),
        forward("critic", writes="values"),
        forward("reference", writes="ref_logprobs"),
        forward("actor", writes="proximal_logprobs"),
        score(),
        generate("actor", samples=4),
    ]


def test_edges_follow_from_the_keys() -> None:
    graph = graph_of(ppo(), MODELS)
    assert ("generate(actor)", "forward(critic)") in graph.edges
    assert ("forward(critic)", "advantages") in graph.edges
    assert ("advantages", "train(critic)") in graph.edges
    assert ("forward(reference)", "train(critic)") not in graph.edges
    assert graph.calls[0].op == "generate"
    assert {call.op for call in graph.step_calls} == {"forward", "function", "train"}


@given(st.permutations(range(8)))
def test_every_order_of_listing_gives_an_order_that_runs(order: list[int]) -> None:
    calls = ppo()
    graph = graph_of([calls[index] for index in order], MODELS)
    place = {call.name: index for index, call in enumerate(graph.calls)}
    assert all(place[earlier] < place[later] for earlier, later in graph.edges)
    # Forwards read the weights of the step's start, whether or not their keys say so.
    assert place["forward(critic)"] < place["train(critic)"]
    assert place["forward(actor)"] < place["train(actor)"]


def other(name: str, reads: list[str], writes: list[str]) -> Call:
    return function(advantages, reads=reads, writes=writes, name=name)


ROWS = read(lambda row, index, tokenizer: Encoded([1], [True]))
TRAIN = train("actor", loss(), reads=[])
WRONG_LOSS = Loss(loss().function, "tokens")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([*ppo(), score()], "two calls are named 'score'"),
        ([*ppo(), other("late", ["reward"], [])],
         "reads 'reward', which no call writes; did you mean 'rewards'?"),
        ([*ppo(), other("twice", [], ["values"])],
         "two calls write the key 'values': 'forward(critic)' and 'twice'"),
        ([*ppo(), other("one", ["b"], ["a"]), other("two", ["a"], ["b"])],
         "the calls one, two wait for each other in a cycle"),
        ([*ppo(), forward("referense", writes="x")], "did you mean 'reference'"),
        ([*ppo(), train("reference", loss(), reads=[])], "which is not trainable"),
        ([call for call in ppo() if call.op != "train"], "no call trains a model"),
        ([*ppo()[1:], train("actor", WRONG_LOSS, reads=[])], "reduction 'tokens'; did you mean 'token'?"),
        ([call for call in ppo() if call.op != "score"], "expected both `generate` and `score`, or neither"),
        ([TRAIN], "must produce sequences, `generate` or `read`; found none"),
        ([ROWS, generate(samples=1), score(), TRAIN], "found read, generate(actor)"),
        ([ROWS, score(), TRAIN], "expected both"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(calls: list[Call], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        graph_of(calls, MODELS)


def test_calls_that_do_not_wait_for_each_other_share_a_level() -> None:
    levels = [{call.name for call in level} for level in graph_of(ppo(), MODELS).levels()]
    assert levels[0] == {"generate(actor)"}
    assert {"score", "forward(critic)", "forward(reference)"} <= levels[1]
    assert {"train(actor)", "train(critic)"} <= levels[-1]


def test_a_dataflow_is_drawn() -> None:
    graph = graph_of(ppo(), MODELS)
    text = graph.text().splitlines()
    assert text[0].split() == ["1", "generate(actor)", "after", "nothing"]
    assert len(text) == 2 * len(graph.calls)
    drawn = graph.mermaid().splitlines()
    assert drawn[0] == "flowchart LR"
    assert '  prompt -- "prompt" --> c0' in drawn
    arrows = [line for line in drawn if "-->" in line or "-.->" in line]
    assert len(arrows) == len(graph.edges) + 1


def test_grpo_asks_for_a_forward_only_if_several_updates_around_the_proximal_policy_follow() -> None:
    context = Context(run="r", name="n", seed=1)
    once = GRPO(GRPOConfig(use="grpo", minibatches=4), context)
    assert [call.op for call in graph_of(once.calls(), once.models).step_calls] == ["function", "train"]
    decoupled = CorrectionConfig(use="decoupled")
    often = GRPO(GRPOConfig(use="grpo", minibatches=4, correction=decoupled), context)
    calls = graph_of(often.calls(), often.models).step_calls
    assert [call.op for call in calls] == ["forward", "function", "train"]
    assert "proximal_logprobs" in calls[-1].reads
