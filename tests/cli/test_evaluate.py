"""`stretto evaluate`: figures against hand-worked ones, answers against transformers' own, refusals."""

import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from commands import stretto
from patience import patience
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.cli.make.evaluate import EvaluationOptions, compose_evaluation, pass_at_k, result_of
from stretto.cli.start.checks import problems
from stretto.errors import ConfigError, PluginError
from stretto.models.files import fingerprint_of
from stretto.records.samples.answers import KeptAnswer, read_answers
from stretto.records.samples.store import SampleFilter, SampleStore
from worlds import in_both_worlds, in_simulation

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
MODEL, HELDOUT = str(QUICKSTART / "model"), str(QUICKSTART / "heldout.jsonl")


# ------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (4, 1), (5, 2), (6, 6), (8, 3)])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers(n: int, c: int) -> None:
    answers = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        chosen = [any(some) for some in itertools.combinations(answers, k)]
        assert pass_at_k(n, c, k) == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)


def answer(row: int, reward: float, **fields: Any) -> KeptAnswer:
    plain: dict[str, Any] = {"sample": 0, "prompt": "", "completion": "", "metrics": {}, "tokens": 10}
    plain |= {"finish": "stop", "version": 0, "columns": {}, **fields}
    return KeptAnswer(row=row, reward=reward, engine="", **plain)


PLAIN: dict[str, Any] = {"source": "m", "version": 0, "failed": 0, "threshold": 1.0, "tokens_per_s": 0.0}


def test_figures_are_those_worked_out_by_hand() -> None:
    long = {"tokens": 30, "finish": "length"}
    answers = [answer(0, score, sample=index) for index, score in enumerate((1, 0, 0, 0))]
    answers += [answer(1, score, sample=index, **long) for index, score in enumerate((1, 1, 0, 1))]
    changed: dict[str, Any] = {**PLAIN, "failed": 2}
    result = result_of(answers, **changed)
    # Row means 1/4 and 3/4: s = 0.353553, and 1.959964 s / sqrt(2) = 0.489991.
    assert (result.rows, result.samples, result.n, result.failed) == (2, 8, 4, 2)
    assert result.avg.mean == 0.5
    assert result.avg.ci95 == pytest.approx(0.489991, abs=1e-6)
    assert list(result.pass_at) == [1, 2, 4]
    # pass@2: 1 - C(3, 2) / C(4, 2) = 1/2 for the one row, 1 - C(1, 2) / C(4, 2) = 1 for the other.
    assert result.pass_at[1].mean == 0.5
    assert result.pass_at[2].mean == 0.75
    assert result.pass_at[2].ci95 == pytest.approx(0.489991, abs=1e-6)
    assert (result.pass_at[4].mean, result.pass_at[4].ci95) == (1.0, 0.0)
    assert (result.length, result.truncated) == (20.0, 0.5)


def test_accuracy_goes_before_reward_and_one_row_has_no_interval() -> None:
    scores = [(0.9, 0.0), (2.5, 1.0), (0.5, 0.0)]
    numbered = enumerate(scores)
    answers = [answer(3, reward, sample=n, metrics={"accuracy": right}) for n, (reward, right) in numbered]
    result = result_of(answers, **PLAIN)
    assert (result.avg.mean, result.avg.ci95) == (pytest.approx(1 / 3), None)
    assert result.reward.mean == pytest.approx(1.3)
    means = {k: estimate.mean for k, estimate in result.pass_at.items()}
    assert means == pytest.approx({1: 1 / 3, 2: 2 / 3, 3: 1.0})  # n itself is there, too


def test_a_sample_that_became_several_trajectories_counts_once_and_a_threshold_says_what_passes() -> None:
    answers = [answer(0, 1.0), answer(0, 1.0, tokens=5, finish="length"), answer(0, 0.0, sample=1)]
    result = result_of(answers, **PLAIN)
    assert (result.samples, result.n, result.avg.mean) == (2, 2, 0.5)
    assert (result.length, result.truncated) == (12.5, 0.5)
    half: dict[str, Any] = {**PLAIN, "threshold": 0.5}
    passing = result_of([answer(0, 0.4), answer(0, 0.6, sample=1)], **half)
    assert passing.pass_at[1].mean == 0.5


# --------------------------------------------------------------------------------------- refusals


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """What a run without a checkpoint leaves behind."""
    folder = tmp_path / "former"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"""
        {{name: former, steps: 4, seed: 7, model: {MODEL}, algorithm: {{use: grpo}}, reward: {{use: exact}},
        training: {{use: torch, dtype: bfloat16}}, inference: {{use: torch, slots: 3}}, trackers: [],
        dataset: {{use: jsonl, path: {QUICKSTART / "train.jsonl"}}},
        sampling: {{max_tokens: 24, stop: ["${{oc.env:HOME}}"]}},
        evaluation: {{dataset: {{use: jsonl, path: {HELDOUT}}}, rows: 5, samples: 2, every: 2,
            sampling: {{temperature: 0.0, max_tokens: 20}}}}}}
    """)
    return folder


@pytest.mark.parametrize(
    ("source", "changes", "overrides", "message"),
    [
        ("{tmp}", {}, [], r"neither a run \(no config.yaml\) nor a model \(no config.json\)"),
        (MODEL, {"dataset": None}, [], "no held-out rows: give `--dataset FILE.jsonl`"),
        (MODEL, {"reward": None}, [], "no reward to score the answers: give `--reward NAME`"),
        (MODEL, {"dataset": "jsonnl"}, [], "neither a file nor a dataset component; did you mean 'jsonl'"),
        (MODEL, {"dataset": "jsonl"}, [], "evaluation.dataset.path: this key is required"),
        (MODEL, {"version": "3"}, [], "is not a run's folder"),
        (MODEL, {}, ["dataset.path=x"], "write evaluation.dataset.path=x"),
        (MODEL, {}, ["inference.slotz=2"], "did you mean 'slots'"),
        (MODEL, {"n": 0}, [], "evaluation.samples: .*>= 1; found 0"),
        ("{run}", {}, [], "has no checkpoint; `--version 0` evaluates the model it started from"),
        ("{run}", {"version": "40"}, [], "no checkpoint 'step-000040' in .*; checkpoints: none"),
        ("{run}", {"version": "best"}, [], "no checkpoint 'best'"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    source: str, changes: dict[str, Any], overrides: list[str], message: str, run_folder: Path
) -> None:
    source = source.format(run=run_folder, tmp=run_folder.parent)
    changes = {"dataset": HELDOUT, "reward": "exact", **changes}
    with pytest.raises(ConfigError, match=message):
        compose_evaluation(source, EvaluationOptions(**changes), overrides)


def test_an_unknown_reward_or_model_is_refused() -> None:
    with pytest.raises(PluginError, match="did you mean 'exact'"):
        compose_evaluation(MODEL, EvaluationOptions(dataset=HELDOUT, reward="exakt"))
    options = EvaluationOptions(dataset=HELDOUT, reward="exact", out="x")
    found = problems(Assembly(compose_evaluation("./no/such/model", options)))
    assert [problem.message for problem in found] == ["no such folder: './no/such/model'"]


def test_an_adapter_that_no_engine_loads_and_a_damaged_checkpoint_are_refused(run_folder: Path) -> None:
    file = run_folder / "config.yaml"
    run = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(run | {"training": {**run["training"], "lora": {"adapter": "ad"}}}))
    with pytest.raises(ConfigError, match="began with the adapter 'ad', which no engine can load"):
        compose_evaluation(str(run_folder), EvaluationOptions(version="0"))
    file.write_text(yaml.safe_dump(run))
    for digest, fault in ((fingerprint_of(MODEL), ""), ("00", "the weights of .* changed after the start")):
        (run_folder / "fingerprints.json").write_text(json.dumps({"model": digest}))
        with pytest.raises(ConfigError, match=fault) if fault else nullcontext():
            compose_evaluation(str(run_folder), EvaluationOptions(version="0"))
    checkpoint = run_folder / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text('{"kernel.json": "00"}')
    (checkpoint / "kernel.json").write_text("{}")
    with pytest.raises(ConfigError, match="is damaged"):
        compose_evaluation(str(run_folder), EvaluationOptions(version="2"))


def test_a_run_says_how_its_checkpoints_are_evaluated(run_folder: Path) -> None:
    options = EvaluationOptions(version="0", max_tokens=30)
    composed = compose_evaluation(str(run_folder), options, ["inference.slots=8"])
    config = composed.config
    assert (config.name, config.steps, config.seed, config.model) == ("evaluate-former", 0, 7, MODEL)
    assert {"use": "frozen", "dtype": "bfloat16"}.items() <= msgspec.to_builtins(config.training).items()
    assert msgspec.to_builtins(config.inference)["slots"] == 8
    assert config.dataset == (evaluation := config.evaluation).dataset  # type: ignore[union-attr]
    assert evaluation is not None
    assert (evaluation.rows, evaluation.samples, evaluation.keep_answers) == (5, 2, True)
    assert evaluation.sampling == config.sampling
    assert (config.sampling.temperature, config.sampling.max_tokens) == (0.0, 30)
    assert "at temperature 0 the 2 answers to a row are identical" in composed.notices


def test_options_replace_the_values_of_the_run(run_folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "own.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 9)
    options = EvaluationOptions(
        version="0", dataset=str(rows), reward="math", n=4, temperature=0.5, inference="mock", out="there"
    )
    config = compose_evaluation(str(run_folder), options, ["evaluation.sampling.top_p=0.9"]).config
    assert config.evaluation is not None
    assert (config.evaluation.rows, config.evaluation.samples) == (None, 4)
    assert config.evaluation.sampling is not None
    assert (config.evaluation.sampling.temperature, config.evaluation.sampling.top_p) == (0.5, 0.9)
    assert (config.evaluation.sampling.max_tokens, config.out) == (20, "there")
    assert (config.inference.use, config.reward and config.reward.use) == ("mock", "math")


def test_a_run_without_a_step_needs_an_evaluation() -> None:
    overrides = ["steps=0", "evaluation=null", "training=frozen"]
    found = problems(Assembly(compose(QUICKSTART / "run.yaml", overrides)))
    assert [(problem.path, problem.message) for problem in found if problem.severity == "error"] == [
        ("steps", "is 0, and no `evaluation` samples answers: the run would do nothing")
    ]
    [found] = problems(Assembly(compose(QUICKSTART / "run.yaml", ["training=frozen", "out=x"])))
    assert found.message == "'frozen' trains nothing, but steps is 200; expected `steps: 0`"


# ------------------------------------------------------------------------------------- whole runs


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_answers_are_those_that_transformers_gives(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in Path(HELDOUT).read_text().splitlines()[:12]]
    (tmp_path / "reward.py").write_text(
        "def score(prompt, completion, answer, id):\n"
        "    assert id != 'heldout-0003', 'not this one'\n"
        "    return {'reward': 2.0 * (completion == answer) - 0.5, 'accuracy': completion == answer}\n"
    )
    out = tmp_path / "out"
    done = stretto(
        *("evaluate", MODEL, "--dataset", HELDOUT, "--rows", "12", "--n", "2", "--temperature", "0"),
        *("--reward", "function", f"reward.function={tmp_path}/reward.py:score", "--max-tokens", "12"),
        *("--out", str(out), "--json", str(tmp_path / "figures.json")),
        *("inference.slots=16", "inference.context_length=64"),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    expected = _greedy([row["prompt"] for row in rows])
    texts = [text for text, _ in expected]
    kept = [json.loads(line) for line in (out / "answers/step-000000.jsonl").read_text().splitlines()]
    assert [(line["row"], line["sample"]) for line in kept] == [
        (row, sample) for row in range(12) if row != 3 for sample in range(2)
    ]
    assert [line["completion"] for line in kept] == [texts[line["row"]] for line in kept]
    assert [line["prompt"] for line in kept] == [rows[line["row"]]["prompt"] for line in kept]
    right = [float(texts[row] == rows[row]["answer"]) for row in range(12) if row != 3]
    assert 0 < sum(right) < 11
    cut = [float(not ended) for row, (_, ended) in enumerate(expected) if row != 3]
    assert 0 < sum(cut) < 11
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures == summary_of(out)["result"]
    assert figures["avg"]["mean"] == figures["pass_at"]["2"]["mean"] == pytest.approx(sum(right) / 11)
    assert figures["reward"]["mean"] == pytest.approx(2 * sum(right) / 11 - 0.5)
    assert (figures["rows"], figures["failed"], figures["samples"]) == (11, 1, 22)
    assert figures["truncated"] == pytest.approx(sum(cut) / 11)
    assert figures["tokens_per_s"] > 0
    text = " ".join(done.stdout.split())
    assert f"avg@2 (accuracy) {figures['avg']['mean']:.4f} ± {figures['avg']['ci95']:.4f}" in text
    assert "1 x not evaluated: begun 3 times; at last RewardError: reward raised AssertionError" in text
    assert (summary_of(out)["checkpoints"], summary_of(out)["problems"]) == ([], [])


def _greedy(prompts: list[str]) -> list[tuple[str, bool]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    answers: list[tuple[str, bool]] = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
        ended = bool(out[-1] == tokenizer.eos_token_id)
        answers.append((tokenizer.decode(out, skip_special_tokens=True), ended))
    return answers


@pytest.mark.slow
def test_no_row_with_a_result_is_a_failure(tmp_path: Path, tiny_models: Callable[[str], Path]) -> None:
    (tmp_path / "reward.py").write_text(
        "def score(prompt, completion):\n"
        "    if completion != '0':  # the answer that a reward is tried on before the run\n"
        "        raise ValueError('never')\n"
        "    return 0.0\n"
    )
    done = stretto(
        *("evaluate", tiny_models("llama"), "--dataset", HELDOUT, "--inference", "mock", "--rows", "3"),
        *("--reward", "function", f"reward.function={tmp_path}/reward.py:score", "--out", tmp_path / "out"),
    )
    assert done.returncode == 1
    assert "3 x not evaluated: begun 3 times; at last RewardError: reward raised ValueError: n" in done.stderr


def held_out(tmp_path: Path, every: int, rows: int, samples: int) -> tuple[str, ...]:
    return (
        *("evaluation.dataset.use=jsonl", f"evaluation.dataset.path={tmp_path}/rows.jsonl"),
        *(f"evaluation.every={every}", f"evaluation.rows={rows}", f"evaluation.samples={samples}"),
    )


def assert_evaluated(run: Any, versions: list[int]) -> None:
    """Every evaluation was done once, in order, with a result for every row: each of its own version, or the
    kernel had refused it."""
    summary = run.summary()
    assert [each["version"] for each in summary["evaluation"]] == versions
    assert [each["failed"] for each in summary["evaluation"]] == [0] * len(versions)
    assert sorted(line["step"] for line in run.evaluations()) == versions
    for version, line in zip(versions, run.evaluations(), strict=True):
        assert line["evaluation/samples"] == summary["evaluation"][versions.index(version)]["samples"]


@in_simulation
def test_evaluations_beside_training_are_each_of_their_version(start: Any, tmp_path: Path) -> None:
    turns = f"workflow.timeout_s={patience(5)}"  # of half a second
    run = start("steps=12", "inference.tokens_per_s=1500", turns, *held_out(tmp_path, 3, 20, 2))
    run.assert_completed(12)
    assert_evaluated(run, [0, 3, 6, 9, 12])
    lent = [each for each in run.log() if each["event"] == "engines lent" and each["version"] == 6]
    assert len([each for each in lent if each["workers"]]) > 1  # training had its turns in between


@in_simulation
def test_the_checkpoint_of_the_best_evaluation_survives(start: Any, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "evaluated = []\n"
        "def score(prompt, completion, held_out=False):\n"
        "    if held_out:\n"
        "        evaluated.append(prompt)\n"
        "    return float(held_out and (len(evaluated) - 1) // 4 == 1)\n"  # the second evaluation is right
    )
    rows = [{"prompt": f"{n}", "held_out": True} for n in range(4)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = start(
        *("steps=6", "checkpoint.every=0", "checkpoint.keep=1", "checkpoint.keep_best=true"),
        *held_out(tmp_path, 2, 4, 1),
        f"evaluation.dataset.path={tmp_path}/held_out.jsonl",
        *("reward.use=function", f"reward.function={tmp_path}/reward.py:score", "verifier.children=1"),
    )
    summary = run.assert_completed(6)
    assert [each["reward"] for each in summary["evaluation"]] == [0, 1, 0, 0]
    assert summary["best"] == {"version": 2, "accuracy": None, "reward": 1.0, "checkpoint": "step-000002"}
    kept = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert kept == ["step-000002", "step-000006"]
    assert "best checkpoint step-000002, held-out reward 1.000" in run.text()


@in_both_worlds
def test_evaluations_outlive_engine_and_kernel_and_hold_training_back(start: Any, tmp_path: Path) -> None:
    run = start(
        *("steps=7", "inference.replicas=2", "inference.tokens_per_s=600", "checkpoint.every=1"),
        *held_out(tmp_path, 2, 40, 4),  # an evaluation takes much longer than two steps
    )
    run.until_step(3)
    run.worker("inference-0").kill()  # the one that is lent
    run.until(lambda: "evaluations hold training back" in run.text())
    assert len(run.metrics()) == 5  # the next step would lead to version 6, and 4 waits for 2
    run.until(lambda: (run.folder / "checkpoints" / "step-000005").exists())
    state = json.loads((run.folder / "checkpoints" / "step-000005" / "kernel.json").read_text())
    evaluation = state["snapshot"]["evaluation"]
    assert (evaluation["round"]["version"], evaluation["due"]) == (2, [4])
    assert [note[0] for note in state["needed"]] == [2, 4]
    run.kill()
    resumed = start(resume=run)
    resumed.assert_completed(7)
    assert_evaluated(resumed, [0, 2, 4, 6, 7])
    [problem] = resumed.summary()["problems"]
    assert problem.startswith("evaluations held training back 1 times")


@pytest.mark.slow
def test_a_checkpoint_gives_the_answers_that_its_run_reported(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    former = stretto(
        *("run", str(QUICKSTART / "run.yaml"), f"out={run}", "steps=3", "queue.max_staleness=2"),
        *("training.dtype=bfloat16", "training.threads=1", "training.lr=0.002", "evaluation.rows=64"),
        *("evaluation.every=2", "evaluation.keep_answers=true", "inference.deterministic=true"),
        *("checkpoint.every=2", "checkpoint.keep=9", "samples.keep=none"),
    )
    assert former.returncode == 0, former.stderr + former.stdout
    assert SampleStore(run).count(SampleFilter(purpose="train")) == 0
    assert summary_of(run)["problems"] == []
    reported = {each["version"]: each["accuracy"] for each in summary_of(run)["evaluation"]}
    assert list(reported) == [0, 2, 3]
    texts = [[each.completion for each in answers_in(run, version)] for version in reported]
    # Answers of another version would show.
    assert all(one != other for one, other in itertools.pairwise(texts))
    for version, accuracy in reported.items():
        done = stretto("evaluate", str(run), "--version", str(version), "--out", str(out / str(version)))
        assert done.returncode == 0, done.stderr + done.stdout
        assert summary_of(out / str(version))["result"]["avg"]["mean"] == accuracy
        assert answers_in(run, version) == answers_in(out / str(version), 0)
        written = (out / str(version) / f"answers/step-{version:06d}.jsonl").read_text().splitlines()
        assert {json.loads(line)["version"] for line in written} == {version}


def answers_in(folder: Path, version: int) -> list[KeptAnswer]:
    """The kept answers of a version, but for who gave them and under which number."""
    kept = read_answers(SampleStore(folder), version, texts=True)
    assert [(each.row, each.sample) for each in kept] == [(row, 0) for row in range(64)]
    assert all(each.columns is not None and each.columns.keys() == {"id", "answer"} for each in kept)
    return [msgspec.structs.replace(each, version=0, engine="") for each in kept]
