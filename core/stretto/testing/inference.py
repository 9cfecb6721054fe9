"""The contract of inference engines as tests of one engine alone.

The tests make tiny models and compare every logprob with the forward pass of transformers, so they need
`stretto[torch]`. An engine without a model has tests of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from stretto.component import Kind
from stretto.engine import GenerateRequest, Sampling
from stretto.errors import EngineError
from stretto.models.digest import digest_of
from stretto.testing.component import ComponentConformance, ComponentUnderTest
from stretto.testing.inference_swaps import SwapTests
from stretto.testing.served_engine import EngineUnderTest, Sample, ServedEngine, hashes_of, request
from stretto.testing.tiny_model import END, VOCABULARY, TinyModel, log_softmax

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["InferenceConformance"]

_DEEP = 16
"""Number of layers that makes a model slow enough for a test to act in the middle of an answer."""
_DELIVERY_S = 0.25
"""Time that chunks may take besides decoding, in seconds: the engine collects them for 20 ms and sends
them."""


def _any_tensors(version: int) -> dict[str, Tensor]:
    """Return the weights of an engine without a model."""
    import torch

    return {"steps": torch.tensor([version])}


class InferenceConformance(SwapTests, ComponentConformance):
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
        assert report.digest == digest_of(hashes_of(_any_tensors(0)).items()), "it reports another digest"
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
        """If the request wants them; and only those of new tokens, where an answer goes on."""
        if not under_test.config.sends_kept_tokens:
            pytest.skip("its section does not say `sends_kept_tokens`")
        query = request(n=2, max_tokens=12, wants_kept=True, **sampling)
        later = request(max_tokens=12, begun=([3] * 7,), have=(7,), wants_kept=True, **sampling)
        unasked = request(max_tokens=12, **sampling)
        (*samples, part), plain = [*served.answers(query)[0], served.answer(later)], served.answer(unasked)
        assert plain.kept == [], "it sends kept tokens that nobody wants"
        for asked, sample, begun in [*((query, each, []) for each in samples), (later, part, [3] * 7)]:
            text = [*asked.prompt_ids.numpy().tolist(), *begun, *sample.tokens]
            logits = models[0].reference.logits(text)[-len(sample.tokens) - 1 : -1]
            assert sample.finish == "length", f"it ended with {sample.finish!r}: {sample.error}"
            assert len(sample.kept) == len(sample.tokens), "some tokens have no kept ones"
            for own, ids in zip(logits, sample.kept, strict=True):
                assert ids == np.flatnonzero(_distribution(own, asked.sampling)).tolist()

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
        """For running and waiting samples, twice or more; the next request starts immediately. One try must
        be fast enough: other programs may delay a message."""
        slots, late_s = served.load().slots, list[float]()
        while len(late_s) < 2 or (min(late_s) > 0 and len(late_s) < 4):
            long, following = request(n=slots + 2, max_tokens=900), request(max_tokens=5)
            served.ask(long)
            early = served.until(*((long.id, i) for i in range(slots)), tokens=5)
            start, step_s = time.monotonic(), _step_s(early)
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
        """With more samples than slots, from the request to the end. The answers are long enough to be seen
        under way."""
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
    probabilities = np.exp(log_softmax(biased / sampling.temperature))
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
