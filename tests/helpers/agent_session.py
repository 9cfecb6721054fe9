"""A policy that says what a test wants, for agents by endpoint, and a check of the trajectories."""

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stretto.agents.conversation import Conversation
from stretto.agents.endpoint import Endpoint
from stretto.agents.recorder import CallLimits, CallRecorder
from stretto.engine import Sampling
from stretto.errors import EngineError, together
from stretto.models.tokenizer import body_of, load_tokenizer
from stretto.tokenizer import Tokenizer as PolicyTokenizer
from stretto.workflow import Answer, Images, OnTokens, Prompt, Score

# As Qwen3's: the reasoning of earlier answers goes. Calls in the history are written again.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + "
    "(m.content if loop.last else m.content.split('</think>')[-1]) }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 2
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>'


def tokenizer_with(template: str | None, folder: Path) -> PolicyTokenizer:
    """Byte-level BPE with a few merges, so that the tokens of a text depend on where it is cut."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "i"), ("thi", "n"), ("a", "b"), ("ab", "c"), ("o", "k"), ("\u0120", "a")]
    vocabulary = {token: i for i, token in enumerate(SPECIAL + pieces + [a + b for a, b in merges])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=SPECIAL[:2]
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return load_tokenizer(str(folder))


@asynccontextmanager
async def recorded_agent(
    session: Any, limits: CallLimits | None = None
) -> AsyncGenerator[tuple[str, str, CallRecorder]]:
    """The address and the key of an agent's run, and what records its calls."""
    endpoint = Endpoint()
    await endpoint.start()
    recorder = CallRecorder(session, "a0", limits)
    async with endpoint.serve(recorder) as key:
        yield endpoint.base_url, key, recorder
    await endpoint.stop()


@asynccontextmanager
async def openai_agent(
    session: Any, limits: CallLimits | None = None, **options: Any
) -> AsyncGenerator[tuple[AsyncOpenAI, CallRecorder]]:
    async with recorded_agent(session, limits) as (url, key, recorder):
        async with AsyncOpenAI(base_url=url, api_key=key, **options) as client:
            yield client, recorder


T = TypeVar("T")


class FakeSession:
    """A policy that says what it is told to, token by token; then what it draws at random."""

    group_size = 1
    row_tools: Sequence[Any] = ()

    def __init__(self, tokenizer: PolicyTokenizer, *texts: str, seed: int = 0, max_tokens: int = 400) -> None:
        self.tokenizer = tokenizer
        self.images: Images | None = None
        """Of the ticket, for a policy that reads images."""
        self.asked_images: list[Sequence[str] | None] = []
        """The images of each prompt."""
        self.sampling = Sampling(max_tokens=max_tokens)
        self.texts = list(texts)
        self.random = random.Random(seed)
        self.asked: list[tuple[list[int], list[int]]] = []
        """Each prompt with its answer."""
        self.samplings: list[Sampling] = []
        self.conversation_ids: list[str] = []
        self.go_on = anyio.Event()
        """Set, it lets answers of which the first token was heard continue."""
        self.go_on.set()
        self.cancelled = anyio.Event()
        self.fault = ""

    async def members(self, sample: Callable[[int], Awaitable[T]]) -> list[T]:
        return await together(sample, range(self.group_size))

    def begin(self, conversation_id: str) -> None:
        pass

    async def generate(
        self,
        prompt_ids: NDArray[np.int32],
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        conversation_id: str = "",
        on_tokens: OnTokens | None = None,
        images: Sequence[str] | None = None,
    ) -> list[Answer]:
        assert n == 1
        assert sampling is not None
        if self.fault:
            raise EngineError(self.fault)
        tokens, stopped = self._draw(sampling, self.tokenizer.decode(prompt_ids, special=True))
        self.asked.append((prompt_ids.tolist(), tokens.tolist()))
        self.asked_images.append(images)
        self.samplings.append(sampling)
        self.conversation_ids.append(conversation_id)
        version = len(self.asked)
        for at in range(len(tokens)):
            await anyio.lowlevel.checkpoint()
            if on_tokens is not None:
                on_tokens(0, tokens[at : at + 1])
            try:
                await self.go_on.wait()
            except anyio.get_cancelled_exc_class():
                self.cancelled.set()
                raise
        return [
            Answer(
                tokens=tokens,
                logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
                versions=np.full(len(tokens), version, np.int32),
                finish="stop" if stopped else "length",
                text=self.tokenizer.decode(
                    body_of(tokens, "stop" if stopped else "length", self.tokenizer), after=prompt_ids
                ),
                engine="inference-0",
            )
        ]

    def _draw(self, sampling: Sampling, prompt: str) -> tuple[NDArray[np.int32], bool]:
        draw = self.random
        if self.texts:
            tokens, stopped = self.tokenizer.encode_text(self.texts.pop(0), after=prompt).tolist(), True
            ended = not self.tokenizer.form.ends or (tokens and self.tokenizer.ends_turn(tokens[-1]))
            tokens += [] if ended else [END]
        else:
            thought = "think" * draw.randint(0, 2) + "</think>" if draw.random() < 0.5 else ""
            called = CALL if draw.random() < 0.5 else ""
            tokens = self.tokenizer.encode_text(thought + called).tolist()
            tokens += [draw.randrange(3, 266) for _ in range(draw.randint(1, 12))]
            stopped = draw.random() < 0.8
            tokens += [END] if stopped else []
        for stop in sampling.stop:
            for upto in range(1, len(tokens)):
                if stop in self.tokenizer.decode(np.asarray(tokens[:upto], np.int32)):
                    return np.asarray(tokens[:upto], np.int32), True
        cut = tokens[: sampling.max_tokens]
        return np.asarray(cut, np.int32), stopped and len(cut) == len(tokens)

    async def score(
        self,
        prompt: Prompt,
        answers: Sequence[Answer | str],
        *,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[Score]:
        self.scored = answers, columns
        return [Score(1.0) for _ in answers]


def check_exact(session: FakeSession, recorder: CallRecorder | Conversation) -> None:
    """Every answer is in the trajectories once, behind the very ids that it was sampled from."""
    found: list[tuple[list[int], list[int]]] = []
    for trajectory in recorder.trajectories(Score(1.0)):
        assert trajectory.loss_mask[-1]
        assert (trajectory.versions[~trajectory.loss_mask] == -1).all()
        assert not trajectory.logprobs[~trajectory.loss_mask].any()
        starts = np.flatnonzero(np.diff(trajectory.versions, prepend=-1) * trajectory.loss_mask)
        for start in starts:
            length = int((trajectory.versions == trajectory.versions[start]).sum())
            answer = slice(int(start), int(start) + length)
            assert (trajectory.logprobs[answer] == -np.arange(1, length + 1)).all()
            found.append((trajectory.tokens[:start].tolist(), trajectory.tokens[answer].tolist()))
    assert sorted(found) == sorted(session.asked)
