"""What `check` tries before a run starts, and how a run ends whose plugin is wrong all the same."""

import importlib.util
import json
import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import datasets
import pytest

from commands import stretto
from fixture_types import Start
from kernel_setup import write_run
from patience import patience
from plugin_files import write_plugin
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import compose
from stretto.assembly.contracts import expect_contract
from stretto.bus import probe
from stretto.bus.probe import faults_of_bus
from stretto.bus.server import NatsServer, free_port
from stretto.cli.start import checks, row_check
from stretto.cli.start.check_rows import dataset_problems, leaked_rows
from stretto.cli.start.checks import problems
from stretto.cli.start.commands import check
from stretto.cli.start.describe import describe
from stretto.config import BusConfig
from stretto.dataset import Dataset
from stretto.engine import TrainingEngine
from stretto.errors import BusError, ConfigError, ContractError, PluginError, RewardError
from stretto.machine.child_process import last_line, run_child
from stretto.tracker import Tracker
from stretto.training import config as training_config
from stretto.user_code.scoring import score_group
from worlds import in_both_worlds, in_simulation


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = write_run(tmp_path, algorithm={"use": "grpo", "group_size": 4}, queue={"batch_size": 2}, steps=5)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def found(file: Path, *overrides: str, severity: str = "error", starting: bool = True) -> dict[str, str]:
    composed = compose(file, [*overrides, f"out={file.parent}/out"])
    return {
        problem.path: problem.message
        for problem in problems(Assembly(composed), starting=starting)
        if problem.severity == severity
    }


def plugin(file: Path, kind: str, body: str) -> str:
    """Write a plugin beside a run file that offers `mine`, a component of a kind made by `make`; its file."""
    module = "engine" if kind in ("training", "inference") else kind
    return write_plugin(file.parent, kind, body, f"stretto.{module}.{kind.capitalize()}Config")


# ------------------------------------------------------------------------------------------ rewards


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("def score(completion, wrongname): return 1.0", "needs 'wrongname'"),
        ("def score(prompt, answer): return 1.0", "'answer' is a column of the row; name them"),
        ("def score(completions, **columns): return [1.0]", "returned 1 values for 4 completions"),
        ("def score(prompt, completion):\n    raise KeyError('boom')", "raised KeyError: 'boom' ({file}:2)"),
    ],
)
def test_a_reward_that_cannot_score_a_first_row_is_refused(run_file: Path, body: str, complaint: str) -> None:
    file = run_file.parent / "rewards.py"
    file.write_text(f"{body}\n")
    message = found(run_file, "reward.use=function", f"reward.function={file}:score")["reward"]
    assert "reward 'function' of stretto" in message
    assert "cannot score the first row of `dataset`" in message
    assert complaint.format(file=file) in message
    assert "wrongname" not in body or (f"{file}:1" in message and "its columns: answer" in message)


def test_a_reward_is_tried_on_held_out_rows_too(run_file: Path) -> None:
    (run_file.parent / "held.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n')
    held = f"evaluation={{dataset: {{use: jsonl, path: {run_file.parent}/held.jsonl}}}}"
    message = found(run_file, held)["reward"]
    assert "the first row of `evaluation.dataset`" in message
    assert "no column 'answer'; its columns: solution" in message


ROW = '{"prompt": "1+1=", "answer": "2"}'
MIX = "dataset={use: mix, parts: {a: {use: jsonl, path: rows.jsonl, prompt_column: q}}}"


@pytest.mark.parametrize(
    ("lines", "overrides", "key", "fault"),
    [
        (f"[{ROW}]", (), "dataset", "rows.jsonl:1: not a JSON object in UTF-8"),
        ('{"question": ""}', (), "dataset.prompt_column", "rows.jsonl:1: no column 'prompt'"),
        (ROW + '\n{"question": ""}', (), "dataset", "1 of 2 rows have no valid prompt"),
        (ROW, (MIX,), "dataset.parts.a.prompt_column", "part 'a': .*: no column 'q'"),
    ],
)
def test_a_mistake_in_the_dataset_is_one_message(
    run_file: Path, lines: str, overrides: tuple[str, ...], key: str, fault: str
) -> None:
    (run_file.parent / "rows.jsonl").write_text(lines + "\n")
    composed = compose(run_file, [*overrides, "queue.batch_size=1", f"out={run_file.parent}/out"])
    told = [
        each for each in problems(Assembly(composed)) if "prompt" in each.message or "row" in each.message
    ]
    assert [each.path for each in told] == [key]
    assert re.search(fault, told[0].message)
    assert "ConfigError" not in told[0].message


def test_the_key_that_an_override_keeps_is_told_with_its_line(run_file: Path) -> None:
    document = json.loads(run_file.read_text())
    document["dataset"]["prompt_column"] = "question"
    run_file.write_text(text := json.dumps(document, indent=1))
    (run_file.parent / "other.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    done = stretto("check", str(run_file), "dataset={use: jsonl, path: other.jsonl, chat: true}")
    line = 1 + text[: text.index("prompt_column")].count("\n")
    assert f"error: {run_file}:{line}: dataset.prompt_column: " in done.stderr
    assert "other.jsonl:1: no column 'question'" in done.stderr
    assert done.stderr.count("no column") == 1


HF, JSONL = "{{use: hf, path: d.parquet, split: '{}'}}", "{use: jsonl, path: d.jsonl}"


@pytest.mark.parametrize(
    ("train", "held_out", "rows", "told"),
    [
        (HF.format("train[:90%]"), HF.format("train[1790:]"), None, "rows 1,791 to 1,800 of .*d.parquet are"),
        (HF.format("train[:90%]"), HF.format("train[90%:]"), None, ""),
        (HF.format("train[:10]+train[60:]"), HF.format("train[5:60]"), None, "rows 6 to 10 of"),
        (HF.format("train[5:]"), HF.format("train"), 5, ""),
        ("{use: hf, path: d.jsonl, limit: 1000}", JSONL, None, "rows 1 to 1,000 of .*d.jsonl are held"),
        (f"{{use: mix, parts: {{a: {HF.format('train[:5]')}, b: {HF.format('train[8:]')}}}}}",
         f"{{use: mix, parts: {{c: {HF.format('train[4:9]')}}}}}", None, "rows 5 to 5 of .* rows 9 to 9 of"),
    ],
)  # fmt: skip
def test_rows_that_are_trained_and_held_out_are_told(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, train: str, held_out: str, rows: int | None, told: str
) -> None:
    monkeypatch.chdir(run_file.parent)
    monkeypatch.setattr("stretto.cli.start.check_rows._MAX_LEAK", 1.0)  # nothing is told by contents
    table = datasets.Dataset.from_list([{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(2000)])
    table.to_parquet("d.parquet")
    table.to_json("d.jsonl")
    evaluation = f"evaluation={{dataset: {held_out}, rows: {json.dumps(rows)}}}"
    assembly = Assembly(compose(run_file, [f"dataset={train}", evaluation]))
    read: dict[str, Any] = {}
    for path in ("dataset", "evaluation.dataset"):
        assert not [each for each in dataset_problems(assembly, path, read) if each.severity == "error"]
    found = [*leaked_rows(read)]
    assert bool(found) == bool(told)
    assert re.search(told, " ".join(each.message for each in found))


def test_columns_that_the_workflow_adds_are_not_missing(run_file: Path) -> None:
    """Of such a workflow nothing is scored: only the reward's parameters are looked at."""
    file = run_file.parent / "rewards.py"
    file.write_text("def score(completion, answer, turns):\n    raise KeyError('boom')\n")
    tools = run_file.parent / "tools.py"
    tools.write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    reward = ("reward.use=function", f"reward.function={file}:score", "sandbox=unsafe")
    used = (f"workflow={{use: tool_use, tools: ['{tools}:add']}}", *reward)
    assert "reward" not in found(run_file, *used)
    assert "needs 'turns'" in found(run_file, *reward)["reward"]


# ---------------------------------------------------------------------------------------- contracts


def takes_nothing(self: object) -> None: ...


def takes_all(self: object, *given: Any, **named: Any) -> None: ...


def takes_heat(self: object, batch: Any, loss: Any, heat: float) -> Any: ...


async def is_async(self: object, metrics: Any) -> None: ...


class _Engine:
    load = forward = weights = save = stop = takes_all


class _Tracker:
    start = step = evaluation = advice = samples = finish = takes_all


class _Rows:
    fingerprint = "one"
    __len__ = __getitem__ = takes_all


def variant(base: type, **members: Any) -> object:
    return type("Mine", (base,), members)()


@pytest.mark.parametrize(
    ("made", "contract", "fault"),
    [
        (variant(object, finish=_Tracker.finish), Tracker, "has no method 'start', and has no method 'step'"),
        (variant(_Tracker, step=takes_nothing), Tracker, r"step\(\), but stretto calls step\(metrics\)"),
        (variant(_Tracker, step=3), Tracker, "has 'step', which cannot be called"),
        (variant(_Rows, fingerprint=takes_nothing), Dataset, "method 'fingerprint'; expected an attribute"),
        (variant(_Rows, __getitem__=None), Dataset, "has no method '__getitem__'"),
        (variant(_Tracker, step=is_async), Tracker, "'step' as `async def`"),
        (variant(_Engine, train=takes_heat), TrainingEngine, r"calls train\(batch, loss, temperature=\)"),
    ],
)
def test_a_broken_contract_is_named(made: object, contract: type, fault: str) -> None:
    with pytest.raises(ContractError, match=f"^mine does not keep .*{contract.__name__}.*{fault}"):
        expect_contract(made, contract, "mine")


def test_a_property_is_not_computed_and_a_delegate_counts() -> None:
    class Slow(_Rows):
        @property
        def fingerprint(self) -> str:  # type: ignore[override]
            raise AssertionError("computed")

    class Delegate:
        def __getattr__(self, name: str) -> Any:
            return getattr(_Tracker(), name)

    expect_contract(Slow(), Dataset, "mine")
    expect_contract(Delegate(), Tracker, "mine")


MAKE = "class make:\n    def __init__(self, *given): pass\n    "
BROKEN = {
    "inference": "def make(config, context):\n    return Mine()\nclass Mine: pass",
    "training": f"{MAKE}pass",
    "workflow": f"{MAKE}async def run(self, prompt): ...",
    "tracker": f"{MAKE}def finish(self, summary): ...",
    "weights": "def make(config, context):\n    raise KeyError('boom')",
    "launcher": f"{MAKE}def check(self, jobs): return []",
}


def test_check_makes_every_component_and_names_what_each_lacks(run_file: Path) -> None:
    files = {kind: plugin(run_file, kind, body) for kind, body in BROKEN.items()}
    chosen = [f"{kind}.use=mine" for kind in BROKEN if kind != "tracker"]
    overrides = [f"plugins=[{','.join(files.values())}]", "trackers=[mine]", "model=null", *chosen]
    text = found(run_file, *overrides, starting=False)
    assert text["inference"].startswith("inference 'mine' of my_inference.py does not keep its contract, ")
    assert "has no method 'swap'" in text["inference"]
    assert f"({files['inference']}:3)" in text["inference"]
    assert "has no method 'save'" in text["training"]
    assert "calls run(prompt, session): too many positional arguments" in text["workflow"]
    assert "tracker 'mine' of my_tracker.py" in text["trackers.0"]
    assert "has no method 'step'" in text["trackers.0"]
    raised = f"raised KeyError: 'boom' ({files['weights']}:2)"
    assert text["weights"] == f"weights 'mine' of my_weights.py {raised}"
    assert "has no method 'launch'" in text["launcher"]


def test_two_trackers_need_two_folders(run_file: Path) -> None:
    text = found(run_file, "trackers=[wandb,wandb]")["trackers.1.folder"]
    assert text == "another tracker has the folder 'wandb' too; give each its own `folder`"
    two = "trackers=[wandb,{use: wandb, folder: mine}]"
    assert not any("trackers" in path for path in found(run_file, two))


@pytest.mark.parametrize(
    ("kind", "body", "fault"),
    [
        ("dataset", "def __len__(self): ...\n    def __getitem__(self, index): ...",
         "has no attribute 'fingerprint'"),
        ("algorithm", "models = {}\n    def calls(self): return []", "has no method 'keep'"),
        ("dataset",
         "fingerprint = 'x'\n    def __len__(self): return 1\n    def __getitem__(self, index): {}['a']",
         "dataset 'mine' of my_dataset.py raised KeyError: 'a' ({file}:5)"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_plugin_is_told_with_its_component_and_line(
    run_file: Path, kind: str, body: str, fault: str
) -> None:
    file = plugin(run_file, kind, MAKE + body)
    text = found(run_file, f"plugins=[{file}]", f"{kind}=mine")[kind]
    assert fault.format(file=file) in text
    assert text.startswith(f"{kind} 'mine' of my_{kind}.py ")


@pytest.mark.parametrize(
    ("hook", "fault"),
    [
        ("def stretto_rewardd():\n    yield",
         "there is no hook 'stretto_rewardd'; did you mean 'stretto_reward'? ({file}:3)"),
        ("def stretto_reward(config):\n    yield",
         "has no argument 'config' ({file}:3); stretto calls it without arguments"),
        ("def stretto_reward():\n    return Component('mine', None, RewardConfig, 'mine')",
         "returns a Component; expected it to yield each Component"),
    ],
)  # fmt: skip
def test_a_hook_that_is_none_is_refused_with_what_to_write(run_file: Path, hook: str, fault: str) -> None:
    file = run_file.parent / "mine.py"
    file.write_text(f"from stretto import Component, RewardConfig, hookimpl\n\n@hookimpl\n{hook}\n")
    with pytest.raises(PluginError, match=re.escape(fault.format(file=file))):
        compose(run_file, [f"plugins=[{file}]", "reward=mine"])


# ------------------------------------------------------------------------------------- rows and values


def test_a_run_whose_prompts_are_all_too_long_is_refused(run_file: Path) -> None:
    text = found(run_file, "dataset.max_prompt_tokens=3")["dataset.max_prompt_tokens"]
    assert text.startswith("is 3, but the prompts of all 4 rows are longer (the shortest has 4 tokens)")
    rows = run_file.parent / "rows.jsonl"
    rows.write_text(rows.read_text() + '{"prompt": "=", "answer": "2"}\n')
    assert found(run_file, "dataset.max_prompt_tokens=3") == {}


def test_odd_values_are_warned_of(run_file: Path) -> None:
    (run_file.parent / "held.jsonl").write_text('{"prompt": "7+1=", "answer": "8"}\n')
    held = f"evaluation={{every: 9, dataset: {{use: jsonl, path: {run_file.parent}/held.jsonl}}}}"
    engine = (*TORCH, "training.lr=1", "training.micro_batch_tokens=16")
    odd = ("queue.batch_size=8", "queue.max_staleness=50", "inference.slots=1", "sampling.max_tokens=32")
    text = found(run_file, held, *engine, *odd, severity="warning")
    assert "the dataset has 4 rows" in text["queue.batch_size"]
    assert text["queue.max_staleness"].startswith("is 50: tokens may be 50 train steps old")
    assert text["training.lr"].startswith("is 1: with AdamW")
    assert text["training.micro_batch_tokens"].startswith("is 16, but a sequence can have 36 tokens")
    assert "only its first and its last version" in text["evaluation.every"]
    assert "one after another" in text["inference.slots"]
    usual = ("training.lr=1e-4", "training.micro_batch_tokens=36", "inference.slots=2")
    fine = ("queue.batch_size=4", "queue.max_staleness=8", "evaluation.every=5")
    paths = found(run_file, held, *engine, *odd, *usual, *fine, severity="warning").keys()
    assert paths <= {"training.threads"}


# ------------------------------------------------------------------------------------ slips of a run file

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
TRAIN = f"path={MODEL.parent}/train.jsonl"
TORCH = (
    *(f"model={MODEL}", "training.use=torch", "inference.use=torch", "sampling.max_tokens=32"),
    "training.warmup_steps=0",
)
HELD = "evaluation={dataset: {use: jsonl, path: held.jsonl}, sampling: {temperature: 0}}"
SAME_ROWS = "evaluation.dataset.path=rows.jsonl"
ANSWER, STOP = "evaluation.sampling.max_tokens", "sampling.stop_token_ids=[3]"
PAIRS = f"dataset.path={MODEL.parent}/pairs.jsonl", "algorithm=dpo", "queue.batch_size=8"
OWN = {
    "user.py": (
        "import sys\n"
        "def gold(answer_text, gold): return 1.0\n"
        "def slip(prompt, completion, anwser=''): return 1.0\n"
        "class Scorer: pass\nPI = 3\n"
        "def nested(prompt, completion): return {'reward': 1.0, 'parts': {'a': 1}}\n"
        "def leaves(prompt, completion): sys.exit(3)\n"
        "def solve(question_text): return '1'\n"
        "def env(completion, answer, foo): return {'reward': 1}\n"
        "def fine(completion, answer, *, turn, more=1): return {'reward': 1}\n"
    ),
    "held.jsonl": "".join(json.dumps({"prompt": f"{n}+2=", "answer": str(n + 2)}) + "\n" for n in range(4)),
    "no_prompt.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"answer": "3"}\n',
    "no_answer.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n{"prompt": "1+3="}\n',
    "pairs.jsonl": '{"prompt": "1", "completion": "2"}\n{"prompt": "1"}\n',
    "array.jsonl": '[{"prompt": "1+1="}]\n',
    "pretty.jsonl": '{\n "prompt": "1+1="\n}\n',
    "rows.csv": "prompt,answer\n1+1=,2\n",
    "bom.jsonl": '\ufeff{"prompt": "1+1=", "answer": "2"}\n',
    "bare/config.json": (MODEL / "config.json").read_text(),
}


def scored_with(names: str) -> list[Any]:
    return score_group(eval(f"lambda {names}: 1.0"), {"prompt": "1+1="}, ("2",), {})


def test_prompt_and_completion_come_by_position_to_parameters_named_like_them() -> None:
    for names in ("prompt, response", "question, text", "item, model_output", "x, y", "_, answer", "_, __"):
        assert scored_with(names) == [(1.0, {})], names
    for names in ("response, ground_truth", "prompt, gold", "answer_text, score", "output, prompt"):
        with pytest.raises(RewardError, match="has no parameter 'completion'"):
            scored_with(names)


def all_found(file: Path, *overrides: str) -> list[str]:
    (file.parent / "bare").mkdir(exist_ok=True)
    for name, text in OWN.items():
        (file.parent / name).write_text(text)
    try:
        composed = compose(file, [*overrides, f"out={file.parent}/out"])
    except ConfigError as error:
        return [f"error {error}"]
    return [f"{each.severity} {each.path}: {each.message}" for each in problems(Assembly(composed))]


ODD = {
    'sampling.stop=["\\\\n"]': r"warning sampling.stop: has '\\n', a backslash and a letter",
    "sampling.temperature=5": "warning sampling.temperature: is 5",
    "queue.min_members=99": "warning queue.min_members: is 99, but a group has",
    "rollout.concurrency=1": "warning rollout.concurrency: is 1",
    "workflow.timeout_s=0.001": "warning workflow.timeout_s: is 0.001: nothing ends in so short",
    "algorithm.eps_clip=5": "warning algorithm.eps_clip: is 5",
    "checkpoint.keep_best=true": "warning checkpoint.keep_best: has no effect",
    "training.weight_decay=2": "warning training.weight_decay: is 2: a step takes",
    "training.lr=1e-30": "warning training.lr: is 1e-30: such steps change no weight",
    "training.betas=[0.999, 0.9]": "warning training.betas: is [0.999, 0.9]: the first is",
    "training.decay_steps=3": "warning training.decay_steps: is 3, and has no effect",
    "training.final_lr_ratio=0.2": "warning training.final_lr_ratio: is 0.2, and has no effect",
}
"""Overrides of one run, and what is said of each."""
REWARD = "reward={{use: function, function: user.py:{}}}".format


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        ((*TORCH, "queue.batch_size=8", *ODD), [*ODD.values()]),
        (("sampling.stop=['']",), ["error override sampling.stop.0: expected str of length >= 1"]),
        ((REWARD("Scorer"),), ["'Scorer' is a class; expected a function"]),
        ((REWARD("PI"),), ["'PI' is a value; expected a function"]),
        ((*(*TORCH, HELD, "sampling.stop_token_ids=[99999]"), "evaluation.sampling.logit_bias={99999: 5}",
          *("inference.context_length=100000", "inference.canary.tokens=600"),
          *("training.warmup_steps=1000", "evaluation.samples=8"),
          "variants={a: {}, b: {sampling: {stop_token_ids: [99998]}}}"),
         ["error sampling.stop_token_ids: has the token 99999",
          "error evaluation.sampling.logit_bias: has the token 99999, but",
          "error variants.b.sampling.stop_token_ids: has the token 99998",
          "error inference.context_length: is 100000, but",
          "error inference.canary.tokens: is 600, more than",
          "warning training.warmup_steps: is 1000, so 0 of the run's 5 optimizer steps",
          "warning evaluation.samples: is 8, but at temperature 0"]),
        ((*(*TORCH, HELD, "algorithm=sft", "algorithm.completion_column=answer", "reward=null"),
          *("training.use=fsdp2", "training.processes=2", "evaluation.rows=1")),
         ["error evaluation.rows: call 'train(actor)' has 1 held-out sequences for the 2 data-parallel"]),
        ((*TORCH, HELD, "evaluation.measure=loss"), ["error evaluation.measure: is 'loss', but"]),
        ((*TORCH, HELD, "algorithm=sft", "algorithm.completion_column=x", "reward=null"),
         ["error dataset: the first row: column 'x'", "error evaluation.dataset: the first row: column 'x'"]),
        ((*TORCH, HELD, "sampling.max_tokens=600", f"{ANSWER}=601"),
         ["error sampling.max_tokens: is 600, but", "error evaluation.sampling.max_tokens: is 601"]),
        ((*TORCH, "sampling.max_tokens=5000"),
         ["error inference.context_length: is at most 4096 by default"]),
        ((*TORCH, HELD, "inference.context_length=64", f"{ANSWER}=64"),
         ["error evaluation.sampling.max_tokens: is 64, but inference.context_length"]),
        ((*TORCH, HELD, SAME_ROWS, "evaluation.rows=99"),
         ["4 of 4 held-out rows are also rows of `dataset`", "is 99, but the dataset has 4 rows"]),
        ((*TORCH, "training.lora={targets: [q_prj]}"), ["'q_prj' is no linear module of"]),
        ((*TORCH, "training={varlen_attention: true, packing: padded, dtype: float32, gpus: 1, device: cpu}"),
         ["needs `dtype: bfloat16` and a GPU (`gpus: 1`) and packed rows; or leave it out"]),
        ((*TORCH, "inference={cuda_graphs: true, gpus: 1, deterministic: true}"),
         ["and needs a GPU (`gpus: 1`) and `deterministic: false`; or leave it out"]),
        ((*TORCH, "inference.cuda_graphs=true"), ["inference.cuda_graphs: is true, and needs a GPU"]),
        ((*TORCH, HELD, "algorithm=sft", "algorithm.completion_column=answer", "inference.sleep=true"),
         ["error inference.sleep: is true, but this algorithm trains on rows as they are"]),
        ((*TORCH, "training.betas=[0.9,1.0]"),
         ["error override training.betas.1: expected float < 1.0; found"]),
        (("model=bare", *TORCH[1:]), ["bare' has no weights: expected *.safetensors"]),
        ((*(*TORCH, "training.lr=1e-5", "training.lora.rank=4", f"dataset.{TRAIN}"),
          "sampling={max_tokens: 1, ignore_eos: true}",
          *(HELD, f"evaluation.dataset.{TRAIN}", f"{ANSWER}=1")),
         ["warning training.lr: is 1e-05, and adapters need about ten times the rate",
          "warning sampling.max_tokens: is 1, but the answer in the first",
          "warning sampling.ignore_eos: is true", f"warning {ANSWER}: is 1, but the answer"]),
        ((*TORCH, "training={schedule: linear, decay_steps: 15, warmup_steps: 20}"),
         ["error training.decay_steps: is 15, but the warm-up alone takes 20"]),
        (("workflow={use: agent, function: user.py:solve}",),
         ["parameter 'question_text'; available: prompt, row"]),
        (("workflow={use: multi_turn, environment: user.py:env}",),
         ["has a parameter 'foo'; available: prompt"]),
        (("workflow={use: agent, command: nosuchprogram --x}",), ["there is no program 'nosuchprogram' on"]),
        (("workflow={use: agent, command: [nosuchprogram]}",), ["there is no program 'nosuchprogram' on"]),
        (("dataset.path=no_prompt.jsonl",),
         ["1 of 2 rows have no valid prompt, and their tickets would fail"]),
        ((REWARD("slip"),),
         ["warning reward: no column of the rows is called 'anwser', an optional parameter"]),
        (("reward={use: sum, parts: {a: exact}, weights: {a: 0}}",), ["are all 0, so every reward is 0"]),
        (("bus.listen='127.0.0.1:99999'",), ["listen has the port 99999"]),
        (("dataset.path=no_answer.jsonl",), ["the reward cannot score 2 of 3 rows, and their tickets would"]),
        (("dataset={use: mix, parts: {a: {use: jsonl}, b: {use: jsonl, path: no_answer.jsonl}}}",
          "dataset.parts.a.path=held.jsonl"),
         ["row 6: of b: no column 'answer'"]),
        (("algorithm=sft", "dataset.path=pairs.jsonl"),
         ["warning dataset: 1 of 2 rows cannot be trained on"]),
        ((REWARD("gold"),), ["but it calls them 'answer_text' and 'gold'"]),
        ((REWARD("nested"),), ["the metric 'parts' of completion 0 ("]),
        ((REWARD("leaves"),), ["reward raised SystemExit: 3"]),
        ((*TORCH, "inference=mock"), ["warning inference.use: 'mock' samples answers without"]),
        (("algorithm={use: dapo, overlong: {limit: 9, buffer: 20}}",),
         ["buffer (20) must be at most limit (9)"]),
        (("algorithm={use: dapo, overlong: {limit: 999, buffer: 2}}",),
         ["warning algorithm.overlong.limit: is 999"]),
        ((*TORCH, "algorithm=distill"), ["warning models.teacher.path: is not set"]),
        (("bus.max_payload_mb=100",), ["error override bus.max_payload_mb: expected int <= 64"]),
        (("bus.credentials=user.py",), ["credentials are for your own server"]),
        (("training={use: fsdp2, interface: eth99}",), ["this machine has no network interface 'eth99'"]),
        (("workflow={use: multi_turn, environment: user.py:fine, max_tokens: 2}",),
         ["warning workflow.max_tokens"]),
        (("dataset.path=array.jsonl", HELD, "evaluation.dataset.path=pretty.jsonl"),
         ["array.jsonl:1: not a JSON object in UTF-8: it begins a JSON array",
          "an object goes over several lines"]),
        (("dataset.path=rows.csv", HELD, "evaluation.dataset.path=bom.jsonl"),
         ["it looks like CSV", "byte order mark (BOM)"]),
        (("model=user.py",), ["user.py' is a file; expected the folder of a model"]),
        (("model=nowhere.yaml",), ["error model: no such folder: 'nowhere.yaml'"]),
    ],
)  # fmt: skip
def test_a_slip_is_found_before_the_run_starts(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], messages: list[str]
) -> None:
    """Slips that have nothing to do with each other are in one run, and each is named."""
    monkeypatch.chdir(run_file.parent)
    found_problems = all_found(run_file, *overrides)
    for message in messages:
        assert any(message in problem for problem in found_problems), (message, found_problems)


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("sampling.logit_bias={99999: 5}", "sampling.logit_bias"),
        ("sampling.temperature=0", "sampling.temperature"),
        ("model=nowhere.yaml", "model"),
        ("variants={a: {}, b: {sampling: {temperature: 2}}}", "variants.b.sampling.temperature"),
    ],
)
def test_a_mistake_in_a_key_is_told_before_any_trial(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, override: str, path: str
) -> None:
    monkeypatch.setattr(training_config, "counted", None)
    for name in ("ThreadPoolExecutor", "dataset_problems", "memory_problems"):
        monkeypatch.setattr(checks, name, None)
    held = f"evaluation={{dataset: {{use: jsonl, path: {run_file.parent}/rows.jsonl}}}}"
    with pytest.raises(ConfigError, match=f"^[^\n]*{re.escape(path)}[^\n]*$"):
        check(run_file, [*TORCH, held, override])


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("inference=vllm", "inference.python"),
        ("inference=sglang", "inference.python"),
        ("training.lora={}", "training.lora"),
    ],
)
def test_what_another_machine_may_have_is_a_warning_that_says_so(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, override: str, path: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(run_file.parent))  # no servers are installed there
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda *name: None if name == ("peft",) else find(*name))  # pyright: ignore
    assembly = Assembly(compose(run_file, [*TORCH, override, f"out={run_file.parent}/out"]))
    _, warnings = checks.faults_and_warnings(assembly, starting=False)
    faults, _ = checks.faults_and_warnings(assembly, starting=True)
    [warning] = [each for each in warnings if each.endswith("; a run cannot start here") and path in each]
    assert warning.removesuffix("; a run cannot start here") in faults


@pytest.mark.parametrize(
    ("overrides", "rates", "full", "evaluated"),
    [
        (("steps=20",), "1.8e-05 at step 1, 0.00018 at step 10, 0.0002 at step 20", "", "0, 10, 20"),
        (("steps=19",), "1.8e-05 at step 1, 0.00018 at step 10, 0.0002 at step 19", "so 9 of the",
         "0, 10, 19"),
        (("steps=6",), "1.8e-05 at step 1, 0.00011 at step 6", "so 0 of the run's 6", "0, 6"),
        (("steps=5", "training.warmup_steps=0"), "0.0002 at step 1, 0.0002 at step 5", "", "0, 5"),
        (("steps=80", "algorithm={use: ppo, epochs: 2}", "models.critic.path=${model}"),
         "1.8e-05 at step 1, 0.0002 at step 10, 0.0002 at step 80", "", "0, 10, 20, 30, …, 80"),
        (("steps=0",), "", "", "0"),
    ],
)  # fmt: skip
def test_check_says_the_rates_of_a_run_and_the_versions_that_it_evaluates(
    run_file: Path, overrides: tuple[str, ...], rates: str, full: str, evaluated: str
) -> None:
    (run_file.parent / "held.jsonl").write_text('{"prompt": "7+1=", "answer": "8"}\n')
    held = f"evaluation={{every: 10, dataset: {{use: jsonl, path: {run_file.parent}/held.jsonl}}}}"
    training = (*TORCH[:-1], "training.lr=2e-4", held, f"out={run_file.parent}/out", *overrides)
    assembly = Assembly(compose(run_file, training))
    text = describe(assembly)
    assert (f"\nlr         {rates}\n" in text) == bool(rates)
    assert f"\nevaluation version{'s' if ',' in evaluated else ''} {evaluated}" in text
    warned = [each.message for each in problems(assembly) if each.path == "training.warmup_steps"]
    assert [full in each for each in warned] == ([True] if full else [])


@pytest.mark.parametrize(
    "overrides",
    [
        (*TORCH, HELD, "training={lora: {}, lr: 1e-4}", "inference.context_length=512", STOP),
        (*TORCH, "training={schedule: cosine, decay_steps: '${steps}', warmup_steps: 1}"),
        (HELD, "workflow={use: multi_turn, environment: user.py:fine}", "reward=null"),
        ("workflow={use: agent, command: 'cd /tmp && X=1 nosuchprogram'}", "sandbox=unsafe"),
        ("workflow={use: agent, command: python3 agent.py}", "sandbox=unsafe"),
        ("workflow.timeout_s=1", "rollout.concurrency=1", "sampling.temperature=1.3"),
        # The rows that are trained have no answer to score; the held-out ones have.
        (*TORCH, HELD, *PAIRS, "reward={use: regex, pattern: '([0-9]+)'}"),
    ],
)
def test_a_right_run_file_has_no_problem(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    monkeypatch.chdir(run_file.parent)
    # Of this machine, of the quickstart's model, and of `sandbox: unsafe`.
    usual = ("training.threads", "does not show", "warning sandbox")
    assert [each for each in all_found(run_file, *overrides) if not any(text in each for text in usual)] == []


@pytest.mark.parametrize(
    "example",
    [
        *("quickstart/run", "quickstart/ppo", "quickstart/dpo", "quickstart/reward_model"),
        *("agent/run", "agent/curl", "agent/tools"),
    ],
)
def test_the_examples_have_no_problem(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    composed = compose(Path("examples", f"{example}.yaml"), [f"out={tmp_path}/out"])
    usual = ("training.threads", "model")  # of this machine, and of models and their chat templates
    found_problems = [each for each in problems(Assembly(composed)) if each.path not in usual]
    assert [each for each in found_problems if each.severity != "environment"] == []


def test_an_engine_that_leaves_a_gpu_idle_is_named(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(*overrides: str) -> set[str]:
        return {path for path in found(run_file, *overrides, severity="warning") if path.endswith(".gpus")}

    torch = (f"model={MODEL}", "training=torch", "inference={use: torch, context_length: 96}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert idle(*torch) == {"training.gpus", "inference.gpus"}
    assert idle() == set()  # mock engines compute nothing
    shared = ("training.gpus=1", "training.share=0.5", "inference.gpus=1", "inference.share=0.4")
    assert idle(*torch, *shared) == set()
    unused = found(run_file, *torch, "training.gpus=2", "inference.gpus=2")
    assert "write `gpus: 1` and `processes: 2`" in unused["training.gpus"]
    assert "write `gpus: 1` and `replicas: 2`" in unused["inference.gpus"]
    assert idle(*torch, "training.device=cpu", "inference.device=cpu") == set()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert idle(*torch) == set()


# ---------------------------------------------------------------------------------------------- bus


async def test_a_nats_server_is_told_from_what_is_none(server: NatsServer) -> None:
    [refusal] = await faults_of_bus(BusConfig(url=server.url), 3)
    assert refusal.message.endswith(": Authorization Violation")
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            with other.accept()[0] as connection:
                connection.sendall(b"SSH-2.0")

        threading.Thread(target=greet, daemon=True).start()
        [stranger] = await faults_of_bus(BusConfig(url=f"nats://127.0.0.1:{other.getsockname()[1]}"), 3)
    assert "is no nats-server" in stranger.message


def test_check_tells_what_others_could_read(run_file: Path) -> None:
    def warnings(*overrides: str) -> dict[str, str]:
        return found(run_file, *overrides, severity="warning")

    assert "without TLS" in warnings("bus.listen=0.0.0.0", "bus.insecure=true")["bus.insecure"]
    assert "bus.insecure" not in warnings("bus.listen=0.0.0.0")
    assert "bus.insecure" not in warnings("bus.listen=127.0.0.1", "bus.insecure=true")
    elsewhere = "bus.url=nats://me:secret@nothing.invalid:4222"
    assert warnings(elsewhere)["bus.url"].startswith("no TLS to nothing.invalid:4222: whoever can read")
    assert "bus.url" not in warnings(elsewhere, "bus.insecure=true")
    figures = found(run_file, "metrics.address=0.0.0.0")
    assert "other machines could read the figures" in figures["metrics.address"]
    assert found(run_file, "metrics={address: 0.0.0.0, insecure: true}") == {}


def test_a_bus_that_cannot_be_reached_is_one_line(run_file: Path) -> None:
    port = free_port()
    url = f"bus.url=nats://user:secret@127.0.0.1:{port}"
    for command, status, severity in (("check", 0, "warning"), ("run", 2, "error")):
        done = stretto(command, run_file, f"out={run_file.parent}/out", url)
        assert done.returncode == status
        said = [line for line in done.stderr.splitlines() if "threads" not in line]
        assert len(said) == 1
        assert said[0].startswith(f"{severity}: override bus.url: no nats-server at 127.0.0.1:{port} (")


def test_a_machine_without_a_server_is_told_by_check(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise BusError("no nats-server found")

    monkeypatch.setattr(probe, "binary", none)
    assert found(run_file, severity="environment") == {"bus": "no nats-server found"}


# ----------------------------------------------------------------------------- runs that end by a plugin


@in_both_worlds
def test_an_algorithm_that_raises_ends_the_run_with_one_message(start: Start, tmp_path: Path) -> None:
    body = """
        from stretto_policy_gradients import GRPO
        class make(GRPO):
            def advantages(self, batch):
                raise ValueError('boom')
    """
    file = write_plugin(tmp_path, "algorithm", body, "stretto_policy_gradients.GRPOConfig")
    run = start(f"plugins=[{file}]", "algorithm.use=mine")
    assert run.end() == 1
    log = run.folder / "logs" / "trainer-0.jsonl"
    message = f"algorithm 'mine' of my_algorithm.py raised ValueError: boom ({file}:4); traceback in {log}"
    assert run.summary()["reason"] == f"trainer-0 refused: {message}"
    assert "Traceback" not in run.text()
    assert len([line for line in run.text().splitlines() if "boom" in line]) == 1
    assert f'File \\"{file}\\", line 4, in advantages' in log.read_text()


@in_simulation
def test_an_engine_that_breaks_its_contract_ends_the_run_without_advice_to_resume(
    start: Start, tmp_path: Path
) -> None:
    body = """
        from stretto_mock.inference import MockInference
        class make(MockInference):
            swap = None
    """
    file = write_plugin(tmp_path, "inference", body, "stretto_mock.MockInferenceConfig")
    run = start(f"plugins=[{file}]", "inference.use=mine")
    assert run.end() == 1
    reason = run.summary()["reason"]
    assert reason.startswith("inference-0: inference 'mine' of my_inference.py does not keep its contract")
    assert "has no method 'swap'" in reason
    assert "resume" not in run.text()
    assert "Traceback" not in run.text()
    run.assert_nothing_is_left()


def test_a_trainer_that_fails_at_start_is_told_without_advice_to_resume(start: Start, tmp_path: Path) -> None:
    body = "def make(config, context):\n    raise OSError('no such device')\n"
    file = write_plugin(tmp_path, "training", body, "stretto_mock.MockTrainingConfig")
    run = start(f"plugins=[{file}]", "training.use=mine")
    assert run.end() == 1
    assert run.summary()["reason"] == (
        "trainer-0 was lost while the run was starting "
        f"(training 'mine' of my_training.py raised OSError: no such device ({file}:2))"
    )
    assert "resume" not in run.text()


def test_what_the_first_row_takes_leaves_the_others_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its check imports the library of the reward."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    rows = row_check.drawn_rows(100, 4.0)
    next(rows)
    now = 60.0
    next(rows)
    now = 63.9
    next(rows)
    now = 64.1
    assert list(rows) == []


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("stretto.errors.ConfigError('no: row')", "no: row"),
        ("stretto.models.images.ImageError('no')", "no"),
        ("ValueError('no')", "ValueError: no"),
    ],
)
def test_the_last_words_of_a_child_name_no_class_of_stretto(raised: str, told: str) -> None:
    code = f"import stretto.errors, stretto.models.images; raise {raised}"
    assert last_line(run_child([sys.executable, "-c", code], b"", patience(60)).stderr) == told
