"""Turns joined token by token: what a trainer is given is what was sampled, whatever a chat template does."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agent_session import tokenizer_with
from stretto.agents.conversation import Conversation
from stretto.engine import Sampling
from stretto.errors import RequestError
from stretto.models.tokenizer import ByteTokenizer
from stretto.models.tokenizer import Tokenizer as PolicyTokenizer
from stretto.workflow import Answer, Score

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + CONTENT + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KEEPS = CHATML.replace("CONTENT", "m.content")
# As Qwen3's: the reasoning of earlier answers goes.
STRIPS = CHATML.replace("CONTENT", "(m.content if loop.last else m.content.split('</think>')[-1])")


class Policy:
    """Samples token ids at random, so that few answers are what a tokenizer would make of their text."""

    def __init__(self, tokenizer: PolicyTokenizer, seed: int) -> None:
        self.random = random.Random(seed)
        self.tokenizer = tokenizer
        self.prompts: list[NDArray[np.int32]] = []
        self.answers: list[NDArray[np.int32]] = []

    async def __call__(self, ids: NDArray[np.int32], sampling: Sampling, images: Any) -> Answer:
        draw = self.random
        tokens: list[int] = []
        if draw.random() < 0.5:
            tokens += self.tokenizer.encode_text("think" * draw.randint(0, 2) + "</think>").tolist()
        tokens += [draw.randrange(3, 266) for _ in range(draw.randint(1, 12))]
        stopped = draw.random() < 0.8
        tokens = [*tokens[: sampling.max_tokens - 1], 2] if stopped else tokens[: sampling.max_tokens]
        self.prompts.append(ids)
        self.answers.append(np.asarray(tokens, np.int32))
        return Answer(
            tokens=self.answers[-1],
            logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
            versions=np.full(len(tokens), len(self.answers), np.int32),
            finish="stop" if stopped else "length",
            text=self.tokenizer.decode(self.answers[-1]),
            engine="inference-0",
        )


def chat(tokenizer: PolicyTokenizer, policy: Policy, **options: Any) -> Conversation:
    prompt = [{"role": "user", "content": "abc ok?"}]
    return Conversation(policy, tokenizer, Sampling(max_tokens=64), prompt, **options)


def check_exact(policy: Policy, conversation: Conversation) -> None:
    """Every answer is in the trajectories once, behind the very ids it was sampled from."""
    found: list[tuple[list[int], list[int], set[int]]] = []
    for trajectory in conversation.trajectories(Score(1.0)):
        assert len(trajectory.tokens) == len(trajectory.logprobs) == len(trajectory.versions)
        assert trajectory.loss_mask[-1]
        assert (trajectory.versions[~trajectory.loss_mask] == -1).all()
        assert not trajectory.logprobs[~trajectory.loss_mask].any()
        starts = np.flatnonzero(np.diff(trajectory.versions, prepend=-1) * trajectory.loss_mask)
        for start in starts:
            version = trajectory.versions[start]
            length = int((trajectory.versions == version).sum())
            answer = trajectory.tokens[start : start + length]
            logprobs = trajectory.logprobs[start : start + length]
            assert (logprobs == -np.arange(1, length + 1)).all()
            found.append((trajectory.tokens[:start].tolist(), answer.tolist(), {int(version)}))
    expected = [
        (prompt.tolist(), answer.tolist(), {number})
        for number, (prompt, answer) in enumerate(zip(policy.prompts, policy.answers, strict=True), 1)
    ]
    assert sorted(found) == sorted(expected)


async def test_ids_trained_are_ids_sampled_over_a_thousand_sessions(tmp_path: Any) -> None:
    tokenizer = tokenizer_with(STRIPS, tmp_path)
    splits = 0
    for seed in range(1000):
        policy = Policy(tokenizer, seed)
        conversation = chat(tokenizer, policy)
        for _ in range(policy.random.randint(1, 4)):
            assert await conversation.reply()
            conversation.add({"role": "tool", "content": policy.random.choice(["ok", "abc é", "thin", ""])})
        check_exact(policy, conversation)
        splits += conversation.splits
    assert splits > 200


async def test_a_template_that_keeps_history_never_splits(tmp_path: Any) -> None:
    tokenizer = tokenizer_with(KEEPS, tmp_path)
    for seed in range(50):
        policy = Policy(tokenizer, seed)
        conversation = chat(tokenizer, policy)
        for _ in range(4):
            await conversation.reply()
            conversation.add({"role": "user", "content": "abc"})
        check_exact(policy, conversation)
        # Bytes that are no UTF-8 read as replacement characters, and these stay what they are.
        assert conversation.splits == 0
        [trajectory] = conversation.trajectories(Score(0.5, {"correct": 1.0}))
        assert trajectory.score.metrics == {"correct": 1.0, "turns": 4.0, "splits": 0.0}
        between = trajectory.tokens[len(policy.prompts[0]) :][~trajectory.loss_mask[len(policy.prompts[0]) :]]
        assert "<|im_start|>user\nabc" in tokenizer.decode(between, special=True)


async def test_the_limit_counts_the_whole(tmp_path: Any) -> None:
    tokenizer = tokenizer_with(KEEPS, tmp_path)
    policy = Policy(tokenizer, 3)
    conversation = chat(tokenizer, policy, limit=120)
    while await conversation.reply():
        conversation.add({"role": "user", "content": "more"})
    [trajectory] = conversation.trajectories(Score(0.0))
    assert len(trajectory.tokens) <= 120
    assert len(policy.answers) > 1


async def test_a_plain_text_goes_on(tmp_path: Any) -> None:
    tokenizer = tokenizer_with(KEEPS, tmp_path)
    policy = Policy(tokenizer, 1)
    conversation = Conversation(policy, tokenizer, Sampling(max_tokens=9), "1+2=")
    await conversation.reply()
    conversation.add(" wrong: ")
    await conversation.reply()
    check_exact(policy, conversation)
    assert isinstance(conversation.history, str)
    assert conversation.history.startswith("1+2=")
    assert conversation.splits == 0
    with pytest.raises(TypeError, match="expected text"):
        conversation.add({"role": "user", "content": "no"})


class Untouched(ByteTokenizer):
    """Refuses to tokenise."""

    def encode_text(self, text: str, *, whole: bool = False, after: str = "") -> NDArray[np.int32]:
        raise AssertionError(f"tokenises {len(text)} characters")

    encode_prompt = encode_text  # type: ignore[assignment]


@pytest.mark.parametrize("prompt", ["x" * 5_000_000, [{"role": "user", "content": "x" * 5_000_000}]])
async def test_a_text_of_megabytes_is_refused_before_it_is_tokenised(prompt: Any) -> None:
    tokenizer = Untouched()
    policy = Policy(tokenizer, 0)
    limited = Conversation(policy, tokenizer, Sampling(), prompt, limit=1000)
    assert await limited.reply() is None
    with pytest.raises(RequestError, match=r"a text of 500000\d characters; the model reads at most 4194304"):
        await Conversation(policy, tokenizer, Sampling(), prompt).reply()
    assert not policy.prompts


async def test_a_long_text_is_tokenised_beside_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    class Watched(ByteTokenizer):
        def encode_text(self, text: str, *, whole: bool = False, after: str = "") -> NDArray[np.int32]:
            threads.append(threading.current_thread())
            return super().encode_text(text, whole=whole, after=after)

    conversation = chat(Watched(), Policy(ByteTokenizer(), 0))
    conversation.add({"role": "user", "content": "x" * 10**6})
    await conversation.reply()
    conversation.add({"role": "user", "content": "short"})
    await conversation.reply()
    assert [thread is threading.main_thread() for thread in threads] == [False, True]
