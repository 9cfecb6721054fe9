"""Run files: what is read, merged, typed and refused, and with which words."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import Composed, compose, compose_mapping
from stretto.assembly.plugins import Plugins
from stretto.assembly.sections import FOREIGN_KEYS
from stretto.assembly.worker_numbers import WorkerNumbers
from stretto.cli.make.schema import Field, fields_of, json_schema
from stretto.cli.start.checks import problems
from stretto.cli.start.describe import describe
from stretto.component import Kind
from stretto.config import RunConfig
from stretto.engine import Sampling
from stretto.errors import ConfigError, PluginError

RUN = """\
name: demo
seed: 3
algorithm: {use: grpo, group_size: 4}
training:
  use: torch
  lr: 3e-4
inference: mock
reward: exact
dataset: {use: jsonl, path: rows.jsonl}
queue: {batch_size: 8, max_staleness: 1}
steps: 5
"""
MODEL, MOCK = "model=model", "training=mock"
HELD_OUT = "evaluation.dataset={use: jsonl, path: rows.jsonl}"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    row = '{"prompt": "1+1=", "answer": "2", "chosen": "2", "rejected": "3"}\n'
    (tmp_path / "rows.jsonl").write_text(row * 8)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\2" + 7 * b"\0" + b"{}")
    quickstart = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
    shutil.copy(quickstart / "tokenizer.json", tmp_path / "model")
    (tmp_path / "empty.py").touch()
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def refused(file: Path, *overrides: str) -> str:
    with pytest.raises((ConfigError, PluginError)) as caught:
        compose(file, overrides)
    return str(caught.value)


def complaints(composed: Composed, severity: str = "error") -> list[str]:
    found = problems(Assembly(composed))
    return [f"{each.path}: {each.message}" for each in found if each.severity == severity]


def plain(composed: Composed) -> object:
    return msgspec.to_builtins(composed.config)


# ------------------------------------------------------------------------------------ what is read


def test_sections_are_the_structs_of_the_chosen_components(run_file: Path) -> None:
    config = compose(run_file).config
    assert type(config.training).__name__ == "TorchTrainingConfig"
    assert config.training.lr == 3e-4
    assert config.inference.use == "mock"  # short for {use: mock}
    assert config.algorithm.group_size == 4  # type: ignore[attr-defined]
    assert config.workflow.use == "single_turn"  # a default
    assert config.dataset.path == str(run_file.parent / "rows.jsonl")  # type: ignore[attr-defined]


def test_an_evaluation_samples_as_training_does_but_for_what_it_says(run_file: Path) -> None:
    overrides = [HELD_OUT, "sampling={max_tokens: 7, stop: [x]}", "evaluation.sampling.temperature=0"]
    evaluation = compose(run_file, overrides).config.evaluation
    assert evaluation is not None
    assert evaluation.sampling == Sampling(max_tokens=7, stop=("x",), temperature=0.0)


@pytest.mark.parametrize("override", ["training=mock", "training.use=mock"])
def test_swapping_a_component_leaves_out_the_keys_of_the_former(run_file: Path, override: str) -> None:
    composed = compose(run_file, [override, "training.seconds_per_step=0.1"])
    assert composed.config.training.use == "mock"
    run_file.write_text(RUN.replace("lr: 3e-4", "lr: 3e-4\n  clip_norm: 0.5"))
    composed = compose(run_file, [override])
    assert composed.notices == (f"training: 'mock' does not use clip_norm of {run_file}",)
    run_file.write_text(RUN.replace("lr: 3e-4", "lr: 3e-4\n  clipnorm: 0.5"))
    assert "unknown key 'clipnorm'" in refused(run_file, override)  # which no component ever had


def test_a_mapping_swaps_a_component_as_its_bare_name_does(run_file: Path) -> None:
    run_file.write_text(RUN.replace("reward: exact", "reward: {use: function, function: rows.py:score}"))
    expected = compose(run_file, ["reward=math", "reward.timeout_s=9"])
    composed = compose(run_file, ["reward={use: math, timeout_s: 9}"])
    assert plain(composed) == plain(expected)
    assert composed.notices == expected.notices
    assert composed.notices == (f"reward: 'math' does not use function of {run_file}",)
    wrong = refused(run_file, "reward={use: math, function: rows.py:score}")  # it was asked for here
    assert "reward.function: unknown key 'function'" in wrong


def test_null_takes_a_section_out(run_file: Path) -> None:
    assert compose(run_file, ["reward=null"]).config.reward is None
    run_file.write_text(RUN.replace("reward: exact", "reward: null"))
    assert compose(run_file, ["reward=exact"]).components["reward"].name == "exact"
    assert compose(run_file, ["inference=null"]).components["inference"].name == "torch"  # the default


def test_a_section_with_use_takes_a_bare_name_wherever_it_stands(run_file: Path) -> None:
    def correction(*overrides: str) -> dict[str, object]:
        composed = compose(run_file, overrides)
        assert isinstance(composed.document["algorithm"]["correction"], dict)
        return msgspec.to_builtins(composed.config.algorithm)["correction"]

    assert correction("algorithm.correction=none")["use"] == "none"
    run_file.write_text(RUN.replace("group_size: 4", "group_size: 4, correction: token_tis"))
    short = correction()
    assert short["use"] == "token_tis"
    assert correction("algorithm.correction.cap=3") == {**short, "cap": 3.0}


def test_a_composed_run_can_be_composed_again(run_file: Path, tmp_path: Path) -> None:
    composed = compose(run_file, [HELD_OUT])
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(composed.config)))
    assert plain(compose_mapping(sent)) == plain(composed)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dict(composed.document)))
    assert plain(compose(tmp_path / "config.yaml")) == plain(composed)


def test_secrets_of_the_environment_are_used_and_not_written(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_TOKEN", "hunter2")
    run_file.write_text(
        RUN.replace("name: demo", "name: demo\nout: /x/${oc.env:ACME_TOKEN}/${name}")
        + "sampling: {stop: ['${oc.env:ACME_TOKEN}', end]}\n"
    )
    composed = compose(run_file)
    assert composed.config.out == "/x/hunter2/demo"
    assert composed.config.sampling.stop == ("hunter2", "end")
    written = json.dumps(dict(composed.document))
    assert "hunter2" not in written
    assert "${oc.env:ACME_TOKEN}" in written
    again = run_file.with_name("config.yaml")
    again.write_text(yaml.safe_dump(dict(composed.document)))
    assert compose(again).config.out == "/x/hunter2/demo"


def test_keys_that_refer_to_another_key_are_known(run_file: Path) -> None:
    overrides = ("steps=9", "queue.max_failures=${steps}", "checkpoint.keep=2")
    overrides += ("checkpoint.every=${.keep}", "name=a-${steps}")
    composed = compose(run_file, overrides)
    assert composed.document["queue"]["max_failures"] == 9
    # Not the name, which only contains a reference.
    assert dict(composed.references) == {"queue.max_failures": "${steps}", "checkpoint.every": "${.keep}"}


def test_paths_are_looked_up_from_the_working_directory_then_beside_the_file(
    run_file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("cwd")
    monkeypatch.chdir(elsewhere)
    assert compose(run_file).config.dataset.path == str(run_file.parent / "rows.jsonl")  # type: ignore[attr-defined]
    (elsewhere / "rows.jsonl").write_text("{}\n")
    assert compose(run_file).config.dataset.path == str(elsewhere / "rows.jsonl")  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["hunter2", "q7'\\x", "913"])
@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("steps=${oc.env:TOK}", "override steps: expected int, got str; found '${oc.env:TOK}'"),
        ("bus.url=x://${oc.env:TOK}@h", "found 'x://<login>@h'"),
        ("dataset.path=${oc.env:TOK}/rows", "no such file or folder: '${oc.env:TOK}/rows'"),
        ("plugins=['${oc.env:TOK}.py']", "no such file or folder: '${oc.env:TOK}.py'"),
        ("reward=${oc.env:TOK}", "no reward '${oc.env:TOK}'"),
        ("trackers=[{use: '${oc.env:TOK}'}]", "no tracker '${oc.env:TOK}'"),
        ("training.dtype=${oc.env:TOK}", "found '${oc.env:TOK}'"),
        ("training.lr=${oc.decode:${oc.env:TOK}x}", "training.lr"),
    ],
)
def test_no_refusal_shows_a_value_of_the_environment(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, value: str, override: str, found: str
) -> None:
    monkeypatch.setenv("TOK", value)
    message = refused(run_file, override).replace('"', "'")
    assert found in message
    assert value not in message
    assert repr(value)[1:-1] not in message


def test_a_component_that_refuses_shows_no_value_of_the_environment(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOK", "hunter2")
    (run_file.parent / "hunter2.jsonl").write_text("no json\n")
    composed = compose(run_file, ["dataset.path=${oc.env:TOK}.jsonl"])
    with pytest.raises(ConfigError, match=r"\$\{oc.env:TOK\}.jsonl") as caught:
        Assembly(composed, folder="").make("dataset")
    assert "hunter2" not in str(caught.value)
    assert composed.explain(ValueError("hunter2 is wrong"), Path("log")).startswith(
        "ValueError: ${oc.env:TOK} is wrong"
    )


# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("depth", [300, 3000])
def test_a_file_that_is_nested_too_deeply_is_one_error(run_file: Path, depth: int) -> None:
    for nested in ("[" * depth + "]" * depth, "{a: " * depth + "1" + "}" * depth):
        run_file.write_text(f"{RUN}out: {nested}\n")
        assert re.match(r".*(nested too deeply|expected str)", refused(run_file))
        run_file.write_text(RUN)
        assert re.match(r".*(nested too deeply|expected str)", refused(run_file, f"out={nested}"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("queue.max_stalenes=3", ["override queue.max_stalenes", "did you mean 'max_staleness'?"]),
        ("queue.max_staleness=-1", ["queue.max_staleness", "int >= 0", "found -1"]),
        ("seed=abc", ["override seed", "expected int, got str", "found 'abc'"]),
        ("steps=null", ["steps", "expected int", "found None"]),
        ('name="x\\n"', ["override name: expected at most 100 letters, digits, `-` and `_`"]),
        ('reward={use: function, function: "r.py:f\\n"}', ["reward.function: expected `file.py:function`"]),
        ("name='a b'", ["override name: expected at most 100 letters, digits, `-` and `_`", "found 'a b'"]),
        ("algorithm.use=gpro", ["no algorithm 'gpro'", "did you mean 'grpo'?", "installed: cispo, dapo, d"]),
        ("algorithm.use=GRPO", ["no algorithm 'GRPO'", "did you mean 'grpo'?"]),
        ("plugins=[empty.py]", ["empty.py' is not a plugin: it has no function marked `@hookimpl`"]),
        ("algorithm.correction.use=tis", ["algorithm.correction.use", "token_tis", "found 'tis'"]),
        ("algorithm.correction=tis", ["algorithm.correction.use", "token_tis", "found 'tis'"]),
        ("dataset.path=nowhere.jsonl", ["dataset.path", "no such file or folder: 'nowhere.jsonl'"]),
        ("training=[1]", ["override training: expected a mapping of keys, found [1]"]),
        ("groups=3", ["override groups: expected a mapping of names, found 3"]),
        ("training.dtype=float23", ["expected one of bfloat16, float32", "did you mean 'float32'?"]),
        ("inference={use: vllm, urls: [here]}", ["inference.urls.0: expected `http://host:port` without a"]),
        ("trackers=[1]", ["trackers.0", "expected a name or a mapping with `use`, found 1"]),
        ("bus.url='nats://a:1,here'", ["bus.url: expected `nats://host:4222`", "found 'nats://a:1,here'"]),
        ("bus.listen=0.0.0.0:x", ["bus.listen: expected an address such as `0.0.0.0:4222`"]),
        ("bus.replicas=3", ["bus: replicas 3 needs a cluster"]),
        ("bus.replicas=6", ["bus.replicas: expected int <= 5"]),
        ("bus={url: 'nats://a:1', listen: 0.0.0.0}", ["bus: listen and address are for the bundled server"]),
        ("bus={url: 'nats://a:1,tls://b:1'}", ["bus: url has servers with tls:// and servers with nats://"]),
        ("bus={url: 'nats://a:1', tls: {}}", ["bus: tls needs a url in which every server has tls://"]),
        ("bus.address=here", ["bus: address needs listen"]),
        ("bus={url: 'tls://a:1', tls: {key: run.yaml}}", ["bus.tls: certificate and key go together"]),
        ("justaword", ["override 'justaword'", "dotted.key=value; write no spaces around ="]),
        ("run.yaml", ["not of the form dotted.key=value; the run file comes before the overrides"]),
        ("queue.batch_size=010", ["YAML reads 010 as 8; write it without a leading 0"]),
        ("queue={batch_size: 1:30}", ["YAML reads 1:30 as 90"]),
        ("training.clip_norm=None", ["expected float | null, got str; found 'None'; write null"]),
        ("reward=r.py:score", ["'r.py:score' is a function; write reward: {use: function, function: r."]),
        ("name=echo a: b: c", ["override 'name=echo a: b: c'", "cannot be read as YAML", "name='\"…\"'"]),
        ("training.schedule=linear", ["training", "needs decay_steps"]),
        ("seed=99999999999999999999999", ["override seed: expected a whole number of at most 64 bits"]),
        ("training.lr=.inf", ["override training.lr: expected a finite number; found inf"]),
        ("training.betas=[.nan,0.9]", ["override training.betas.0: expected a finite number; found nan"]),
        ("training.learning_rate=1e-4", ["unknown key 'learning_rate'; did you mean 'training.lr'?"]),
        ("num_generations=4", ["unknown key 'num_generations'; did you mean 'algorithm.group_size'?"]),
        ("training.beta=[0.9,0.99]", ["unknown key 'beta'; did you mean 'betas'?"]),
        ("algorithm={group_size: 8, use: null}", ["algorithm.use: is missing; expected the name of an algo"]),
        ("name=no", ["name: expected str, got bool; found False; write the text in quotes, because YAML"]),
        ("name=7", ["name: expected str, got int; found 7; write the text in quotes"]),
        ("on_collapse=off", ["on_collapse: expected one of stop, warn; found False"]),
        ("reward=[exact, math]", ["override reward: expected a mapping", "`parts` of the reward `sum`"]),
        ("trackers[0]=wandb", ["a list is written as a whole, such as trackers=[…]"]),
        ("algorithm.kl=0.1", ["algorithm.kl: expected a mapping", "did you mean algorithm.kl.coef=0.1?"]),
        ("models.actor.gruop=x", ["models.actor.gruop: unknown key 'gruop'; did you mean 'group'?"]),
        ("groups.Critics.use=mock", ["cannot be the name of a worker group"]),
        ("groups.critics.slots=1", ["groups.critics.slots: unknown key 'slots'"]),
        ("training.cpu_offload=true", ["'cpu_offload' is gone; write `state: host`"]),
        ("model=${oc.env:NO_SUCH_VARIABLE}", ["override model: Environment variable 'NO_SUCH_VARIABLE'"]),
    ],
)
def test_refusals_name_place_value_and_what_would_do(run_file: Path, override: str, words: list[str]) -> None:
    message = refused(run_file, override)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps=1.5", "override steps: expected int, got float; found 1.5"),
        ("steps=-1", "override steps: expected int >= 0; found -1"),
        ("seed=1.5", "override seed: expected int, got float; found 1.5"),  # by way of `steps`
        ("training.decay_steps=-2", "override training.decay_steps: expected int >= 0; found -2"),
        ("steps=0", "run.yaml:11: queue.batch_size: expected int >= 1; found 0, from ${steps}"),
    ],
)
def test_a_wrong_value_is_refused_where_it_is_written(run_file: Path, override: str, words: str) -> None:
    """Or with its own key, if the value suits the key that it comes from."""
    whole = RUN.replace("lr: 3e-4", "lr: 3e-4\n  decay_steps: ${steps}").replace("steps: 5", "steps: ${seed}")
    run_file.write_text(whole.replace("batch_size: 8", "batch_size: '${steps}'"))
    assert refused(run_file, override).removeprefix(f"{run_file.parent}/") == words


def test_a_run_of_no_steps_may_say_how_long_its_schedule_would_be(run_file: Path) -> None:
    run_file.write_text(RUN.replace("lr: 3e-4", "lr: 3e-4\n  schedule: linear\n  decay_steps: ${steps}"))
    assert complaints(compose(run_file, [MODEL, HELD_OUT, "steps=0"])) == []
    [wrong] = complaints(compose(run_file, [MODEL, HELD_OUT, "training.decay_steps=0"]))
    assert wrong.startswith("training.decay_steps: is 0")


@pytest.mark.parametrize(
    ("text", "override", "words"),
    [
        (RUN.replace("lr:", "lrr:"), "", "run.yaml:6: training.lrr: unknown key 'lrr'; did you mean 'lr'?"),
        (RUN.replace("steps: 5\n", ""), "", "steps: this key is required but missing"),
        (RUN.replace("seed: 3", "seed: ${sed}"), "", "sed"),
        ("a: [1", "", "cannot be read as YAML"),
        ("- 1", "", "expected a mapping of keys, found a list"),
        (b"steps: 1\nname: caf\xe9\n", "", "run.yaml:2: not UTF-8 (byte 0xe9); save the file as UTF-8"),
        (
            f"{RUN}trackers: [wandb]\n",
            "trackers.0=trackio",
            "trackers: is a list, which an override replaces as a whole",
        ),
    ],
)
def test_refusals_of_a_file_name_lines(run_file: Path, text: str | bytes, override: str, words: str) -> None:
    run_file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert words in refused(run_file, *filter(None, [override]))


def test_a_run_file_that_is_none_is_named(run_file: Path) -> None:
    assert "no run file" in refused(run_file.with_name("absent.yaml"))
    assert re.search(
        r"is a folder; expected a run file; did you mean '.*run\.yaml'\?", refused(run_file.parent)
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "model: required by the training engine 'torch'; give a local folder or a hub id"),
        (["models.actor.path=model"], "model: required by the training engine 'torch'"),
        ([MOCK, "sampling.temperature=0"], "greedy"),
        (["model=./nowhere"], "no such folder"),
        (["model=examples/quickstart/mdoel"], "no such folder"),
        (["model=/no/such"], "no such folder"),
        (["model=empty"], "no config.json"),
        ([MODEL, "groups.critics.use=mock"], "groups.critics: no model is in this group"),
        ([MODEL, "models.critc.group=training"], "models.critc: the algorithm has no model 'critc'"),
        ([MODEL, "models.actor.group=trainin"],
         "models.actor.group: no worker group 'trainin'; did you mean 'training'?"),
        ([MOCK, "training.processes=64"], "32 sequences for the 64 data-parallel ranks"),
        ([MODEL, "models.actor.path=nowhere/at/all"], "models.actor.path: no such folder: 'nowhere/at/all'"),
        ([MODEL, "algorithm.kl.coef=1", "models.reference.path=other"],
         "it has a vocabulary of 99 tokens, the run's model of 100"),
        ([MOCK, "algorithm=reward_model", HELD_OUT], "'reward', which is not a policy"),
    ],
)  # fmt: skip
def test_runs_that_cannot_work_are_refused(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], words: str
) -> None:
    monkeypatch.chdir(run_file.parent)
    Path("model/config.yaml").touch()
    Path("model/config.json").write_text('{"vocab_size": 100}')
    Path("empty").mkdir()
    shutil.copytree("model", "other")
    Path("other/tokenizer.json").unlink()
    Path("other/config.json").write_text('{"text_config": {"vocab_size": 99}}')
    assert words in complaints(compose(run_file, overrides))[0]


def test_whatever_cannot_work_is_said_at_once(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_file.parent)
    Path("model/config.yaml").touch()
    faulty = ("algorithm.correction.use=none", "algorithm.minibatches=3", "sampling.top_p=0.9")
    said = complaints(compose(run_file, [MOCK, *faulty, "out=model"]))
    expected = (
        "stale samples need a correction",
        "queue.batch_size: 8 groups cannot be split into the 3 minibatches of call 'train(actor)'; "
        "expected a multiple of 3",
        "need engines that agree on what tokens are drawn from",
        "already holds a run; choose another folder, or resume it: `stretto resume ",
    )
    assert {next((words for words in expected if words in each), each) for each in said} == {*expected}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([MODEL], []),
        ([MOCK, "out=new"], []),
        (["model=acme-labs/some-model-0.5B"], ["model: ", "not verified"]),
        ([MOCK, "training.threads=500"], ["30 times slower"]),
        ([MOCK, "algorithm=dpo", "models.reference.lr=0.1"], ["models.reference.lr: has no effect"]),
    ],
)
def test_runs_that_may_work_are_warned_of(run_file: Path, overrides: list[str], words: list[str]) -> None:
    composed = compose(run_file, overrides)
    assert complaints(composed) == []
    warnings = "\n".join(complaints(composed, "warning"))
    assert all(word in warnings for word in words), warnings


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (b"\n\n", "dataset is empty"),
        (b'{"question": "?"}\n', "no column 'prompt'; its columns: question"),
        (b'{"prompt": "\xff"}\n', "rows.jsonl:1: not a JSON object in UTF-8"),
        (b'{"prompt": 5, "answer": "5"}\n', "the first row's prompt: expected text or chat messages"),
    ],
)
def test_datasets_are_opened(run_file: Path, rows: bytes, words: str) -> None:
    (run_file.parent / "rows.jsonl").write_bytes(rows)
    assert words in complaints(compose(run_file, [MOCK]))[0]


def test_a_function_that_a_user_writes_is_tried(run_file: Path) -> None:
    mine = run_file.with_name("mine.py")
    mine.write_text("import no_such_module\ndef score(prompt, completion): return 1.0\n")
    [wrong] = complaints(compose(run_file, [MOCK, "reward=function", f"reward.function={mine}:score"]))
    assert "reward 'function' of stretto" in wrong
    assert "raised ModuleNotFoundError: No module named 'no_such_module'" in wrong
    assert "mine.py:1)" in wrong


def test_a_key_that_is_gone_is_refused_with_what_to_write_instead(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead = {"training.rate": "write `training.lr`", "growth": "use `stretto scale`"}
    monkeypatch.setattr("stretto.assembly.sections.REMOVED_KEYS", instead)
    gone = "override training.rate: 'rate' is gone; write `training.lr`"
    assert refused(run_file, "training.rate=1") == gone
    run_file.write_text(f"{RUN}growth:\n  rollout: [1, 2]\n")
    assert refused(run_file) == f"{run_file}:12: growth: 'growth' is gone; use `stretto scale`"


def test_missing_gpus_concern_this_machine_only(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    composed = compose(run_file, [MOCK, "training.gpus=1", "inference.gpus=1"])
    assert complaints(composed) == []
    needed = "inference-0 needs 1 GPU (`gpus`); this machine has 1 GPU"
    [wrong] = complaints(composed, "environment")
    assert wrong == f"launcher: {needed}, and the workers placed before it leave too little of that"
    halves = (f"{role}.share=0.5" for role in ("training", "inference"))
    shared = compose(run_file, [MOCK, "training.gpus=1", "inference.gpus=1", *halves])
    assert complaints(shared, "environment") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "; this machine has no GPU" in complaints(composed, "environment")[0]


def test_workers_are_counted_by_role(run_file: Path) -> None:
    composed = compose(run_file, ["inference.replicas=2", "rollout.processes=3", "inference.threads=2"])
    workers = {worker.id: worker for worker in Assembly(composed).workers}
    assert list(workers) == [
        *("trainer-0", "inference-0", "inference-1"),
        *("rollout-0", "rollout-1", "rollout-2", "verifier-0"),
    ]
    assert workers["inference-1"].resources.threads == 2


def test_a_number_of_workers_has_the_place_that_set_it(run_file: Path, tmp_path: Path) -> None:
    composed = compose(run_file, ["rollout.processes=2"])
    WorkerNumbers(composed, tmp_path).change("rollout.processes", 3)  # as `stretto scale` does
    assembly = Assembly(composed, folder=tmp_path)
    assert assembly.numbers.in_force() == {
        "rollout.processes": (3, f"{tmp_path}/workers.json: rollout.processes")
    }
    assert assembly.composed.place("rollout.processes") == f"{tmp_path}/workers.json: rollout.processes"
    assert len([worker for worker in assembly.workers if worker.role == "rollout"]) == 3
    assert "rollout.processes is 3: " in describe(assembly)
    changed = compose(run_file, ["rollout.processes=4"])  # by a resume
    assert Assembly(changed, folder=tmp_path).config.rollout.processes == 4


def test_worker_groups_are_sections_of_their_own(run_file: Path) -> None:
    placed = ["groups.critics.use=mock", "groups.critics.processes=2", "models.actor.group=critics"]
    assembly = Assembly(compose(run_file, [*placed, "models.actor.lr=0.5", "model=model"]))
    where = assembly.placement
    assert list(where.groups) == ["critics"]
    assert where.lead.workers == ["trainer-critics-0", "trainer-critics-1"]
    assert [worker.id for worker in assembly.workers][:2] == where.lead.workers
    assert assembly.resources_of("trainer-critics-1") is where.lead.section
    again = compose(run_file, ["groups={critics: mock}", "models.actor.group=critics"])
    assert again.components["groups.critics"].name == "mock"
    assert again.document["groups"]["critics"]["use"] == "mock"


# -------------------------------------------------------------------------------- how it looks


def test_the_keys_of_other_projects_stand_for_keys_that_exist() -> None:
    plugins = Plugins()
    structs = [RunConfig, *(plugins.get(line.kind, line.name).config for line in plugins.listing())]
    known = {name for struct in structs for field in fields_of(struct) for name in field.name.split(".")}
    assert [path for path in FOREIGN_KEYS.values() if not set(path.split(".")) <= known] == []


def test_the_schema_accepts_what_compose_accepts_and_no_more(run_file: Path) -> None:
    schema = json_schema(Plugins())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    plain = yaml.safe_load(RUN.replace("3e-4", "0.0003"))
    composed = compose(run_file, [HELD_OUT])
    groups: dict[str, Any] = {"critics": {"use": "torch"}, "more": "mock"}
    form = {"reward": {"use": "format", "tags": ["answer"]}}
    variants = {"base": {"weight": 3}, "short": {"sampling": {"max_tokens": 8}}, "form": form}
    parts = {"right": "exact", "short": {"use": "length", "limit": 4, "buffer": 4}}
    for right in (
        plain,
        plain | {"groups": groups, "models": {"actor": {"group": "more"}}},
        plain | {"algorithm": {"use": "grpo", "correction": "none"}},
        plain | {"variants": variants},
        plain | {"reward": {"use": "sum", "parts": parts, "weights": {"short": 0.25}}},
        json.loads(json.dumps(dict(composed.document))),
    ):
        assert list(validator.iter_errors(right)) == []
    for wrong in (
        {"stepz": 1},
        {"steps": -1},
        {"training": {"use": "torch", "slots": 1}},
        {"training": {"use": "gpt"}},
        {"evaluation": {"dataset": {"use": "jsonl"}}},
        {"groups": {"critics": {"use": "torch", "slots": 1}}},
        {"algorithm": {"use": "grpo", "correction": "tis"}},
        {"variants": {"base": {"share": 3}}},
        {"reward": {"use": "sum", "parts": {"a": {"use": "math", "colum": 1}}}},
    ):
        assert not validator.is_valid(plain | wrong), wrong
    del plain["dataset"]
    assert not validator.is_valid(plain)
    definition = schema["$defs"]["algorithm_grpo"]["properties"]["eps_clip"]
    assert definition["description"].startswith("Clip range of the ratio")


def test_every_field_of_every_component_has_a_meaning() -> None:
    plugins = Plugins()
    for line in plugins.listing():
        for field in fields_of(plugins.get(line.kind, line.name).config):
            assert field.meaning, f"{line.kind} {line.name}: {field.name}"


def test_fields_are_shown_with_type_default_and_meaning_also_those_of_nested_structs() -> None:
    def fields(kind: Kind, name: str) -> dict[str, Field]:
        return {field.name: field for field in fields_of(Plugins().get(kind, name).config)}

    grpo = fields("algorithm", "grpo")
    assert (grpo["group_size"].type, grpo["group_size"].default) == ("int >= 1", "8")
    assert (grpo["c_clip"].type, grpo["use"].default) == ("float > 1 | null", "required")
    assert "Dual clip" in grpo["c_clip"].meaning
    assert "correction.use" in grpo
    assert "pools.NAME.max" in fields("dataset", "mix")
    assert "mcp[].url" in fields("workflow", "tool_use")


def test_the_example_files_are_what_the_schema_says() -> None:
    examples = Path(__file__).parents[2] / "examples"
    validator = jsonschema.Draft202012Validator(json_schema(Plugins()))
    files = [path for folder in ("", "quickstart/", "vision/") for path in examples.glob(f"{folder}*.yaml")]
    assert len(files) >= 2
    for file in files:
        validator.validate(yaml.safe_load(file.read_text()))


def test_the_gsm8k_example_finds_its_rows_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.chdir(tmp_path)
    config: Any = compose(examples / "gsm8k_grpo.yaml", []).config
    assert config.dataset.path == str(examples / "gsm8k" / "train.jsonl")
