"""The tests of `InferenceConformance` about swaps of the weights."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from stretto.errors import WeightsError
from stretto.models.digest import digest_of, hashes_of
from stretto.testing.component import ComponentUnderTest, needs_model
from stretto.testing.served_engine import ServedEngine, request
from stretto.testing.tiny_model import TinyModel

__all__ = ["SwapTests"]

_LONG = 600
"""Tokens of an answer that even a fast server still generates when a swap comes."""
_ENDED_S = 10.0
"""Seconds after the last chunk of an answer within which the engine frees the answer's slot."""
_BLOCK = 16
"""Engines store keys and values token by token, or in blocks of a multiple of this many tokens."""


class SwapTests:
    """Tests of swaps for `InferenceConformance`, with its fixtures."""

    recomputes: ClassVar[bool] = False
    """Whether the engine computes all keys and values again with new weights, even where `on_swap` is
    `keep_cache`: answers in flight then have the logprobs of `recompute`, which are more exact."""
    tolerance: ClassVar[float] = 1e-3
    """Maximum difference between a logprob and that of the reference, in nats, in float32."""
    start_s: ClassVar[float] = 120.0
    """Maximum duration of a start, of a swap and of the end, in seconds."""
    serving: ClassVar[Callable[..., ServedEngine]]

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
            hashes = hashes_of(model.reference.tensors())
            assert report.digest == digest_of(hashes.items()), "it reports another digest"
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
        """Tested under `on_swap: recompute`, over three swaps."""
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

    @needs_model
    def test_keep_cache_goes_on_over_what_older_weights_computed(
        self, under_test: ComponentUnderTest, models: tuple[TinyModel, TinyModel], tmp_path: Path
    ) -> None:
        """The first token after the swap shows this; the engine may compute keys and values of the last block
        again. An answer wholly of the new version uses only its weights, also when the engine knew the prompt
        before the swap, or was computing it then."""
        older, newer = models[0].reference, models[1].reference
        engine = self.serving(under_test, models[0].folder, tmp_path / "run", on_swap="keep_cache")
        with engine.running() as served:
            served.swap(older)
            prompt = request(300).prompt_ids.numpy().tolist()
            query, repeated = request(prompt, n=4, max_tokens=_LONG), request(prompt, max_tokens=10)
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
                assert sample.versions == [0] * switch + [1] * (_LONG - switch)
                older_logprobs = older.logprobs(prompt, sample.tokens)[:switch]
                np.testing.assert_allclose(sample.logprobs[:switch], older_logprobs, atol=self.tolerance)
                if self.recomputes:
                    served.assert_own_logprobs(query, sample)
                    continue
                text = [*prompt, *sample.tokens[: switch + 1]]
                counts = {*range(160, len(text) - 2, _BLOCK), *range(len(text) - 4, len(text) - 1)}
                off = {k: abs(newer.last_over(older, text, k) - sample.logprobs[switch]) for k in counts}
                assert min(off.values()) <= self.tolerance, (
                    "the first logprob after the swap is that of no number of tokens kept from the older "
                    f"weights (number: difference in nats: {off}); an engine that computes everything anew "
                    "says `recomputes = True`"
                )

    @needs_model
    def test_a_prompt_known_from_older_weights_is_computed_anew(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel]
    ) -> None:
        """A swap back to earlier weights does not bring back the cache of these weights either."""
        prompt = request(400).prompt_ids.numpy().tolist()
        for model in (models[1], models[0], models[1]):
            for _ in range(2):
                query = request(prompt, max_tokens=5)
                served.assert_own_logprobs(query, served.answer(query))
            served.swap(model.reference)

    def test_a_request_waits_for_the_version_it_needs_and_holds_up_nobody(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel]
    ) -> None:
        """Tested with more waiting samples than slots."""
        now = served.version
        needy = request(n=served.load().slots + 1, min_version=now + 1)
        served.ask(needy)
        old = served.answer(request(min_version=now))
        assert set(old.versions) == {now}
        load = served.until_load(lambda load: not load.running, _ENDED_S)
        assert load.waiting == len(needy.seeds)
        served.swap(models[1].reference)
        for sample in served.finished(needy):
            assert (sample.finish, set(sample.versions)) == ("length", {now + 1})
            served.assert_own_logprobs(needy, sample)

    def test_an_engine_that_slept_serves_what_the_next_swap_loads(
        self, under_test: ComponentUnderTest, models: tuple[TinyModel, TinyModel], tmp_path: Path
    ) -> None:
        """The same weights too, of which nothing is left, and without what it knew of a prompt."""
        if not under_test.config.may_sleep:
            pytest.skip("its section does not say `may_sleep`")
        engine = self.serving(under_test, models[0].folder, tmp_path / "run", sleep=True)
        prompt = request(400).prompt_ids.numpy().tolist()
        with engine.running() as served:
            for number in (0, 0, 1):
                served.sleep()
                served.sleep()
                assert served.load().version == -1
                report = served.swap(models[number].reference)
                assert report.digest == digest_of(hashes_of(models[number].reference.tensors()).items())
                query = request(prompt, n=2, max_tokens=5)
                served.ask(query)
                for sample in served.finished(query):
                    assert set(sample.versions) == {served.version}
                    served.assert_own_logprobs(query, sample)

    @needs_model
    @pytest.mark.parametrize("fault", ["missing", "shape", "unknown"])
    def test_weights_that_do_not_fit_leave_the_old_ones(
        self, served: ServedEngine, models: tuple[TinyModel, TinyModel], fault: str
    ) -> None:
        """The error names the tensor, and answers in flight continue."""
        import torch

        tensors = models[1].reference.tensors()
        name = norm_name = next(each for each in tensors if each.endswith(".norm.weight"))
        norm = tensors.pop(name)
        if fault == "shape":
            tensors[name] = torch.cat([norm, norm])
        elif fault == "unknown":
            name = "model.normal.weight"
            tensors |= {norm_name: norm, name: norm.clone()}
        running, later = request(max_tokens=200), request()
        served.ask(running)
        served.until((running.id, 0), tokens=5)
        with pytest.raises(WeightsError, match=name):
            served.swap_tensors(tensors)
        assert served.load().version == served.version
        for query, sample in ((later, served.answer(later)), (running, served.finished(running)[0])):
            assert (sample.finish, set(sample.versions)) == ("length", {served.version})
            served.assert_own_logprobs(query, sample)
