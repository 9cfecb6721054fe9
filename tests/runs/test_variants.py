"""An A/B test within one run of the mock engines, through the command line."""

from pathlib import Path
from statistics import fmean

import pytest

from fixture_types import Start
from stretto.kernel.schedule.variants import variant_of
from worlds import in_simulation

REWARDS = """
def long(prompt, completion): return 0.25
def short(prompt, completion): return {"reward": 0.75, "accuracy": 1.0}
"""


@in_simulation
def test_each_variant_has_its_own_sampling_reward_and_figures(start: Start, tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(REWARDS)
    run = start(
        "reward={use: function, function: score.py:long}",
        "variants.base={weight: 1}",
        "variants.short={weight: 3, sampling: {max_tokens: 8}, reward: {function: score.py:short}}",
    )
    summary = run.assert_completed(8)

    drawn = [variant_of(1, ticket, {"base": 1, "short": 3}) for ticket in range(summary["ledger"]["issued"])]
    for name, variant in summary["variants"].items():
        assert variant["ledger"]["issued"] == drawn.count(name) > 0
        assert variant["ledger"]["trained"] == drawn.count(name)
    lines = run.metrics()
    assert lines[-1]["variants"] == {name: each["ledger"] for name, each in summary["variants"].items()}
    for line in lines:
        groups = {name: line[f"variant/{name}/groups"] for name in ("base", "short")}
        assert sum(groups.values()) == 4
        assert sum(line[f"variant/{name}/tokens"] for name in groups) == line["tokens"]
        reward = sum(count * line.get(f"variant/{name}/reward", 0) for name, count in groups.items()) / 4
        assert line["reward"] == pytest.approx(reward)
        assert line.get("variant/base/reward", 0.25) == 0.25
        assert line.get("variant/short/reward", 0.75) == 0.75
        assert line.get("variant/short/reward/accuracy", 1.0) == 1.0
        assert line.get("variant/short/length", 0.0) <= 8
    figures = {name: variant["figures"] for name, variant in summary["variants"].items()}
    lengths = [line["variant/base/length"] for line in lines for _ in range(line["variant/base/groups"])]
    assert figures["base"]["length"]["mean"] == pytest.approx(fmean(lengths))
    assert summary["variants"]["base"]["groups"] == drawn.count("base")
    assert figures["base"]["length"]["mean"] > 8 >= figures["short"]["length"]["mean"]
    difference = summary["variants"]["short"]["difference"]
    assert difference["reward"] == {"mean": 0.5, "ci95": 0.0}
    apart = figures["short"]["length"]["mean"] - figures["base"]["length"]["mean"]
    assert difference["length"]["mean"] == pytest.approx(apart)
    assert f"variant base: {drawn.count('base')} groups, reward 0.25" in run.text()
    assert "(+0.5 ± 0 against base)" in run.text()
