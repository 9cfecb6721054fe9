"""What `stretto replay` reads of a run's folder, and the figures of its comparison."""

import math
from pathlib import Path

import numpy as np
import pytest

from kept_samples import Kept
from stretto.bus.messages.training import RowRef
from stretto.cli.audit.recording import KeptGroups, WeightSums
from stretto.cli.audit.replay_report import ComparedStep, Difference, ReplayReport, off_policy, report_lines
from stretto.errors import RunError
from stretto.models.images import ImageFile
from stretto.records.samples.images import SampleImages


def test_importance_weights_give_the_off_policy_error() -> None:
    weights = WeightSums()
    weights.add(np.array([1.0, 2.0], np.float32))
    weights.add(np.array([0.5], np.float32))
    figures = off_policy(weights)
    # k3 = w - 1 - log w: 0, 1 - log 2, -1/2 + log 2
    assert figures["kl"] == pytest.approx(0.5 / 3)
    assert figures["ess"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert figures["ess_sequences"] == pytest.approx(2.5**2 / (2 * 4.25))  # products 2 and 1/2
    assert figures["outside"] == pytest.approx(2 / 3)


def test_equal_policies_have_no_error_and_a_weight_of_0_is_finite() -> None:
    equal, far = WeightSums(), WeightSums()
    equal.add(np.ones(5, np.float32))
    assert off_policy(equal) == {"kl": 0, "ess": 1, "ess_sequences": 1, "outside": 0}
    far.add(np.zeros(2, np.float32))
    assert all(math.isfinite(value) for value in off_policy(far).values())


def report(**changes: object) -> ReplayReport:
    values: dict[str, object] = {"run": "RUN", "first": 1, "last": 3, "overrides": [], "state": "complete"}
    return ReplayReport(**{**values, "compared": 3, **changes})  # pyright: ignore[reportArgumentType]


def difference(**changes: object) -> Difference:
    values: dict[str, object] = {"step": 2, "recorded": "aa", "replayed": "bb"}
    values |= {"recorded_layout": "x", "replayed_layout": "x", "incarnation_from": None}
    return Difference(**{**values, **changes})  # pyright: ignore[reportArgumentType]


def test_the_first_step_that_differs_is_named_with_what_may_explain_it() -> None:
    text = "\n".join(report_lines(report(identical=1, difference=difference())))
    first = "step 2 is the first whose weights differ, after 1 identical steps: recorded aa, replayed bb"
    assert first in text
    assert "another processor or GPU" in text
    text = "\n".join(report_lines(report(difference=difference(replayed_layout="y", incarnation_from=1))))
    assert "the layout differs: recorded 'x', here 'y'" in text
    assert "--from 1" in text


def test_a_comparison_says_what_it_cannot_tell() -> None:
    far = {"kl": 0.5, "ess": 0.2, "ess_sequences": 0.1, "outside": 0.4}
    steps = [ComparedStep(step=3, recorded={"kl": 0.01}, replayed=far)]
    changed = report(overrides=["training.lr=1"], difference=difference(), steps=steps, limits=["the rest"])
    lines = report_lines(changed)
    assert any(line.startswith("off-policy error: KL(behaviour || replayed) 0.5 nats") for line in lines)
    assert any("far from the one that sampled" in line for line in lines)
    assert lines[-1] == "not known: the rest"


async def test_added_images_are_those_of_the_samples(tmp_path: Path) -> None:
    small, large = ImageFile(b"1"), ImageFile(bytes(3 * 2**20))
    kept = Kept(tmp_path)
    kept.trained_group(7, images=(0, small.digest, large.digest))
    kept.flush()
    SampleImages(tmp_path).write(small)
    rows = {(7, 1): [RowRef(f"7/1/{index}", 1, index, 7, 4) for index in (0, 1)]}
    groups = KeptGroups(tmp_path).groups
    with pytest.raises(RunError, match=f"image {large.digest} of ticket 7, attempt 1 is not in the kept"):
        [group async for group in groups(rows)]
    SampleImages(tmp_path).write(large)
    [group] = [group async for group in groups(rows)]
    assert group.images == {image.digest: image.file for image in (small, large)}
    assert [each.images for each in group.trajectories] == [(0, small.digest, large.digest)] * 2
