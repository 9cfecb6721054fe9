"""`stretto runs`, `plot` and `compare`: what they show is what the runs' files say."""

import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from kept_runs import HOSTILE, keep_run
from statuses import make_status
from stretto.bus.server import lock_run
from stretto.cli.main import app
from stretto.errors import ConfigError
from stretto.records.charts import panels_of, smooth, thin_points
from stretto.records.comparison import caution, compare_runs
from stretto.records.intervals import Moments, difference_of
from stretto.records.run_folder import RunFolder
from stretto.records.status import STATUS
from stretto_views.plot import draw_text, wanted_panels
from stretto_views.runs import runs_below


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Two seeds of one configuration, and a better run with another learning rate."""
    root = tmp_path_factory.mktemp("runs")
    return [
        RunFolder(keep_run(root / "one", seed=1)),
        RunFolder(keep_run(root / "two", seed=2)),
        RunFolder(keep_run(root / "three", seed=1, lr=3e-4, shift=0.5, name="better")),
    ]


def lines(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def test_runs_lists_every_run_and_names_the_broken_one(tmp_path: Path) -> None:
    for name in ("a", "deep/b", "deep/c"):
        keep_run(tmp_path / name)
    (tmp_path / "a" / STATUS).write_bytes(msgspec.json.encode(make_status(name=f"[red]{HOSTILE}")))
    (tmp_path / "deep" / "b" / STATUS).write_bytes(b"{")
    with lock_run(tmp_path / "a" / "bus"):
        rows = {row.folder: row for row in runs_below(tmp_path)}
        shown = CliRunner().invoke(app, ["runs", str(tmp_path)]).output
    first = rows[str(tmp_path / "a")]
    assert (first.state, first.step, first.steps, first.reward) == ("running", 60, 200, 0.5)
    assert (first.score, first.best, first.duration_s) == (0.5, 0.5, 3725.0)
    assert "not the status of a run" in rows[str(tmp_path / "deep" / "b")].fault
    assert rows[str(tmp_path / "deep" / "c")].state == "completed"
    assert "60/200" in shown
    assert "1 h 2 min" in shown
    assert "[red]" in shown
    assert "\x1b" not in shown
    listed = json.loads(CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).output)
    assert {row["folder"] for row in listed} == rows.keys()


def test_curves_are_smoothed_and_thinned_without_losing_a_peak() -> None:
    assert smooth([(1, 2.0), (2, 4.0), (3, 9.0)], 2) == [(1, 2.0), (2, 3.0), (3, 6.5)]
    points = [(float(x), 0.0) for x in range(10_000)]
    points[4321] = (4321.0, 9.0)
    points[77] = (77.0, -9.0)
    thinned = thin_points(points, 400)
    assert len(thinned) <= 400
    assert {points[0], points[77], points[4321], points[-1]} <= set(thinned)
    assert thin_points(points[:5], 400) == points[:5]


def test_a_plot_has_the_figures_of_metrics_jsonl(runs: list[RunFolder]) -> None:
    [reward, loss] = wanted_panels(runs[:2], ["reward", "loss"], 1)
    for run, curve in zip(runs, reward.curves, strict=False):
        assert list(curve.line) == [(each["step"], each["reward"]) for each in lines(run) if "reward" in each]
        assert list(curve.points) == [
            (each["step"], each["evaluation/accuracy"]) for each in lines(run) if "evaluation/samples" in each
        ]
    assert [curve.label for curve in loss.curves] == ["one", "two"]
    assert not loss.curves[0].points
    [smoothed] = wanted_panels(runs[:1], ["reward"], 10)
    newest = [each["reward"] for each in lines(runs[0]) if "reward" in each][-10:]
    assert smoothed.curves[0].line[-1][1] == pytest.approx(fmean(newest))
    text = draw_text([reward], 80, coloured=False)
    assert f"a  one: reward {newest[-1]:.3f} at step 40, ● held-out accuracy 1.000 at version 40" in text
    assert "●" in text.split("version 40")[-1]
    assert max(map(len, text.splitlines()[2:])) <= 80
    assert "\x1b[38;5;" in draw_text([reward], 80, coloured=True)
    with pytest.raises(ConfigError, match=r"no run has the key 'rewards'; did you mean 'reward'\?"):
        wanted_panels(runs, ["rewards"], 1)


def test_a_comparison_has_the_figures_of_the_files(runs: list[RunFolder]) -> None:
    comparison = compare_runs(runs)
    one, two, three = comparison.runs
    assert [run.label for run in comparison.runs] == ["one", "two", "better"]
    for run, figures in zip(runs, comparison.runs, strict=True):
        rewards = [each["reward"] for each in lines(run) if "reward" in each]
        assert figures.reward == pytest.approx(fmean(rewards[-10:]))
        assert (figures.steps, figures.trained, figures.not_trained) == (40, 160, 2)
    assert comparison.differences == {"seed": ["1", "2", "1"], "training.lr": ["0.0001", "0.0001", "0.0003"]}
    assert comparison.caution == ""
    one_values = {"training.lr": "1", "reward.use": '"exact"', "reward.timeout_s": "1"}
    same = one_values | {"training.lr": "2", "reward.timeout_s": "2"}
    assert caution([one_values, same], comparable=True) == ""
    others = one_values | {"reward.use": '"math"', "evaluation.rows": "64"}
    said = "the runs differ in reward.use, evaluation.rows: their held-out scores are not the same measure"
    assert caution([one_values, others], comparable=True) == said
    # At version 10, rows 0 to 2 of 8 pass; in the better run also rows 4 and 6.
    assert dict(comparison.scores)[10] == [3 / 8, 3 / 8, 5 / 8]
    assert one.last is not None
    assert (one.last.version, one.last.score.mean, one.last.by_row) == (40, 1.0, True)
    assert two.best == one.best
    assert three.best is not None
    assert [step for step, _ in comparison.curves["reward"]] == list(range(4, 41, 4))
    step, values = comparison.curves["reward"][-1]
    assert (step, values) == (40, pytest.approx([run.reward for run in comparison.runs]))
    [group] = comparison.groups
    assert group.runs == ["one", "two"]
    assert group.reward == pytest.approx(fmean([one.reward or 0, two.reward or 0]))
    assert group.reward_sd == pytest.approx(stdev([one.reward or 0, two.reward or 0]))


def test_settings_are_compared_over_their_seeds(tmp_path: Path) -> None:
    def runs(*seeds: tuple[int, int]) -> list[RunFolder]:
        folder = tmp_path / str(seeds)
        kept = ((lr, seed) for lr in (0, 1) for seed in seeds[lr])
        return [
            RunFolder(keep_run(folder / f"{n}-{seed}", steps=10, seed=seed, lr=1e-4 * (1 + n), shift=n / 2))
            for n, seed in kept
        ]

    for seeds, paired in (((1, 2), (2, 1)), 2), (((1, 2), (3, 4)), 0):
        first, second = compare_runs(runs(*seeds)).groups
        assert first.difference is None
        # Of 8 rows, the runs with the other rate have rows 4 and 6 right in addition, whatever the seed.
        assert second.difference is not None
        assert (second.difference.mean, second.difference.ci95, second.paired) == (0.25, 0.0, paired)


@pytest.mark.parametrize(
    ("seeds", "scored", "key", "figure", "paired"),
    [
        ((1, 2), (), "queue", "reward", 2),
        ((2, 3, 1), (), "queue", "reward", 2),
        ((3, 4), (), "queue", "reward", 0),
        ((1, 2), (0, 1), "queue", "reward", 2),
        ((1, 2), (0, 1, 2, 3), "queue", "held-out accuracy", 2),
        ((1, 2), (), "reward", "", 0),
    ],
)
def test_settings_without_scores_are_compared_by_their_rewards(
    tmp_path: Path, seeds: tuple[int, ...], scored: tuple[int, ...], key: str, figure: str, paired: int
) -> None:
    """`scored`: the runs with evaluations. `key`: a section that differs between the two groups."""
    groups = [(0, 1), (0, 2), *((1, seed) for seed in seeds)]
    runs = [RunFolder(keep_run(tmp_path / f"{n}-{s}", seed=s, steps=12, shift=n / 2)) for n, s in groups]
    for number, run in enumerate(runs):
        config = {"seed": groups[number][1], key: {"x": groups[number][0]}}
        (run.folder / "config.yaml").write_text(json.dumps(config))
        kept = [line for line in lines(run) if number in scored or "evaluation/samples" not in line]
        (run.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    comparison = compare_runs(runs)
    first, second = comparison.groups
    assert (comparison.between, first.difference) == ([], None)
    assert (second.figure, second.paired, bool(second.difference)) == (figure, paired, bool(figure))
    if second.difference and figure == "reward":  # the same noise for each seed
        assert second.difference.mean == pytest.approx(0.5, abs=1e-6 if paired else 0.1)
        assert (second.difference.ci95 or 0) < 1e-5 if paired else (second.difference.ci95 or 0) > 0.01
        assert f"+{second.difference}" in CliRunner().invoke(app, ["compare", str(tmp_path)]).output


def test_runs_of_the_same_seed_count_each(tmp_path: Path) -> None:
    runs = [RunFolder(keep_run(tmp_path / str(steps), steps=steps)) for steps in (10, 20)]
    (runs[1].folder / "config.yaml").write_text((runs[0].folder / "config.yaml").read_text())
    [group] = compare_runs([RunFolder(run.folder) for run in runs]).groups
    accuracies = [
        dict(run.series("evaluation/accuracy"))[steps] for steps, run in zip((10, 20), runs, strict=True)
    ]
    assert accuracies[0] != accuracies[1]
    assert group.score == pytest.approx(fmean(accuracies))


def test_a_difference_is_paired_by_row_where_the_rows_are_the_same(tmp_path: Path) -> None:
    first = RunFolder(keep_run(tmp_path / "one", steps=10))
    second = RunFolder(keep_run(tmp_path / "two", steps=10, shift=0.5))
    score, reward = compare_runs([first, second]).between
    # Of 8 rows, the second run has rows 4 and 6 right in addition.
    differences = [0, 0, 0, 0, 1, 0, 1, 0]
    assert (score.of, score.difference.mean) == ("8 rows that both answered at version 10", 0.25)
    assert score.difference.ci95 == pytest.approx(1.959964 * stdev(differences) / 8**0.5)
    rewards = [[value for _, value in run.series("reward")] for run in (second, first)]
    expected = difference_of(*map(Moments.of, rewards))
    assert (reward.figure, reward.difference) == ("reward", expected)
    assert reward.of == "means of the last 10 and 10 steps"


def test_a_difference_without_common_rows_has_the_interval_of_both_scores(tmp_path: Path) -> None:
    runs = [
        RunFolder(keep_run(tmp_path / name, steps=10, shift=at)) for name, at in (("one", 0), ("two", 0.5))
    ]
    (runs[1].folder / "fingerprints.json").write_text('{"evaluation.dataset": "another"}')
    comparison = compare_runs(runs)
    one, two = (figures.last.score for figures in comparison.runs if figures.last is not None)
    score = comparison.between[0]
    assert score.of == "versions 10 and 10, not paired"
    assert score.difference.mean == two.mean - one.mean
    assert score.difference.ci95 == pytest.approx(math.hypot(one.ci95 or 0, two.ci95 or 0))
    config = json.loads((runs[1].folder / "config.yaml").read_text())
    config |= {"reward": {"use": "math"}, "evaluation": {"rows": 64}}
    (runs[1].folder / "config.yaml").write_text(json.dumps(config))
    assert compare_runs([RunFolder(run.folder) for run in runs]).between == []  # other measures


def test_an_accuracy_and_a_reward_are_never_subtracted(tmp_path: Path) -> None:
    for number in (1, 2):
        keep_run(tmp_path / f"accuracy-{number}", steps=10, seed=number)
        keep_run(tmp_path / f"reward-{number}", steps=10, seed=number, lr=1.0, shift=0.5, rewards=True)
    ours, theirs = ([RunFolder(tmp_path / f"{of}-{n}") for n in (1, 2)] for of in ("accuracy", "reward"))
    mixed = compare_runs([*ours, *theirs])
    assert (mixed.measure, mixed.between) == ("held-out score", [])
    assert [(group.score, group.figure) for group in mixed.groups] == [(None, ""), (None, "reward")]
    assert "others only a held-out reward: no difference is taken" in mixed.caution
    measures = [run.last and run.last.measure for run in mixed.runs]
    assert measures == ["held-out accuracy"] * 2 + ["held-out reward"] * 2
    for runs, measure in ((ours, "held-out accuracy"), (theirs, "held-out reward")):
        comparable = compare_runs(runs)
        assert (comparable.measure, comparable.caution, len(comparable.groups)) == (measure, "", 1)
        shown = CliRunner().invoke(app, ["compare", *(str(run.folder) for run in runs)]).output
        assert f"best {measure}" in shown
        assert {panel.curves[0].measure for panel in panels_of(runs, ["reward"])} == {measure}
    shown = CliRunner().invoke(app, ["compare", *(str(run.folder) for run in (*ours, *theirs))]).output
    assert "caution: some runs have a held-out accuracy" in " ".join(shown.split())


@pytest.mark.parametrize("kept", [0, 3])
def test_unless_all_answers_are_kept_the_interval_is_binomial(tmp_path: Path, kept: int) -> None:
    run = RunFolder(keep_run(tmp_path / "one", steps=10))
    for file in (run.folder / "samples").iterdir():
        parquet.write_table(parquet.read_table(file).slice(0, kept), file)
    [figures] = compare_runs([run]).runs
    assert figures.last is not None
    assert not figures.last.by_row
    assert figures.last.score.ci95 == pytest.approx(1.959964 * (3 / 8 * 5 / 8 / 16) ** 0.5)


def test_compare_compares_runs_or_folders_with_runs(runs: list[RunFolder], tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["compare", str(runs[0].folder.parent)]).output
    assert "training.lr" in shown
    assert "2 runs that differ in their seed: one, two" in shown
    assert "\x1b" not in shown
    parsed = CliRunner().invoke(app, ["compare", *(str(run.folder) for run in runs), "--json"]).output
    assert json.loads(parsed) == json.loads(msgspec.json.encode(compare_runs(runs)))
    with pytest.raises(ConfigError, match="holds no run"):
        CliRunner().invoke(app, ["compare", str(tmp_path)], catch_exceptions=False)
