"""The contract of inference engines as tests: of one engine alone, and of whole runs of several processes.

The tests make tiny models and compare every logprob with the forward pass of transformers, so they need
`stretto[torch]`. An engine without a model has tests of its own.
"""

from __future__ import annotations

import json
import os
import signal
import string
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import numpy as np
import pytest
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal
from numpy.typing import NDArray

from stretto.array import Array
from stretto.component import Component, Context, Kind
from stretto.engine import Chunk, Finish, GenerateRequest, InferenceEngine, Load, Sampling, SwapReport
from stretto.errors import EngineError, WeightsError, one_error
from stretto.hooks import hookimpl
from stretto.models.digest import digest_of, tensor_hash
from stretto.models.version_files import FolderPublisher, open_version
from stretto.testing.component import ComponentConformance, ComponentUnderTest, composed_run
from stretto.workflow import Answer, Prompt, Score, Session, Trajectory, WorkflowConfig

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "EngineUnderTest",
    "InferenceConformance",
    "Reference",
    "RunConformance",
    "Sample",
    "ServedEngine",
    "TinyModel",
    "make_tiny_model",
]


@dataclass(frozen=True)
class EngineUnderTest:
    """The engine under test, named as in a run file, and the options that it supports."""

    use: str
    """Name of the engine."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More keys of the section `inference`. The tests' model has 1,024 positions; the engine must serve them
    all."""
    plugins: tuple[str, ...] = ()
    """Plugin files to load the engine from, if it is not an installed component."""
    seeds: bool = False
    """Whether the same seed gives the same answer, independent of other requests."""
    refuses: frozenset[str] = frozenset()
    """Which of `top_p`, `top_k`, `min_p` and `logit_bias` the engine refuses with an error that names them.
    `top_k+top_p` means that it refuses only both together."""
    servers: bool = False
    """Whether its worker runs the model in child processes. The tests then also kill these alone."""
    tolerance: float = 1e-3
    """Maximum difference between a logprob and that of the reference, in nats, in float32."""
    start_s: float = 120.0
    """Maximum duration of a start, in seconds."""

    def make(self, model: Path, folder: Path, **options: Any) -> InferenceEngine:
        """Make the engine, not started, in a run whose folder is `folder`."""
        section = {"use": self.use, **self.options, **options}
        (folder / "composed").mkdir(parents=True, exist_ok=True)
        composed = composed_run("inference", section, {}, self.plugins, folder / "composed" / "run")
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        context = Context(
            run="conformance",
            name="conformance",
            seed=0,
            model=str(model),
            folder=str(folder),
            worker="inference-0",
        )
        return composed.make("inference", context)


# ------------------------------------------------------------------------------------ tiny models

SPECIAL = ("<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = SPECIAL.index("<|im_end|>")
VOCABULARY = len(SPECIAL) + 97
"""Vocabulary size of a tiny model. Not a multiple of the sizes to which engines pad their embeddings."""
POSITIONS = 1024
_DEEP = 16
"""Number of layers that makes a model slow enough for a test to act in the middle of an answer."""
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(folder: Path, *, seed: int = 0, layers: int = 2) -> Path:
    """Write a random Qwen2 model into a folder and return the folder.

    The model is float32 with 2 heads of size 32, and has one token for each printable ASCII character. Its
    distributions are peaked, so that a wrong token, position or version shows in the logprobs.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
        dtype="float32",
    )
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():  # norms and biases too: otherwise an error in them would not show
        parameter.data += 0.05 * torch.randn_like(parameter)
    torch.random.set_rng_state(generator)
    model.generation_config.eos_token_id = END
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def make_tiny_tokenizer() -> Any:
    """Make a byte-level BPE tokenizer without merges, which engines load without a special class."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    written = {" ": "\u0120", "\n": "\u010a", "\t": "\u0109"}
    characters = sorted(set(string.printable) - set("\r\x0b\x0c"))
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *(written.get(c, c) for c in characters)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[END],
        additional_special_tokens=[*SPECIAL[1:3]],
        chat_template=_TEMPLATE,
    )


class Reference:
    """The outputs of a model folder in transformers' plain float32 forward. L: tokens, V: vocabulary size."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self._model: Any = model.float().eval().requires_grad_(False)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors as a trainer publishes them: tied tensors have one name."""
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Return (L, V) the logits after each token."""
        import torch

        return self._model(torch.tensor([list(tokens)])).logits[0].double().numpy()

    def logprobs(
        self, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0
    ) -> NDArray[np.float64]:
        """Return (A,) the logprobs of an answer's tokens. Temperature 0 gives those of temperature 1."""
        logits = self.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        return _log_softmax(logits / (temperature or 1.0))[np.arange(len(answer)), list(answer)]

    def many_logprobs(
        self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> Iterator[NDArray[np.float64]]:
        """Yield the `logprobs` of each (prompt, answer), in one forward for all texts of the same length."""
        import torch

        by_length: dict[int, list[list[int]]] = {}
        for prompt, answer in texts:
            by_length.setdefault(len(prompt) + len(answer), []).append([*prompt, *answer])
        logits = {
            length: iter(self._model(torch.tensor(rows)).logits.double().numpy())
            for length, rows in by_length.items()
        }
        for prompt, answer in texts:
            own = next(logits[len(prompt) + len(answer)])[len(prompt) - 1 : -1]
            yield _log_softmax(own)[np.arange(len(answer)), list(answer)]

    def last_over(self, older: Reference, tokens: Sequence[int], kept: int) -> float:
        """Return the logprob of the last token under these weights, with the KV cache of the first `kept`
        tokens from older weights; 1 <= kept < L - 1."""
        import torch

        text = torch.tensor([list(tokens)])
        cache = older._model(text[:, :kept], use_cache=True).past_key_values
        logits = self._model(text[:, kept:-1], past_key_values=cache, use_cache=True).logits[0, -1]
        return float(_log_softmax(logits.double().numpy())[tokens[-1]])


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass(frozen=True)
class TinyModel:
    """A tiny model on disk, with its reference."""

    folder: Path
    reference: Reference

    @classmethod
    def make(cls, folder: Path, *, seed: int, layers: int) -> TinyModel:
        """See `make_tiny_model`."""
        return cls(make_tiny_model(folder, seed=seed, layers=layers), Reference(folder))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, without special tokens."""
        from transformers import PreTrainedTokenizerFast

        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(self.folder)
        return tokenizer.decode(list(tokens), skip_special_tokens=True)


# -------------------------------------------------------------------------------- a served engine


@dataclass
class Sample:
    """One sample, assembled from its chunks."""

    start: int = 0
    """Position of the first token that arrived."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    finish: Finish = ""
    error: str = ""
    arrivals: list[float] = field(default_factory=list[float])
    """Time of arrival of each chunk, from `time.monotonic`."""

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk.

        Raises:
            AssertionError: if it is not the next chunk, or not a valid chunk.
        """
        assert not self.finish, f"a chunk after the last one: {chunk}"
        if not self.arrivals:
            self.start = chunk.position
        assert chunk.position == self.start + len(self.tokens), f"a missing or repeated token: {chunk}"
        types = (chunk.tokens.dtype, chunk.logprobs.dtype, chunk.versions.dtype)
        assert types == (np.int32, np.float32, np.int32), f"columns of {types}"
        assert len(chunk.tokens) == len(chunk.logprobs) == len(chunk.versions), (
            f"columns of different lengths: {chunk}"
        )
        assert (chunk.finish == "error") == bool(chunk.error), f"`error` and `finish` disagree: {chunk}"
        assert len(chunk.tokens) or chunk.finish, "an empty chunk"
        self.arrivals.append(time.monotonic())
        self.tokens += chunk.tokens.tolist()
        self.logprobs += chunk.logprobs.tolist()
        self.versions += chunk.versions.tolist()
        self.finish, self.error = chunk.finish, chunk.error

    def copy(self) -> Sample:
        """Return a copy of the current state."""
        return Sample(
            self.start,
            self.tokens[:],
            self.logprobs[:],
            self.versions[:],
            self.finish,
            self.error,
            self.arrivals[:],
        )


Key = tuple[str, int]
"""Id of a request, and index of a sample."""


class ServedEngine:
    """An engine in its own event loop, and all chunks that it has emitted. Tests call it from their thread.

    It receives weights in folders, as with the transport `file`: version 0, 1, ... in the order of `swap`.
    """

    def __init__(self, under_test: EngineUnderTest, model: Path, folder: Path, **options: Any) -> None:
        self.engine = under_test.make(model, folder, **options)
        self.under_test = under_test
        self.weights: dict[int, Reference] = {}
        """The reference of each version."""
        self.messages = 0
        """Number of calls of `emit` so far."""
        self._publisher = FolderPublisher(folder / "weights", keep=3, shard_gb=1.0)
        self._published = count()
        self._portal: BlockingPortal
        self._samples: dict[Key, Sample] = {}
        self._open_keys: dict[Key, None] = {}
        self._broken: BaseException | None = None
        """The exception that ended the engine."""
        self._violations: list[AssertionError] = []
        self._news = anyio.Event()
        self._over = anyio.Event()

    @contextmanager
    def running(self) -> Generator[ServedEngine]:
        """Start the engine, and stop it at the end of the block."""
        with start_blocking_portal("asyncio") as portal:
            self._portal = portal
            end, _ = portal.start_task(self._live)
            try:
                yield self
            finally:
                portal.call(self._over.set)
                end.result(self.under_test.start_s)
                self._publisher.close()

    # -------------------------------------------------------------------------- what a worker does

    def ask(self, *requests: GenerateRequest, images: Sequence[bytes] = ()) -> None:
        """Send requests to the engine, with the files of their images if they have any."""
        more = {"images": images} if images else {}
        for request in requests:
            have = request.have or (0,) * len(request.seeds)
            self._open_keys |= {(request.id, i): None for i in range(len(request.seeds)) if have[i] >= 0}
        self._portal.call(lambda: [self.engine.generate(request, **more) for request in requests])

    def abort(self, request: str) -> None:
        """Abort a request."""
        self._portal.call(self.engine.abort, request)

    def load(self) -> Load:
        """Return the load figures of the engine."""
        return self._portal.call(self.engine.load)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return the engine's logprobs of given sequences."""
        arrays = [np.array(sequence, np.int32) for sequence in sequences]
        return self._portal.call(self.engine.logprobs, arrays)

    def swap(self, reference: Reference) -> SwapReport:
        """Make the engine serve the weights of a model as the next version."""
        report = self.swap_tensors(reference.tensors())
        self.weights[report.version] = reference
        return report

    def swap_tensors(self, tensors: Mapping[str, Tensor]) -> SwapReport:
        """Make the engine serve tensors as the next version, whether they fit or not."""
        return self._portal.call(self._swap, next(self._published), tensors)

    def stop(self) -> None:
        """Stop the engine before the end of the test."""
        self._portal.call(self.engine.stop)

    @property
    def version(self) -> int:
        """The newest version that the engine received."""
        return max(self.weights)

    # ---------------------------------------------------------------------------------- the answers

    def until(self, *keys: Key, tokens: int | None = None, within_s: float = 60.0) -> list[Sample]:
        """Wait until each sample has finished or has `tokens` tokens, and return the samples."""
        return self._portal.call(self._until, keys, tokens, within_s)

    def finished(self, request: GenerateRequest) -> list[Sample]:
        """Wait for all samples of a request and return them."""
        return self.until(*((request.id, i) for i in range(len(request.seeds))))

    def answers(self, *requests: GenerateRequest) -> list[list[Sample]]:
        """Send requests and return the finished samples of each."""
        self.ask(*requests)
        return [self.finished(request) for request in requests]

    def answer(self, request: GenerateRequest) -> Sample:
        """Send a request and return its only sample."""
        return self.answers(request)[0][0]

    def until_load(self, condition: Callable[[Load], bool], within_s: float = 10.0) -> Load:
        """Wait until the load figures fulfil a condition, and return them."""
        deadline = time.monotonic() + within_s
        while not condition(load := self.load()):
            assert time.monotonic() < deadline, f"the load figures never fulfilled the condition: {load}"
            time.sleep(0.002)
        return load

    def settle(self) -> None:
        """Abort all unfinished samples and wait until the engine is idle."""
        open_ = [key for key in self._open_keys if not self._samples.get(key, Sample()).finish]
        for request in {key[0] for key in open_}:
            self.abort(request)
        self.until(*open_)
        self._open_keys.clear()
        self.until_load(lambda load: load.running == load.waiting == 0)

    def assert_own_logprobs(self, asked: GenerateRequest, sample: Sample, begun: Sequence[int] = ()) -> None:
        """Assert that each token has the logprob that the reference of its version computes."""
        prompt, answer = asked.prompt_ids.numpy().tolist(), [*begun, *sample.tokens]
        for version in set(sample.versions):
            forward = self.weights[version].logprobs(prompt, answer, asked.sampling.temperature)[len(begun) :]
            own = np.array(sample.versions) == version
            off = np.abs(forward - sample.logprobs)[own]
            assert off.max() <= self.under_test.tolerance, (
                f"{asked.id}: logprobs differ from version {version}'s by {off.max():.2g}, first at token "
                f"{np.flatnonzero(own)[off > self.under_test.tolerance][0]} of {len(answer)}"
            )

    # --------------------------------------------------------------------------- on the event loop

    async def _live(self, *, task_status: TaskStatus[None]) -> None:
        try:
            with one_error():
                async with anyio.create_task_group() as tasks:
                    with anyio.fail_after(self.under_test.start_s):
                        await self.engine.start(self._emit, tasks)
                    task_status.started()
                    await self._over.wait()
                    tasks.cancel_scope.cancel()
        except BaseException as error:
            self._broken = error
            self._news.set()
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self.engine.stop()

    def _emit(self, chunks: list[Chunk]) -> None:
        try:
            assert chunks, "an empty message"
            self.messages += 1
            for chunk in chunks:
                self._samples.setdefault((chunk.request, chunk.sample), Sample()).add(chunk)
        except AssertionError as error:  # it must fail the test, not the engine
            self._violations.append(error)
        self._news.set()
        self._news = anyio.Event()

    async def _until(self, keys: Sequence[Key], tokens: int | None, within_s: float) -> list[Sample]:
        with anyio.move_on_after(within_s) as scope:
            while not all(self._reached(key, tokens) for key in keys) and not self._violations:
                if self._broken is not None:
                    raise EngineError("the engine has ended") from self._broken
                await self._news.wait()
        if self._violations:
            raise self._violations.pop()
        missing = [key for key in keys if not self._reached(key, tokens)]
        assert not scope.cancelled_caught, (
            f"after {within_s:g} s, these samples are incomplete: {missing[:5]}"
        )
        return [self._samples[key].copy() for key in keys]

    def _reached(self, key: Key, tokens: int | None) -> bool:
        sample = self._samples.get(key, Sample())
        return bool(sample.finish) or (tokens is not None and len(sample.tokens) >= tokens)

    async def _swap(self, version: int, tensors: Mapping[str, Tensor]) -> SwapReport:
        note = self._publisher.publish(version, tensors.items())
        update = open_version(note, Path(note.address))
        try:
            with anyio.fail_after(self.under_test.start_s):
                return await self.engine.swap(update)
        finally:
            update.close()


_ids = count()


def request(
    prompt: int | Sequence[int] = 12,
    n: int = 1,
    *,
    seed: int = 0,
    min_version: int = 0,
    begun: Sequence[Sequence[int]] = (),
    have: tuple[int, ...] = (),
    deadline_s: float = 600.0,
    max_tokens: int = 20,
    ignore_eos: bool = True,
    **sampling: Any,
) -> GenerateRequest:
    """Make a request with the given prompt, or with a random prompt of the given length."""
    number = next(_ids)
    if isinstance(prompt, int):
        prompt = np.random.default_rng(number).integers(len(SPECIAL), VOCABULARY, prompt).tolist()
    return GenerateRequest(
        id=f"{number}/1/0",
        prompt_ids=Array.of(prompt, np.int32),
        seeds=tuple(range(seed, seed + n)),
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling),
        min_version=min_version,
        begun=tuple(Array.of(tokens, np.int32) for tokens in begun),
        have=have,
        deadline_s=deadline_s,
    )


# ------------------------------------------------------------------------------------- the engine


def _any_tensors(version: int) -> dict[str, Tensor]:
    """Return the weights of an engine without a model."""
    import torch

    return {"steps": torch.tensor([version])}


_BLOCK = 16
"""Engines store keys and values in blocks of a multiple of this many tokens, or token by token."""
_DELIVERY_S = 0.25
"""Time that chunks may take besides decoding, in seconds: the engine collects them for 20 ms and sends
them."""


class InferenceConformance(ComponentConformance):
    """The contract of `InferenceEngine`, tested with one engine that starts once and swaps between two
    models.

    `use`, `options` and `plugins` name the engine, as for every kind; `engine` says more about it, and then
    names it alone. An engine whose component has `needs_model=False` has the tests in `without_model` only:
    nothing is compared with a model."""

    kind: ClassVar[Kind] = "inference"
    engine: ClassVar[EngineUnderTest]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "engine" in vars(cls):
            cls.use, cls.options, cls.plugins = cls.engine.use, cls.engine.options, cls.engine.plugins
        elif {"use", "options", "plugins"} & vars(cls).keys() and hasattr(cls, "use"):
            cls.engine = EngineUnderTest(cls.use, cls.options, cls.plugins)

    # ---------------------------------------------------------------------------- without a model

    @pytest.fixture
    def without_model(self, under_test: ComponentUnderTest, tmp_path: Path) -> Iterator[ServedEngine]:
        """An engine that needs no model, before its first swap."""
        if under_test.component.needs_model:
            pytest.skip("it has a model: the other tests say more")
        with ServedEngine(self.engine, tmp_path, tmp_path).running() as served:
            yield served

    def test_without_a_model_nothing_is_sampled_before_the_first_swap(
        self, without_model: ServedEngine
    ) -> None:
        """Then every answer has its version, and finite logprobs; also more of them than slots."""
        query = request(n=without_model.load().slots + 3, max_tokens=30)
        without_model.ask(query)
        load = without_model.until_load(lambda load: load.waiting == len(query.seeds))
        assert (load.version, load.running) == (-1, 0), f"before the first swap, its figures are {load}"
        report = without_model.swap_tensors(_any_tensors(0))
        assert report.version == 0, f"the first swap reports version {report.version}"
        assert report.digest == digest_of(_hashes(_any_tensors(0)).items()), "it reports another digest"
        for sample in without_model.finished(query):
            assert sample.finish in ("stop", "length"), f"an answer ended with {sample.finish!r}"
            assert 1 <= len(sample.tokens) <= 30, f"an answer has {len(sample.tokens)} tokens of at most 30"
            assert set(sample.versions) == {0}, f"an answer has the versions {set(sample.versions)}"
            assert all(-np.inf < logprob <= 0 for logprob in sample.logprobs), f"logprobs {sample.logprobs}"
        idle = without_model.until_load(lambda load: load.running == load.waiting == 0)
        assert idle.generated_tokens > 0, f"after {len(query.seeds)} answers, its figures are {idle}"

    def test_without_a_model_answers_go_on_over_a_swap(self, without_model: ServedEngine) -> None:
        """Versions never fall within an answer, and a request waits for the version that it needs."""
        without_model.swap_tensors(_any_tensors(0))
        running, needy = request(max_tokens=400), request(max_tokens=5, min_version=1)
        without_model.ask(running, needy)
        without_model.until((running.id, 0), tokens=1)
        assert without_model.load().waiting == 1, "a request for a newer version does not wait"
        without_model.swap_tensors(_any_tensors(1))
        (late,), (whole,) = without_model.finished(needy), without_model.finished(running)
        assert set(late.versions) == {1}, f"it needs version 1 and has tokens of {set(late.versions)}"
        assert whole.versions == sorted(whole.versions), "the versions of an answer fall"
        load = without_model.load()
        assert (load.version, load.swaps) == (1, 2), f"after two swaps, its figures are {load}"

    def test_without_a_model_answers_end_on_request_and_at_their_deadline(
        self, without_model: ServedEngine
    ) -> None:
        """Also those that wait. Unknown requests do not matter."""
        without_model.swap_tensors(_any_tensors(0))
        aborted, late = request(n=2, min_version=9), request(min_version=9, deadline_s=0.1)
        without_model.ask(aborted, late)
        without_model.abort("unheard of")
        without_model.abort(aborted.id)
        without_model.abort(aborted.id)
        finishes = [sample.finish for sample in without_model.finished(aborted)]
        assert finishes == ["abort", "abort"], f"aborted answers ended with {finishes}"
        [sample] = without_model.finished(late)
        assert sample.finish == "error", f"at its deadline, an answer ended with {sample.finish!r}"
        without_model.until_load(lambda load: load.running == load.waiting == 0)

    def test_without_a_model_an_answer_begun_elsewhere_goes_on(self, without_model: ServedEngine) -> None:
        """After the tokens that the client has. A request that comes again is not started twice."""
        without_model.swap_tensors(_any_tensors(0))
        query = request(n=2, max_tokens=20, begun=([3] * 7, [4] * 20), have=(7, 20))
        without_model.ask(query, query)
        part, whole = without_model.finished(query)
        assert part.start == 7, f"it continued at token {part.start}, and the client has 7"
        assert len(part.tokens) <= 13, f"it sent {len(part.tokens)} tokens; 13 were missing at most"
        assert (whole.tokens, whole.finish) == ([], "length"), f"an answer that was complete: {whole}"

    # ------------------------------------------------------------------------------- with a model

    @pytest.fixture(scope="class")
    @classmethod
    def models(
        cls, under_test: ComponentUnderTest, tmp_path_factory: pytest.TempPathFactory
    ) -> tuple[TinyModel, TinyModel]:
        """Two models of one architecture; the engine starts with the folder of the first."""
        if not under_test.component.needs_model:
            pytest.skip("it has no model")
        parent = tmp_path_factory.mktemp("models")
        first = TinyModel.make(parent / "a", seed=0, layers=_DEEP)
        return first, TinyModel.make(parent / "b", seed=1, layers=_DEEP)

    @pytest.fixture(scope="class")
    @classmethod
    def early(cls) -> GenerateRequest:
        """A request that the test sends before the first swap."""
        return request(max_tokens=30)

    @pytest.fixture(scope="class")
    @classmethod
    def started(
        cls,
        models: tuple[TinyModel, TinyModel],
        early: GenerateRequest,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Iterator[ServedEngine]:
        """The engine after its first swap, to weights other than those of its folder."""
        folder = tmp_path_factory.mktemp("run")
        with ServedEngine(cls.engine, models[0].folder, folder, on_swap="recompute").running() as served:
            served.ask(early)
            served.until_load(lambda load: load.waiting == 1)
            assert served.load().version == -1
            served.swap(models[1].reference)
            yield served

    @pytest.fixture
    def served(self, started: ServedEngine, models: tuple[TinyModel, TinyModel]) -> Iterator[ServedEngine]:
        """The idle engine, with the first model's weights."""
        if started.weights[started.version] is not models[0].reference:
            started.swap(models[0].reference)
        started.until_load(lambda load: load.running == load.waiting == 0)  # the early request has ended
        yield started
        started.settle()

    # ------------------------------------------------------------------------------ before a swap

    def test_nothing_is_sampled_before_the_first_swap_and_then_with_its_weights(
        self, started: ServedEngine, early: GenerateRequest
    ) -> None:
        """The weights of the model folder never sample a token."""
        (sample,) = started.finished(early)
        assert (sample.finish, set(sample.versions)) == ("length", {0})
        started.assert_own_logprobs(early, sample)

    def test_a_model_that_cannot_be_loaded_is_told_by_start(
        self, under_test: ComponentUnderTest, tmp_path: Path
    ) -> None:
        """`start` raises EngineError, and `stop` then ends everything that was started."""
        if not under_test.component.needs_model:
            pytest.skip("it has no model")
        empty = tmp_path / "empty"
        empty.mkdir()
        with pytest.raises(EngineError):
            with ServedEngine(self.engine, empty, tmp_path / "run").running():
                pytest.fail("it started without a model")

    # ------------------------------------------------------------------------------------ numbers

    def test_logprobs_are_those_of_the_models_own_forward(self, served: ServedEngine) -> None:
        """At any temperature, with other requests at the same time, for prompts of one to hundreds of
        tokens."""
        queries = [
            request(1 + 37 * i % 400, n=1 + i % 3, max_tokens=5 + 13 * i % 40, temperature=temperature)
            for i, temperature in enumerate([1.0, 0.7, 0.0, 1.3] * 4)
        ]
        for query, samples in zip(queries, served.answers(*queries), strict=True):
            for sample in samples:
                assert (sample.finish, len(sample.tokens)) == ("length", query.sampling.max_tokens)
                assert set(sample.versions) == {served.version}
                served.assert_own_logprobs(query, sample)

    def test_temperature_0_takes_the_likeliest_token(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel]
    ) -> None:
        """At every position."""
        query = request(temperature=0.0, max_tokens=60)
        sample = served.answer(query)
        prompt = query.prompt_ids.numpy().tolist()
        logits = models[0].reference.logits([*prompt, *sample.tokens])[len(prompt) - 1 : -1]
        chosen = logits[np.arange(len(sample.tokens)), sample.tokens]
        assert (logits.max(-1) - chosen).max() <= self.engine.tolerance

    @pytest.mark.parametrize(
        "sampling",
        [
            {"temperature": 0.7},
            {"top_k": 5},
            {"top_p": 0.6},
            {"min_p": 0.1},
            {"logit_bias": {10: 3.0, 20: -100.0}, "temperature": 0.7},
            {"top_k": 20, "top_p": 0.8, "temperature": 1.5},
        ],
        ids=str,
    )
    def test_tokens_are_drawn_with_the_probability_they_report(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel], sampling: dict[str, Any]
    ) -> None:
        """For every option that changes the distribution. The engine names each option that it refuses."""
        query = request(n=600, max_tokens=1, **sampling)
        (samples,) = served.answers(query)
        for refused in (names.split("+") for names in self.engine.refuses):
            if sampling.keys() >= set(refused):
                assert all(name in sample.error for sample in samples for name in refused)
                return
        logits = models[0].reference.logits(query.prompt_ids.numpy().tolist())[-1]
        exact = _distribution(logits, query.sampling)
        drawn = np.array([sample.tokens[0] for sample in samples])
        assert exact[drawn].min() > 0, "a token was drawn that is not kept"
        reported = np.array([sample.logprobs[0] for sample in samples])
        np.testing.assert_allclose(reported, np.log(exact[drawn]), atol=self.engine.tolerance)
        _assert_drawn_from(exact, drawn)

    def test_logprobs_of_given_text_are_those_of_the_weights_served(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel]
    ) -> None:
        """Also after a swap when the engine has computed the same text before, and while it generates."""
        text = [request(length).prompt_ids.numpy().tolist() for length in (2, 3, 70, 400)]
        served.ask(request(n=2, max_tokens=600))
        for model in models:
            if served.weights[served.version] is not model.reference:
                served.swap(model.reference)
            for sequence, logprobs in zip(text, served.logprobs(text), strict=True):
                assert logprobs.dtype == np.float32
                expected = model.reference.logprobs(sequence[:1], sequence[1:])
                np.testing.assert_allclose(logprobs, expected, atol=self.engine.tolerance)

    def test_the_seed_alone_decides_what_is_drawn(self, served: ServedEngine) -> None:
        """Independent of other requests; for signed and unsigned 64-bit seeds."""
        if not self.engine.seeds:
            pytest.skip(f"{self.engine.use} does not offer seeds")
        prompt = request(16).prompt_ids.numpy().tolist()
        same = [request(prompt, seed=2**63 + 5, max_tokens=30) for _ in range(2)]
        alone = served.answer(same[0])
        other = request(prompt, n=6, seed=-5, max_tokens=30)
        (together,), others = served.answers(same[1], other)
        assert together.tokens == alone.tokens
        assert len({tuple(sample.tokens) for sample in (alone, *others)}) == 7

    def test_samples_of_one_prompt_differ(self, served: ServedEngine) -> None:
        """The engine draws each sample independently."""
        (samples,) = served.answers(request(n=8, max_tokens=30))
        assert len({tuple(sample.tokens) for sample in samples}) == 8

    # ------------------------------------------------------------------------- how an answer ends

    def test_the_end_of_sequence_token_is_the_answers_last(self, served: ServedEngine) -> None:
        """Unless `ignore_eos` is set."""
        query = request(n=32, max_tokens=150, ignore_eos=False)
        ignoring = request(n=8, max_tokens=150)
        samples, ignored = served.answers(query, ignoring)
        assert any(sample.finish == "stop" for sample in samples)
        for sample in samples:
            served.assert_own_logprobs(query, sample)
            if sample.finish == "stop":
                assert sample.tokens.index(END) == len(sample.tokens) - 1
            else:
                assert (sample.finish, len(sample.tokens), END in sample.tokens) == ("length", 150, False)
        assert {(sample.finish, len(sample.tokens)) for sample in ignored} == {("length", 150)}
        assert any(END in sample.tokens for sample in ignored)

    def test_a_stop_token_is_the_answers_last(self, served: ServedEngine) -> None:
        """With and without `ignore_eos`."""
        stops = tuple(range(40, 50))
        queries = [
            request(n=4, max_tokens=150, stop_token_ids=stops, ignore_eos=eos) for eos in (True, False)
        ]
        for query, samples in zip(queries, served.answers(*queries), strict=True):
            assert any(sample.finish == "stop" for sample in samples)
            for sample in samples:
                ends = {*stops} if query.sampling.ignore_eos else {*stops, END}
                end_positions = [i for i, token in enumerate(sample.tokens) if token in ends]
                assert end_positions == ([len(sample.tokens) - 1] if sample.finish == "stop" else [])
                served.assert_own_logprobs(query, sample)

    def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel]
    ) -> None:
        """For stop strings of one token and of several tokens."""
        prompt = request(30).prompt_ids.numpy().tolist()
        plain = served.answer(request(prompt, temperature=0.0, max_tokens=60))
        text = models[0].decode(plain.tokens)
        several = text[20:23]
        stopped = served.answer(
            request(prompt, temperature=0.0, max_tokens=60, stop=("never there", several))
        )
        assert stopped.finish == "stop"
        assert models[0].decode(stopped.tokens) == text[: text.index(several) + 3]
        characters = tuple("ABCDEFGHIJ")  # these occur in no special token
        (samples,) = served.answers(request(n=8, max_tokens=100, stop=characters))
        assert any(sample.finish == "stop" for sample in samples)
        for sample in samples:
            written = models[0].decode(sample.tokens)
            met = [i for i, character in enumerate(written) if character in characters]
            assert met == ([len(written) - 1] if sample.finish == "stop" else [])

    @pytest.mark.parametrize(
        ("prompt", "max_tokens"),
        [([10] * 1000, 25), ([10, VOCABULARY], 5), ([10, -1], 5), ([], 5)],
        ids=["beyond the context", "beyond the vocabulary", "negative", "empty"],
    )
    def test_a_request_that_cannot_be_served_is_told_why(
        self, served: ServedEngine, prompt: list[int], max_tokens: int
    ) -> None:
        """The engine continues serving other requests."""
        (samples,) = served.answers(request(prompt, n=2, max_tokens=max_tokens))
        assert [(sample.finish, sample.tokens) for sample in samples] == [("error", [])] * 2
        full = served.answer(request([10] * 1000, max_tokens=24))  # no more than the model has positions
        assert (full.finish, len(full.tokens)) in (("length", 24), ("error", 0))
        assert served.answer(request([10] * 900, max_tokens=10)).finish == "length"

    def test_abort_frees_every_slot_within_a_decode_step(self, served: ServedEngine) -> None:
        """Repeatedly, for running and waiting samples; the next request starts immediately."""
        slots = served.load().slots
        for _ in range(2):
            long, following = request(n=slots + 2, max_tokens=900), request(max_tokens=5)
            served.ask(long)
            early = served.until(*((long.id, i) for i in range(slots)), tokens=5)
            start, step_s = time.monotonic(), _step_s(early)
            served.ask(following)
            served.abort(long.id)
            served.abort(long.id)
            ended = served.finished(long)
            (after,) = served.until((following.id, 0), tokens=1)
            allowed_s = _DELIVERY_S + step_s
            assert max(sample.arrivals[-1] for sample in ended) - start <= allowed_s
            assert after.arrivals[0] - start <= allowed_s + step_s
            assert {sample.finish for sample in ended} == {"abort"}
            for sample in ended[:3]:
                assert len(sample.tokens) < 900
                served.assert_own_logprobs(long, sample)
        served.abort("unheard of")
        assert served.answer(request()).finish == "length"

    def test_a_deadline_ends_what_runs_and_what_waits(self, served: ServedEngine) -> None:
        """Samples keep their tokens so far, and other requests are not affected."""
        start = time.monotonic()
        waiting_query = request(min_version=served.version + 1, deadline_s=0.3)
        running_query = request(n=8, max_tokens=900, deadline_s=0.6)
        other = request(max_tokens=60)
        served.ask(waiting_query, running_query, other)
        ended, (late,) = served.finished(running_query), served.finished(waiting_query)
        assert time.monotonic() - start <= 0.6 + 8 * _DELIVERY_S
        (good,) = served.finished(other)  # takes as long as it takes
        assert (late.finish, late.tokens) == ("error", [])
        assert all(sample.finish == "error" and 0 < len(sample.tokens) < 900 for sample in ended)
        assert good.finish == "length"
        for sample in ended:
            served.assert_own_logprobs(running_query, sample)

    # ---------------------------------------------------------------- continuing, and asking again

    def test_an_answer_begun_elsewhere_goes_on_after_its_tokens(self, served: ServedEngine) -> None:
        """The engine emits nothing for a sample that the client already has completely."""
        whole = request(n=2, max_tokens=50, temperature=0.7)
        (before,) = served.answers(whole)
        begun = (before[0].tokens[:17], before[1].tokens, [])
        prompt = whole.prompt_ids.numpy().tolist()
        query = request(prompt, n=3, max_tokens=50, temperature=0.7, begun=begun, have=(17, -1, 0))
        served.ask(query)
        part, fresh = served.until((query.id, 0), (query.id, 2))
        assert (part.start, len(part.tokens), part.finish) == (17, 33, "length")
        assert (fresh.start, len(fresh.tokens), fresh.finish) == (0, 50, "length")
        served.assert_own_logprobs(query, part, begun=begun[0])
        served.assert_own_logprobs(query, fresh)
        served.settle()
        with pytest.raises(AssertionError):
            served.until((query.id, 1), within_s=0.1)

    def test_an_answer_that_came_complete_ends_at_once(self, served: ServedEngine) -> None:
        """Complete by the end-of-sequence token, a stop token, or its length."""
        begun = ([5, 6, END], [5, 6, 7], [5] * 20)
        query = request(n=3, begun=begun, have=(3, 3, 20), ignore_eos=False, stop_token_ids=(7,))
        (samples,) = served.answers(query)
        assert [(sample.finish, sample.tokens) for sample in samples] == [
            ("stop", []),
            ("stop", []),
            ("length", []),
        ]
        assert [sample.start for sample in samples] == [3, 3, 20]

    def test_a_request_sent_again_is_the_same_request(self, served: ServedEngine) -> None:
        """The engine does not start it twice."""
        before = served.load().generated_tokens
        query = request(n=2, max_tokens=200)
        served.ask(query)
        served.until((query.id, 0), tokens=1)
        (samples,) = served.answers(query)
        assert [len(sample.tokens) for sample in samples] == [200, 200]
        served.answer(request(max_tokens=100))
        assert served.load().generated_tokens - before == 500

    def test_a_request_behind_many_others_has_its_turn(self, served: ServedEngine) -> None:
        """More requests than slots came before it."""
        others = [request(max_tokens=60) for _ in range(2 * served.load().slots)]
        late = request(n=2, temperature=0.0)
        *_, samples = served.answers(*others, late)
        assert [sample.finish for sample in samples] == ["length", "length"]

    # -------------------------------------------------------------------------------------- swaps

    def test_a_swap_reports_what_is_served_and_what_it_cost(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel]
    ) -> None:
        """The digest equals the digest of the tensors, which the test computes again."""
        before = served.load()
        start = time.monotonic()
        reports = [served.swap(models[1].reference), served.swap(models[0].reference)]
        took = time.monotonic() - start
        after = served.load()
        for report, model in zip(reports, reversed(models), strict=True):
            hashes = _hashes(model.reference.tensors())
            assert report.digest == digest_of(hashes.items())
            assert report.hashes in ({}, hashes)
            assert report.pause_s >= 0
        assert (reports[1].version, after.version) == (served.version, served.version)
        assert after.swaps - before.swaps == 2
        pauses = [report.pause_s for report in reports]
        assert after.pause_s - before.pause_s == pytest.approx(sum(pauses), abs=1e-6)
        assert after.pause_max_s == pytest.approx(max(before.pause_max_s, *pauses))
        assert sum(pauses) <= took

    def test_answers_in_flight_go_on_with_new_weights_and_each_logprob_is_its_versions_own(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel]
    ) -> None:
        """Under `on_swap: recompute`, over three swaps."""
        queries = [request(6 + 40 * i, n=2, max_tokens=600) for i in range(3)]
        served.ask(*queries)
        for tokens, model in ((20, models[1]), (60, models[0]), (100, models[1])):
            served.until((queries[0].id, 0), tokens=tokens)
            served.swap(model.reference)
        spans: list[int] = []
        for query in queries:
            for sample in served.finished(query):
                assert (sample.finish, len(sample.tokens)) == ("length", 600)
                assert sample.versions == sorted(sample.versions)
                served.assert_own_logprobs(query, sample)
                spans.append(len(set(sample.versions)))
        assert max(spans) == 4, f"no answer spans all swaps: {spans}"

    def test_keep_cache_goes_on_over_what_older_weights_computed(
        self, models: tuple[TinyModel, TinyModel], tmp_path: Path
    ) -> None:
        """The first token after the swap shows it; the engine may compute keys and values of the last block
        again. An answer that is wholly of the new version uses only its weights, also when the engine knew
        the prompt before, or was computing it at the swap."""
        older, newer = models[0].reference, models[1].reference
        with ServedEngine(self.engine, models[0].folder, tmp_path, on_swap="keep_cache").running() as served:
            served.swap(older)
            prompt = request(300).prompt_ids.numpy().tolist()
            query, repeated = request(prompt, n=4, max_tokens=150), request(prompt, max_tokens=10)
            served.ask(query)
            served.until(*((query.id, i) for i in range(4)), tokens=20)
            beginning = [request(800, max_tokens=5) for _ in range(3)]
            served.ask(*beginning)
            served.swap(newer)
            fresh = served.answer(repeated)
            assert set(fresh.versions) == {1}
            for fresh_query, sample in (
                (repeated, fresh),
                *((early, served.finished(early)[0]) for early in beginning),
            ):
                if set(sample.versions) == {1}:
                    served.assert_own_logprobs(fresh_query, sample)
            for sample in served.finished(query):
                switch = sample.versions.index(1)
                assert sample.versions == [0] * switch + [1] * (150 - switch)
                before = older.logprobs(prompt, sample.tokens)[:switch]
                np.testing.assert_allclose(sample.logprobs[:switch], before, atol=self.engine.tolerance)
                text = [*prompt, *sample.tokens[: switch + 1]]
                possible = {*range(160, len(text) - 2, _BLOCK), *range(len(text) - 4, len(text) - 1)}
                off = {k: abs(newer.last_over(older, text, k) - sample.logprobs[switch]) for k in possible}
                assert min(off.values()) <= self.engine.tolerance, f"kept tokens -> difference: {off}"

    def test_a_prompt_known_from_older_weights_is_computed_anew(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel]
    ) -> None:
        """A swap back to earlier weights does not bring back their cache either."""
        prompt = request(400).prompt_ids.numpy().tolist()
        for model in (models[1], models[0], models[1]):
            for _ in range(2):
                query = request(prompt, max_tokens=5)
                served.assert_own_logprobs(query, served.answer(query))
            served.swap(model.reference)

    def test_a_request_waits_for_the_version_it_needs_and_holds_up_nobody(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel]
    ) -> None:
        """With more waiting samples than slots."""
        now = served.version
        needy = request(n=served.load().slots + 1, min_version=now + 1)
        served.ask(needy)
        old = served.answer(request(min_version=now))
        assert set(old.versions) == {now}
        load = served.load()
        assert (load.waiting, load.running) == (len(needy.seeds), 0)
        served.swap(models[1].reference)
        for sample in served.finished(needy):
            assert (sample.finish, set(sample.versions)) == ("length", {now + 1})
            served.assert_own_logprobs(needy, sample)

    @pytest.mark.parametrize("fault", ["missing", "shape", "unknown"])
    def test_weights_that_do_not_fit_leave_the_old_ones(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel], fault: str
    ) -> None:
        """The error names the tensor, and answers in flight continue."""
        import torch

        tensors = models[1].reference.tensors()
        name = own = next(each for each in tensors if each.endswith(".norm.weight"))
        norm = tensors.pop(name)
        if fault == "shape":
            tensors[name] = torch.cat([norm, norm])
        elif fault == "unknown":
            name = "model.normal.weight"
            tensors |= {own: norm, name: norm.clone()}
        running, later = request(max_tokens=200), request()
        served.ask(running)
        served.until((running.id, 0), tokens=5)
        with pytest.raises(WeightsError, match=name):
            served.swap_tensors(tensors)
        assert served.load().version == served.version
        for query, sample in ((later, served.answer(later)), (running, served.finished(running)[0])):
            assert (sample.finish, set(sample.versions)) == ("length", {served.version})
            served.assert_own_logprobs(query, sample)

    # --------------------------------------------------------------------- streaming and figures

    def test_the_first_chunk_comes_before_a_tenth_of_the_answers_time(self, served: ServedEngine) -> None:
        """512 tokens, in a bounded number of messages. One of three tries must pass: other programs may delay
        a chunk."""
        shares: list[float] = []
        while min(shares, default=1.0) > 0.1 and len(shares) < 3:
            messages, start = served.messages, time.monotonic()
            sample = served.answer(request(50, max_tokens=512))
            took = sample.arrivals[-1] - start
            assert len(sample.tokens) == 512
            assert 10 <= served.messages - messages <= took / 0.015 + 2
            shares.append((sample.arrivals[0] - start) / took)
        assert min(shares) <= 0.1, f"time to the first chunk, as shares of the answer's time: {shares}"

    def test_figures_add_up(self, served: ServedEngine) -> None:
        """With more samples than slots, from the request to the end."""
        idle = served.load()
        assert (idle.version, idle.running, idle.waiting) == (served.version, 0, 0)
        query = request(n=idle.slots + 4, max_tokens=60)
        start = time.monotonic()
        served.ask(query)
        served.until_load(lambda load: load.running + load.waiting == idle.slots + 4)
        full = served.until_load(lambda load: load.running == idle.slots)
        assert full.waiting <= 4
        samples = served.finished(query)
        final = served.until_load(lambda load: load.running == load.waiting == 0)
        took = time.monotonic() - start
        assert all(len(sample.tokens) == 60 for sample in samples)
        assert final.generated_tokens - idle.generated_tokens == 60 * (idle.slots + 4)
        assert 0 < final.busy_s - idle.busy_s <= took
        assert idle.busy_s <= full.busy_s <= final.busy_s

    def test_stop_ends_the_stream(self, models: tuple[TinyModel, TinyModel], tmp_path: Path) -> None:
        """In the middle of an answer; a second call has no effect."""
        with ServedEngine(self.engine, models[0].folder, tmp_path).running() as served:
            served.swap(models[0].reference)
            query = request(n=4, max_tokens=900)
            served.ask(query)
            served.until((query.id, 0), tokens=5)
            served.stop()
            messages = served.messages
            served.stop()
        assert served.messages == messages


def _step_s(samples: Sequence[Sample]) -> float:
    """Estimate the duration of a decode step, in seconds, from the chunks of unfinished samples."""
    spans = [(s.arrivals[-1] - s.arrivals[0]) / max(1, len(s.tokens) - 1) for s in samples]
    return max(spans)


def _distribution(logits: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """Compute (V,) the exact probability of each token, from the most likely token downwards."""
    biased = logits.copy()
    for token, bias in sampling.logit_bias.items():
        biased[token] += bias
    probabilities = np.exp(_log_softmax(biased / sampling.temperature))
    order = np.argsort(-probabilities)[: sampling.top_k or None]
    total = probabilities[order].sum()
    indices: list[int] = []
    for token in order.tolist():
        enough = probabilities[indices].sum() / total >= sampling.top_p
        if enough or probabilities[token] < sampling.min_p * probabilities[order[0]]:
            break
        indices.append(token)
    exact = np.zeros(len(probabilities))
    exact[indices] = probabilities[indices]
    return exact / exact.sum()


def _assert_drawn_from(exact: NDArray[np.float64], drawn: NDArray[np.int64]) -> None:
    """Assert a bound on Pearson's chi-squared statistic. Tokens expected fewer than five times form one
    class."""
    expected = exact * len(drawn)
    counts = np.bincount(drawn, minlength=len(exact))
    frequent = expected >= 5
    pairs = [
        *zip(counts[frequent], expected[frequent], strict=True),
        (counts[~frequent].sum(), expected[~frequent].sum()),
    ]
    statistic = sum((n - e) ** 2 / e for n, e in pairs if e > 0)
    freedom = max(1, sum(e > 0 for _, e in pairs) - 1)
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5, f"chi-squared {statistic:.1f} of {freedom}"


def _hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: tensor_hash(tensor) for name, tensor in tensors.items()}


# -------------------------------------------------------------------------------- in whole runs

_GROUP, _BATCH, _LENGTH, _STALENESS = 2, 4, 200, 2


@dataclass(frozen=True)
class _Kill:
    """A moment in which processes of inference-0 were killed."""

    under_way: set[str]
    """Ids of the prompts that had no answers yet."""
    version: int
    """Number of train steps so far."""
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class _Attacked:
    """A run that has ended, after processes of inference-0 were killed in mid-answer."""

    run: _Run
    model: Path
    kills: dict[str, _Kill]
    """By victim."""
    summary: dict[str, Any]
    left: list[int]
    """Ids of processes that outlive the run."""


class RunConformance:
    """Tests of two replicas of an engine in a training run. The run kills the worker of one replica and, once
    that answers again, its server, if the engine has servers."""

    engine: ClassVar[EngineUnderTest]

    @pytest.fixture(scope="class")
    @classmethod
    def attacked(cls, tmp_path_factory: pytest.TempPathFactory) -> _Attacked:
        """The run after its end."""
        folder = tmp_path_factory.mktemp("attacked")
        model = make_tiny_model(folder / "model", layers=4)
        kills: dict[str, _Kill] = {}
        with _Run.started(cls.engine, model, folder) as run:
            run.until(lambda: run.version() >= _STALENESS + 2)
            for victim in ("worker", "server") if cls.engine.servers else ("worker",):
                run.until(lambda: len(run.under_way()) >= _BATCH)
                kills[victim] = kill = _Kill(run.under_way(), run.version(), time.time())
                worker = run.process("inference-0")
                for process in [worker] if victim == "worker" else _descendants(worker):
                    os.kill(process, signal.SIGKILL)
                run.until(lambda kill=kill: len(run.answered_by("inference-0", since=kill.time)) >= _BATCH)
                run.until(lambda kill=kill: kill.under_way <= run.answered())
            processes = _descendants(run.process_id)
            summary = run.interrupt()
            left = [pid for pid in processes if Path(f"/proc/{pid}").exists()]
        return _Attacked(run, model, kills, summary, left)

    @pytest.mark.parametrize("victim", ["worker", "server"])
    def test_a_replica_killed_in_mid_answer_loses_and_doubles_no_token(
        self, attacked: _Attacked, victim: str
    ) -> None:
        """Another replica continues its answers, and it serves no request before it has the current
        weights."""
        if victim == "server" and not self.engine.servers:
            pytest.skip(f"{self.engine.use} runs the model in its worker")
        run, kill = attacked.run, attacked.kills[victim]
        assert not attacked.left, f"processes outlive the run: {attacked.left}"
        ledger = attacked.summary["ledger"]
        assert ledger["failed"] == ledger["expired"] == ledger["filtered"] == 0
        assert ledger["trained"] == _BATCH * attacked.summary["version"]
        answered = [record["id"] for record in run.records() if "answers" in record]
        assert len(answered) == len(set(answered)) >= ledger["trained"]
        for record in run.answered_by("inference-0", since=kill.time):
            oldest = min(min(answer["versions"]) for answer in record["answers"])
            assert oldest >= kill.version - _STALENESS

    def test_every_token_of_a_run_with_kills_has_the_logprob_of_its_version(
        self, attacked: _Attacked
    ) -> None:
        """It is the one that the trainer's checkpoint of the version computes."""
        attacked.run.assert_own_logprobs(attacked.model, self.engine.tolerance)


class _Run:
    """A run with two replicas, whose workflow records every answer."""

    def __init__(self, engine: EngineUnderTest, model: Path, folder: Path) -> None:
        self._start_s = engine.start_s
        self._folder = folder / "run"
        self._output = folder / "output.txt"
        rows = [{"prompt": f"{n}+{n % 7}=", "answer": "?"} for n in range(100)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = {
            "name": "conformance",
            "plugins": [__file__, *engine.plugins],
            "model": str(model),
            "algorithm": {"use": "grpo", "group_size": _GROUP},
            "training": {"use": "torch", "lr": 2e-3},
            "inference": {"use": engine.use, **engine.options, "replicas": 2, "on_swap": "recompute"},
            "sampling": {"max_tokens": _LENGTH, "ignore_eos": True},
            "workflow": "recorder",
            "reward": "exact",
            "dataset": {"use": "jsonl", "path": str(folder / "rows.jsonl")},
            "queue": {"batch_size": _BATCH, "max_staleness": _STALENESS},
            "checkpoint": {"every": 1, "keep": 100_000},
            "steps": 100_000,
        }
        (folder / "run.yaml").write_text(json.dumps(run))  # JSON is YAML
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stretto", "run", folder / "run.yaml", f"out={self._folder}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @classmethod
    @contextmanager
    def started(cls, engine: EngineUnderTest, model: Path, folder: Path) -> Generator[_Run]:
        """Start a run, and kill it at the end of the block if it still runs."""
        run = cls(engine, model, folder)
        try:
            yield run
        finally:
            if run._process.poll() is None:
                for pid in [*_descendants(run.process_id), run.process_id]:
                    os.kill(pid, signal.SIGKILL)
            run._process.wait()

    @property
    def process_id(self) -> int:
        """Process id of the kernel."""
        return self._process.pid

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition, at most twice the maximum duration of a start."""
        deadline = time.monotonic() + 2 * self._start_s
        while not condition():
            assert self._process.poll() is None, f"the run ended early:\n{self._last_output()}"
            assert time.monotonic() < deadline, f"waited too long:\n{self._last_output()}"
            time.sleep(0.05)

    def interrupt(self) -> dict[str, Any]:
        """End the run as Ctrl-C does, check that its ledger adds up, and return its summary."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(2 * self._start_s)
        summary = json.loads((self._folder / "summary.json").read_text())
        assert summary["status"] == "interrupted", self._last_output()
        ledger = summary["ledger"]
        assert ledger["issued"] == sum(number for name, number in ledger.items() if name != "issued")
        return summary

    def _last_output(self) -> str:
        """Return the end of its output."""
        return self._output.read_text()[-4000:]

    def version(self) -> int:
        """Return the number of train steps so far."""
        return len([line for line in _json_lines(self._folder / "metrics.jsonl") if "ledger" in line])

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the workflow: `id` and `asked` of every prompt, and a second one with
        `answers`."""
        return _json_lines(self._folder / "answers.jsonl")

    def answered(self) -> set[str]:
        """Return the ids of prompts that have answers."""
        return {each["id"] for each in self.records() if "answers" in each}

    def under_way(self) -> set[str]:
        """Return the ids of prompts that have no answers yet."""
        return {each["id"] for each in self.records()} - self.answered()

    def answered_by(self, worker: str, since: float) -> list[dict[str, Any]]:
        """Return the records of prompts asked after `since` that have an answer which this worker
        finished."""
        return [
            record
            for record in self.records()
            if record["asked"] > since and any(a["engine"] == worker for a in record.get("answers", ()))
        ]

    def process(self, worker: str) -> int:
        """Return the process id of a running worker."""
        joined = [line for line in _json_lines(self._folder / "logs" / "kernel.jsonl") if "place" in line]
        return int([line["place"] for line in joined if line["worker"] == worker][-1].split()[-1])

    def assert_own_logprobs(self, model: Path, tolerance: float) -> None:
        """Assert the logprob of every token of every answer against the trainer's checkpoints, and the length
        of every answer."""
        answers = [(r, answer) for r in self.records() for answer in r.get("answers", ())]
        assert {len(answer["tokens"]) for _, answer in answers} == {_LENGTH}
        by_version: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        for record, answer in answers:
            for version in set(answer["versions"]):
                by_version.setdefault(version, []).append((record, answer))
        assert len(by_version) > _STALENESS
        for version, having in sorted(by_version.items()):
            checkpoint = self._folder / "checkpoints" / f"step-{version:06d}" / "model"
            reference = Reference(checkpoint if version else model)
            texts = [(record["prompt"], answer["tokens"]) for record, answer in having]
            for (record, answer), forward in zip(having, reference.many_logprobs(texts), strict=True):
                own = np.array(answer["versions"]) == version
                off = np.abs(forward - answer["logprobs"])[own].max()
                assert off <= tolerance, f"version {version}, prompt {record['id']}: off by {off:.2g}"


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON Lines file that another process is writing."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [*children, *(below for child in children for below in _descendants(child))]


class _Recorder:
    """Workflow `recorder`: like `single_turn`, but its rewards differ and it records every answer."""

    def __init__(self, config: WorkflowConfig, context: Context) -> None:
        del config
        self._path = context.path("answers.jsonl")
        self._ids = count()

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Make one answer for each sample, with the mean of its token ids as the reward."""
        record: dict[str, Any] = {
            "id": f"{os.getpid()}-{next(self._ids)}",
            "asked": time.time(),
            "prompt": prompt.ids.tolist(),
        }
        self._write(record)
        answers = await session.generate(prompt.ids, n=session.group_size)
        self._write({**record, "answers": [_plain(answer) for answer in answers]})
        return [Trajectory.of(prompt.ids, answer, Score(float(answer.tokens.mean()))) for answer in answers]

    def _write(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _plain(answer: Answer) -> dict[str, Any]:
    return {
        "tokens": answer.tokens.tolist(),
        "logprobs": answer.logprobs.tolist(),
        "versions": answer.versions.tolist(),
        "engine": answer.engine,
    }


@hookimpl
def stretto_workflow() -> Iterable[Component[WorkflowConfig]]:
    """The workflow of `RunConformance`, whose runs load this file as a plugin."""
    yield Component("recorder", _Recorder, WorkflowConfig, "answers like single_turn and writes them down")
