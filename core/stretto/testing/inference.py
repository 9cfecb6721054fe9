"""The contract of inference engines as tests of one engine alone.

They compare every logprob of tiny models with the forward pass of transformers, and need `stretto[torch]`.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from stretto.component import Kind
from stretto.engine import GenerateRequest, Sampling
from stretto.errors import EngineError
from stretto.testing.component import ComponentConformance, ComponentUnderTest, needs_model
from stretto.testing.inference_swaps import SwapTests
from stretto.testing.served_engine import ServedEngine, request
from stretto.testing.tiny_model import END, VOCABULARY, NoModel, TinyModel, log_softmax

__all__ = ["InferenceConformance"]

_DEEP = 16
"""Number of layers that makes a model slow enough for a test to act in the middle of an answer."""
_DELIVERY_S = 0.25
"""Seconds that the delivery of chunks may take: the engine collects them for 20 ms."""


class InferenceConformance(SwapTests, ComponentConformance):
    """The contract of `InferenceEngine`. The tests start one engine and swap it between two models; it must
    serve all of their 1,024 positions.

    With `needs_model=False` only the tests without a model's numbers run; the `options` must let an answer
    reach `max_tokens`."""

    kind: ClassVar[Kind] = "inference"
    seeds: ClassVar[bool] = False
    """Whether the same seed gives the same answer, independent of other requests."""
    refuses: ClassVar[frozenset[str]] = frozenset()
    """Options among `top_p`, `top_k`, `min_p` and `logit_bias` that the engine refuses, with an error that
    names them. `top_k+top_p` means that it refuses only the two together."""

    @pytest.fixture(scope="class")
    @classmethod
    def models(
        cls, under_test: ComponentUnderTest, tmp_path_factory: pytest.TempPathFactory
    ) -> tuple[TinyModel | NoModel, TinyModel | NoModel]:
        """Two models of one architecture; the engine starts with the folder of the first."""
        if not under_test.component.needs_model:
            return NoModel(0), NoModel(1)
        parent = tmp_path_factory.mktemp("models")
        first = TinyModel.make(parent / "a", seed=0, layers=_DEEP)
        return first, TinyModel.make(parent / "b", seed=1, layers=_DEEP)

    @classmethod
    def serving(
        cls, under_test: ComponentUnderTest, model: Path, folder: Path, **options: Any
    ) -> ServedEngine:
        """Return the engine, not started yet, for a run in `folder`; `options` replace keys of the engine's
        section."""
        (folder / "logs").mkdir(parents=True)
        context = under_test.context(model=str(model), folder=str(folder), worker="inference-0")
        section = msgspec.structs.replace(under_test.config, **options)
        engine = under_test.composed.make("inference", context, section)
        return ServedEngine(engine, folder, tolerance=cls.tolerance, start_s=cls.start_s)

    @pytest.fixture(scope="class")
    @classmethod
    def early(cls) -> GenerateRequest:
        """A request that the test sends before the first swap."""
        return request(max_tokens=30)

    @pytest.fixture(scope="class")
    @classmethod
    def started(
        cls,
        under_test: ComponentUnderTest,
        models: tuple[TinyModel, TinyModel],
        early: GenerateRequest,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Iterator[ServedEngine]:
        """The engine after its first swap, to weights other than those of its folder."""
        folder = tmp_path_factory.mktemp("run")
        engine = cls.serving(under_test, models[0].folder, folder, on_swap="recompute")
        with engine.running() as served:
            served.ask(early)
            served.until_load(lambda load: load.waiting == 1)
            assert served.load().version == -1
            served.swap(models[1].reference)
            served.until_load(lambda load: load.running == load.waiting == 0)  # the early request has ended
            yield served

    @pytest.fixture
    def served(self, started: ServedEngine, models: tuple[TinyModel, TinyModel]) -> Iterator[ServedEngine]:
        """The idle engine, with the first model's weights."""
        if started.weights[started.version] is not models[0].reference:
            started.swap(models[0].reference)
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

    @needs_model
    def test_a_model_that_cannot_be_loaded_is_told_by_start(
        self, under_test: ComponentUnderTest, tmp_path: Path
    ) -> None:
        """`start` raises EngineError, and `stop` then ends everything that was started."""
        empty = tmp_path / "empty"
        empty.mkdir()
        with pytest.raises(EngineError):
            with self.serving(under_test, empty, tmp_path / "run").running():
                pytest.fail("it started without a model")

    # ------------------------------------------------------------------------------------ numbers

    def test_logprobs_are_those_of_the_models_own_forward(self, served: ServedEngine) -> None:
        """The engine serves requests of several temperatures and prompt lengths at the same time."""
        queries = [
            request(1 + 37 * i % 400, n=1 + i % 3, max_tokens=5 + 13 * i % 40, temperature=temperature)
            for i, temperature in enumerate([1.0, 0.7, 0.0, 1.3] * 4)
        ]
        for query, samples in zip(queries, served.answers(*queries), strict=True):
            for sample in samples:
                assert (sample.finish, len(sample.tokens)) == ("length", query.sampling.max_tokens)
                assert set(sample.versions) == {served.version}
                served.assert_own_logprobs(query, sample)

    @needs_model
    def test_temperature_0_takes_the_likeliest_token(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel]
    ) -> None:
        """The test compares the token at every position with the model's logits."""
        query = request(temperature=0.0, max_tokens=60)
        sample = served.answer(query)
        prompt = query.prompt_ids.numpy().tolist()
        logits = models[0].reference.logits([*prompt, *sample.tokens])[len(prompt) - 1 : -1]
        chosen = logits[np.arange(len(sample.tokens)), sample.tokens]
        assert (logits.max(-1) - chosen).max() <= self.tolerance

    @needs_model
    @pytest.mark.parametrize(
        "sampling",
        [
            {"temperature": 0.7},
            # The tail has weight: an engine whose own default is a `top_k` shows it. vLLM has no higher one.
            {"temperature": 2.0},
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
        """Tested for every option that changes the distribution. Errors name the options that are refused."""
        query = request(n=600, max_tokens=1, **sampling)
        (samples,) = served.answers(query)
        for refused in (names.split("+") for names in self.refuses):
            if sampling.keys() >= set(refused):
                assert all(name in sample.error for sample in samples for name in refused)
                return
        logits = models[0].reference.logits(query.prompt_ids.numpy().tolist())[-1]
        exact = _distribution(logits, query.sampling)
        drawn = np.array([sample.tokens[0] for sample in samples])
        assert exact[drawn].min() > 0, "a token was drawn that is not kept"
        reported = np.array([sample.logprobs[0] for sample in samples])
        np.testing.assert_allclose(reported, np.log(exact[drawn]), atol=self.tolerance)
        _assert_drawn_from(exact, drawn)

    @needs_model
    @pytest.mark.parametrize(
        "sampling",
        [{"top_k": 20}, {"top_p": 0.8, "top_k": 1024}, {"min_p": 0.1, "top_k": 40, "temperature": 0.7}],
        ids=str,
    )
    def test_each_token_comes_with_those_it_was_drawn_from(
        self,
        under_test: ComponentUnderTest,
        served: ServedEngine,
        models: tuple[TinyModel, TinyModel],
        sampling: dict[str, Any],
    ) -> None:
        """Sent if the request wants them. A continued answer has them only for its new tokens."""
        if not under_test.config.sends_kept_tokens:
            pytest.skip("its section does not say `sends_kept_tokens`")
        query = request(n=2, max_tokens=12, wants_kept=True, **sampling)
        later = request(max_tokens=12, begun=([3] * 7,), have=(7,), wants_kept=True, **sampling)
        unasked = request(max_tokens=12, **sampling)
        (*samples, last), plain = [*served.answers(query)[0], served.answer(later)], served.answer(unasked)
        assert plain.kept == [], "it sends kept tokens that nobody wants"
        for asked, sample, begun in [*((query, each, []) for each in samples), (later, last, [3] * 7)]:
            text = [*asked.prompt_ids.numpy().tolist(), *begun, *sample.tokens]
            logits = models[0].reference.logits(text)[-len(sample.tokens) - 1 : -1]
            assert sample.finish == "length", f"it ended with {sample.finish!r}: {sample.error}"
            assert len(sample.kept) == len(sample.tokens), "some tokens have no kept ones"
            for token_logits, ids in zip(logits, sample.kept, strict=True):
                assert ids == np.flatnonzero(_distribution(token_logits, asked.sampling)).tolist()

    @needs_model
    def test_logprobs_of_given_text_are_those_of_the_weights_served(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel]
    ) -> None:
        """Tested also during generation, and after a swap if the engine had computed the same text before."""
        text = [request(length).prompt_ids.numpy().tolist() for length in (2, 3, 70, 400)]
        served.ask(request(n=2, max_tokens=600))
        for model in models:
            if served.weights[served.version] is not model.reference:
                served.swap(model.reference)
            for sequence, logprobs in zip(text, served.logprobs(text), strict=True):
                assert logprobs.dtype == np.float32
                expected = model.reference.logprobs(sequence[:1], sequence[1:])
                np.testing.assert_allclose(logprobs, expected, atol=self.tolerance)

    def test_the_seed_alone_decides_what_is_drawn(self, served: ServedEngine) -> None:
        """Other requests change nothing. Seeds may be signed or unsigned 64-bit numbers."""
        if not self.seeds:
            pytest.skip("it does not offer seeds (`seeds`)")
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

    @needs_model
    @pytest.mark.parametrize("ignore_eos", [False, True])
    @pytest.mark.parametrize("stops", [(), tuple(range(40, 50))], ids=["no stop tokens", "stop tokens"])
    def test_a_token_that_ends_an_answer_is_its_last(
        self, served: ServedEngine, stops: tuple[int, ...], ignore_eos: bool
    ) -> None:
        """A stop token ends an answer, and the end-of-sequence token unless `ignore_eos` is set."""
        query = request(n=24, max_tokens=150, stop_token_ids=stops, ignore_eos=ignore_eos)
        (samples,) = served.answers(query)
        ends = {*stops} if ignore_eos else {*stops, END}
        assert any(sample.finish == "stop" for sample in samples) == bool(ends)
        for sample in samples:
            places = [i for i, token in enumerate(sample.tokens) if token in ends]
            assert places == ([len(sample.tokens) - 1] if sample.finish == "stop" else [])
            assert sample.finish == "stop" or (sample.finish, len(sample.tokens)) == ("length", 150)
            served.assert_own_logprobs(query, sample)
        if not ends:
            assert any(END in sample.tokens for sample in samples)

    @needs_model
    def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel]
    ) -> None:
        """Tested with stop strings of one token and of several tokens."""
        prompt = request(30).prompt_ids.numpy().tolist()
        plain = served.answer(request(prompt, temperature=0.0, max_tokens=60))
        text = models[0].decode(plain.tokens)
        stop_string = text[20:23]
        stopped = served.answer(
            request(prompt, temperature=0.0, max_tokens=60, stop=("never there", stop_string))
        )
        assert stopped.finish == "stop"
        assert models[0].decode(stopped.tokens) == text[: text.index(stop_string) + 3]
        characters = tuple("ABCDEFGHIJ")  # these occur in no special token
        (samples,) = served.answers(request(n=8, max_tokens=100, stop=characters))
        assert any(sample.finish == "stop" for sample in samples)
        for sample in samples:
            written = models[0].decode(sample.tokens)
            places = [i for i, character in enumerate(written) if character in characters]
            assert places == ([len(written) - 1] if sample.finish == "stop" else [])

    @needs_model
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
        full = served.answer(request([10] * 1000, max_tokens=24))  # as many tokens as the model has positions
        assert (full.finish, len(full.tokens)) in (("length", 24), ("error", 0))
        assert served.answer(request([10] * 900, max_tokens=10)).finish == "length"

    def test_abort_frees_every_slot_within_a_decode_step(self, served: ServedEngine) -> None:
        """Tested with running and waiting samples. The next request starts at once. One try must be fast."""
        slots, late_s = served.load().slots, list[float]()
        while len(late_s) < 2 or (min(late_s) > 0 and len(late_s) < 4):
            long, following = request(n=slots + 2, max_tokens=900), request(max_tokens=5)
            served.ask(long)
            early = served.until(*((long.id, i) for i in range(slots)), tokens=5)
            start = time.monotonic()
            step_s = max((s.arrivals[-1] - s.arrivals[0]) / max(1, len(s.tokens) - 1) for s in early)
            served.ask(following)
            served.abort(long.id)
            served.abort(long.id)
            ended = served.finished(long)
            (after,) = served.until((following.id, 0), tokens=1)
            last = max(sample.arrivals[-1] for sample in ended)
            late_s.append(max(last, after.arrivals[0] - step_s) - start - _DELIVERY_S - step_s)
            assert {sample.finish for sample in ended} == {"abort"}
            for sample in ended[:3]:
                assert len(sample.tokens) < 900
                served.assert_own_logprobs(long, sample)
        assert min(late_s) <= 0, f"seconds after the allowed time: {late_s}"
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
        (good,) = served.finished(other)  # this answer may take longer
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

    def test_an_answer_that_came_complete_ends_at_once(
        self, under_test: ComponentUnderTest, served: ServedEngine
    ) -> None:
        """The answer is complete by its length, a stop token, or the model's end-of-sequence token."""
        complete = [([5] * 20, "length")]
        complete += [([5, 6, 7], "stop"), ([5, 6, END], "stop")] if under_test.component.needs_model else []
        for begun, finish in complete:
            have = (len(begun),)
            sample = served.answer(request(begun=(begun,), have=have, ignore_eos=False, stop_token_ids=(7,)))
            assert (sample.finish, sample.tokens, sample.start) == (finish, [], len(begun))

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

    # --------------------------------------------------------------------- streaming and figures

    @needs_model
    def test_the_first_chunk_comes_before_a_tenth_of_the_answers_time(self, served: ServedEngine) -> None:
        """Of 512 tokens. One of three tries must pass; each must send at least 10 messages, but not many."""
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
        """Tested with more samples than slots, whose answers are long enough to be observed."""
        idle = served.load()
        assert (idle.version, idle.running, idle.waiting) == (served.version, 0, 0)
        query = request(n=idle.slots + 4, max_tokens=200)
        start = time.monotonic()
        served.ask(query)
        served.until_load(lambda load: load.running + load.waiting == idle.slots + 4)
        full = served.until_load(lambda load: load.running == idle.slots)
        assert full.waiting <= 4
        samples = served.finished(query)
        final = served.until_load(lambda load: load.running == load.waiting == 0)
        took = time.monotonic() - start
        assert all(len(sample.tokens) == 200 for sample in samples)
        assert final.generated_tokens - idle.generated_tokens == 200 * (idle.slots + 4)
        assert 0 < final.busy_s - idle.busy_s <= took
        assert idle.busy_s <= full.busy_s <= final.busy_s

    @needs_model
    def test_stop_ends_the_stream(
        self, under_test: ComponentUnderTest, models: tuple[TinyModel, TinyModel], tmp_path: Path
    ) -> None:
        """`stop` ends the stream in the middle of an answer; a second call has no effect."""
        with self.serving(under_test, models[0].folder, tmp_path / "run").running() as served:
            served.swap(models[0].reference)
            query = request(n=4, max_tokens=900)
            served.ask(query)
            served.until((query.id, 0), tokens=5)
            served.stop()
            messages = served.messages
            served.stop()
        assert served.messages == messages


def _distribution(logits: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """Return (V,) the exact probability of each token after all sampling options."""
    biased = logits.copy()
    for token, bias in sampling.logit_bias.items():
        biased[token] += bias
    probabilities = np.exp(log_softmax(biased / sampling.temperature))
    order = np.argsort(-probabilities)[: sampling.top_k or None]
    total = probabilities[order].sum()
    indices: list[int] = []
    for token in order.tolist():
        has_top_p = probabilities[indices].sum() / total >= sampling.top_p
        if has_top_p or probabilities[token] < sampling.min_p * probabilities[order[0]]:
            break
        indices.append(token)
    exact = np.zeros(len(probabilities))
    exact[indices] = probabilities[indices]
    return exact / exact.sum()


def _assert_drawn_from(exact: NDArray[np.float64], drawn: NDArray[np.int64]) -> None:
    """Assert a bound on Pearson's chi-squared; tokens with an expected count below five are one class."""
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
