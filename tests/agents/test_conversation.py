"""Turns joined token by token: what a trainer is given is what was sampled, whatever a chat template does."""

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agent_session import TEMPLATE, FakeSession, check_exact, tokenizer_with
from stretto.agents.conversation import Conversation
from stretto.engine import Sampling
from stretto.errors import RequestError
from stretto.models.tokenizer import ByteTokenizer
from stretto.workflow import Answer, Score

KEEPS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

USER: Any = {"role": "user", "content": "abc ok?"}


def chat(policy: FakeSession, prompt: Any = (USER,), **options: Any) -> Conversation:
    async def generate(ids: NDArray[np.int32], sampling: Sampling, images: Any) -> Answer:
        [answer] = await policy.generate(ids, sampling=sampling)
        return answer

    return Conversation(generate, policy.tokenizer, policy.sampling, prompt, **options)


async def test_ids_trained_are_ids_sampled_over_hundreds_of_sessions(tmp_path: Any) -> None:
    """Few answers are what a tokenizer would make of their text: they have ids drawn at random."""
    tokenizer = tokenizer_with(TEMPLATE, tmp_path)
    splits = 0
    for seed in range(400):
        policy = FakeSession(tokenizer, seed=seed, max_tokens=64)
        conversation = chat(policy)
        for _ in range(policy.random.randint(1, 4)):
            assert await conversation.reply()
            conversation.add({"role": "tool", "content": policy.random.choice(["ok", "abc é", "thin", ""])})
        check_exact(policy, conversation)
        splits += conversation.splits
    assert splits > 80


async def test_a_template_that_keeps_history_never_splits(tmp_path: Any) -> None:
    tokenizer = tokenizer_with(KEEPS, tmp_path)
    for seed in range(50):
        policy = FakeSession(tokenizer, seed=seed, max_tokens=64)
        conversation = chat(policy)
        for _ in range(4):
            await conversation.reply()
            conversation.add({"role": "user", "content": "abc"})
        check_exact(policy, conversation)
        # Bytes that are no UTF-8 read as replacement characters, and these stay what they are.
        assert conversation.splits == 0
        [trajectory] = conversation.trajectories(Score(0.5, {"correct": 1.0}))
        assert trajectory.score.metrics == {"correct": 1.0, "turns": 4.0, "splits": 0.0}
        start = len(policy.asked[0][0])
        between = trajectory.tokens[start:][~trajectory.loss_mask[start:]]
        assert "<|im_start|>user\nabc" in tokenizer.decode(between, special=True)


async def test_the_limit_counts_the_whole(tmp_path: Any) -> None:
    policy = FakeSession(tokenizer_with(KEEPS, tmp_path), *["thin ok"] * 20)
    conversation = chat(policy, limit=120)
    while await conversation.reply():
        conversation.add({"role": "user", "content": "more"})
    [trajectory] = conversation.trajectories(Score(0.0))
    assert len(trajectory.tokens) <= 120
    assert len(policy.asked) > 1


async def test_a_plain_text_goes_on(tmp_path: Any) -> None:
    policy = FakeSession(tokenizer_with(KEEPS, tmp_path), seed=1, max_tokens=9)
    conversation = chat(policy, "1+2=")
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
    def encode_text(self, text: str, *, whole: bool = False, after: str = "") -> NDArray[np.int32]:
        raise AssertionError(f"tokenises {len(text)} characters")

    encode_prompt = encode_text  # type: ignore[assignment]


@pytest.mark.parametrize("prompt", ["x" * 5_000_000, [{"role": "user", "content": "x" * 5_000_000}]])
async def test_a_text_of_megabytes_is_refused_before_it_is_tokenised(prompt: Any) -> None:
    policy = FakeSession(Untouched())
    assert await chat(policy, prompt, limit=1000).reply() is None
    with pytest.raises(RequestError, match=r"a text of 500000\d characters; the model reads at most 4194304"):
        await chat(policy, prompt).reply()
    assert not policy.asked


async def test_a_long_text_is_tokenised_beside_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    class Watched(ByteTokenizer):
        def encode_text(self, text: str, *, whole: bool = False, after: str = "") -> NDArray[np.int32]:
            if text != "ok":  # the policy's answer
                threads.append(threading.current_thread())
            return super().encode_text(text, whole=whole, after=after)

    conversation = chat(FakeSession(Watched(), "ok", "ok"))
    for text in ("x" * 10**6, "short"):
        conversation.add({"role": "user", "content": text})
        await conversation.reply()
    assert [thread is threading.main_thread() for thread in threads] == [False, True]
