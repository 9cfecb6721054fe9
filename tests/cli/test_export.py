"""`stretto export`: models that transformers and peft load, and rows that `sft` trains on."""

import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import huggingface_hub
import msgspec
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

import stretto
from agent_session import CALL, END, TEMPLATE, tokenizer_with
from kept_samples import Kept
from made_run import make_run
from sample_messages import done, trained
from stretto import Context
from stretto.agents.conversation import Conversation
from stretto.assembly.plugins import Plugins
from stretto.bus.messages.tickets import Ticket, TrajectoryBundle
from stretto.cli.main import app
from stretto.engine import Sampling
from stretto.errors import ConfigError, StrettoError
from stretto.records.run_folder import RunFolder
from stretto.records.samples.store import SampleStore
from stretto.tokenizer import Tokenizer
from stretto.workers.sampling.ticket_record import record_of
from stretto.workers.sampling.trajectory_log import wire_trajectories
from stretto.workflow import Answer, Score, Trajectory

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"


def export(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def exported(*arguments: object) -> str:
    done = export(*arguments)
    assert done.exit_code == 0, done.output
    return done.output


def in_rows(*arguments: object, file: Path) -> list[dict[str, Any]]:
    exported(*arguments, "--samples", file)
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the quickstart with adapters: two steps, and their samples."""
    folder = tmp_path_factory.mktemp("lora") / "out"
    overrides: dict[str, Any] = {
        "training": {"threads": 1, "lora": {"rank": 4}, "lr": 1e-2, "warmup_steps": 0},
        "inference": {"threads": 1},
        "queue": {"batch_size": 8, "max_staleness": 0},
        "dataset": {"path": QUICKSTART / "train.jsonl"},
        "evaluation": None,
        "model": QUICKSTART / "model",
    }
    with stretto.run(QUICKSTART / "run.yaml", out=folder, steps=2, **overrides) as run:
        run.wait()
    return folder


def logprobs(model: Any) -> Any:
    import torch

    tokens = torch.arange(4, 40)[None]
    with torch.no_grad():
        return torch.log_softmax(model(tokens).logits, -1)


@pytest.mark.slow
def test_the_exported_model_is_that_of_the_checkpoint(lora_run: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    to = tmp_path / "model"
    exported(lora_run, "--to", to)
    source = lora_run / "checkpoints" / "step-000002" / "model"
    copied, trained, base = (
        logprobs(AutoModelForCausalLM.from_pretrained(folder))
        for folder in (to, source, QUICKSTART / "model")
    )
    assert torch.equal(copied, trained)
    assert not torch.allclose(copied, base, atol=1e-3)
    assert len({AutoTokenizer.from_pretrained(folder).decode([30]) for folder in (to, source)}) == 1
    assert json.loads((to / "generation_config.json").read_text())["eos_token_id"] == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
def test_the_exported_adapter_gives_the_same_model_on_its_base(lora_run: Path, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    to = tmp_path / "adapter"
    exported(lora_run, "--adapter", "--to", to)
    base = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model")
    adapted: Any = PeftModel.from_pretrained(base, to)
    merged = AutoModelForCausalLM.from_pretrained(lora_run / "checkpoints" / "step-000002" / "model")
    torch.testing.assert_close(logprobs(adapted), logprobs(merged), atol=1e-4, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(to).eos_token == "<|im_end|>"
    assert not (to / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        ("bfloat16", [], "bfloat16"),
        ("float16", [], "float16"),
        ("float32", ["--dtype", "bfloat16"], "bfloat16"),
        ("bfloat16", ["--dtype", "float32"], "float32"),
        ("bfloat16", ["--adapter"], "float32"),
        ("", [], "float32"),
    ],
)
def test_an_export_has_the_dtype_of_the_runs_model(
    source: str, arguments: list[str], expected: str, lora_run: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    run = tmp_path / "run"
    shutil.copytree(lora_run, run, ignore=shutil.ignore_patterns("bus", "logs"))
    if source:
        model: Any = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model", dtype=getattr(torch, source))
        model.save_pretrained(tmp_path / "model")
    document = yaml.safe_load((run / "config.yaml").read_text()) | {"model": str(tmp_path / "model")}
    (run / "config.yaml").write_text(yaml.safe_dump(document))
    assert f"the weights are {expected}" in exported(run, *arguments, "--to", tmp_path / "to")
    if "--adapter" in arguments:
        return
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "to")
    assert str(loaded.dtype) == f"torch.{expected}"
    found = load_file(tmp_path / "to" / "model.safetensors")
    for name, tensor in load_file(
        run / "checkpoints" / "step-000002" / "model" / "model.safetensors"
    ).items():
        assert torch.equal(found[name], tensor.to(getattr(torch, expected)))


@pytest.mark.parametrize("form", ["--merged", "--adapter"])
def test_no_file_names_a_place_of_this_machine_or_a_secret(
    lora_run: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_MODEL", "/a/secret/place")
    run = tmp_path / "run"
    shutil.copytree(lora_run, run, ignore=shutil.ignore_patterns("bus", "logs"))
    document = yaml.safe_load((run / "config.yaml").read_text())
    document |= {"model": "${oc.env:MY_MODEL}", "seed": "${oc.env:MY_MODEL}"}
    for folder, source in ((tmp_path / "a", lora_run), (tmp_path / "b", run)):
        (run / "config.yaml").write_text(yaml.safe_dump(document))
        exported(source, form, "--to", folder)
        for file in folder.iterdir():
            text, places = file.read_bytes(), (str(ROOT), str(lora_run.parents[1]), "secret")
            assert not any(place.encode() in text for place in places)
    card = (tmp_path / "a" / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == ("peft" if form == "--adapter" else "transformers")
    assert "a local model named `model`: 2 train steps with the algorithm `grpo`" in card
    assert "| `training.lr` | 0.01 |" in card
    rewards = [reward for _, reward in RunFolder(lora_run).series("reward")]
    assert f"| reward | {fmean(rewards):.3f} |" in card


def test_a_mistake_is_refused_and_leaves_nothing(lora_run: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    untrained = make_run(tmp_path / "made")
    for arguments, reason in [
        ((lora_run, "--to", full), "full exists and is not empty"),
        ((lora_run, "--version", "7", "--to", tmp_path / "x"), "no checkpoint 'step-000007'"),
        ((untrained, "--to", tmp_path / "x"), "has no checkpoint"),
        ((tmp_path, "--to", tmp_path / "x"), "holds no run"),
        ((lora_run, "--samples", tmp_path / "a.jsonl", "--adapter"), "exports no model"),
        ((lora_run, "--best-of-group"), "go with --samples"),
    ]:
        refused = export(*arguments)
        assert isinstance(refused.exception, ConfigError)
        assert reason in str(refused.exception)
    assert {path.name for path in tmp_path.iterdir()} == {"full", "made"}


class FakeHub:
    files: dict[str, bytes]
    fault = ""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        assert (repo_id, private, exist_ok) == ("me/arithmetic", True, True)
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        assert (repo_id, bool(commit_message)) == ("me/arithmetic", True)
        if self.fault:
            raise OSError(self.fault)
        self.files = {path.name: path.read_bytes() for path in folder_path.iterdir()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    return fake


def test_a_push_uploads_the_folder_to_a_private_repository(
    lora_run: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    pushed = exported(lora_run, "--push-to-hub", "me/arithmetic")
    assert pushed.endswith("chooses another\nsee https://huggingface.co/me/arithmetic\n")
    checkpoint = lora_run / "checkpoints" / "step-000002" / "model"
    assert hub.files["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
    assert "README.md" in hub.files
    assert list(tmp_path.iterdir()) == []


def test_a_refused_push_does_not_show_the_token(lora_run: Path, hub: FakeHub, tmp_path: Path) -> None:
    hub.fault = "403: the token hf_verysecret may not write"
    refused = export(lora_run, "--push-to-hub", "me/arithmetic", "--to", tmp_path / "model")
    assert isinstance(refused.exception, StrettoError)
    assert str(refused.exception) == "--push-to-hub me/arithmetic: 403: the token <token> may not write"
    assert refused.exception.__suppress_context__
    assert "hf_verysecret" not in refused.output
    assert (tmp_path / "model" / "README.md").exists()  # it is here to try again


# ------------------------------------------------------------------------------------------ samples


@pytest.mark.slow
def test_exported_samples_are_trained_on_by_sft(lora_run: Path, tmp_path: Path) -> None:
    rows = in_rows(lora_run, file=(file := tmp_path / "sft.jsonl"))
    config = {
        "name": "sft",
        "model": QUICKSTART / "model",
        "algorithm": "sft",
        "training": {"use": "torch", "lr": 1e-4, "warmup_steps": 0},
        "dataset": {"use": "jsonl", "path": file},
        "queue": {"batch_size": len(rows)},  # every step trains on all rows
        "out": tmp_path / "out",
    }
    with stretto.run(config, steps=4) as run:
        assert run.wait()["status"] == "completed"
        nll = [step["nll"] for step in run.metrics]
    assert nll[-1] < nll[0]


def test_only_good_samples_and_the_best_of_each_group(lora_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    every = in_rows(lora_run, file=file)
    good = in_rows(lora_run, "--min-reward", "1", file=file)
    best = in_rows(lora_run, "--best-of-group", file=file)
    store = {row["id"]: row for row in SampleStore(lora_run).find(limit=None)}
    assert {row["id"] for row in every} == {id for id, row in store.items() if row["finish"] == "stop"}
    assert {row["reward"] for row in good} == {1.0}
    assert {row["reward"] for row in every} == {0.0, 1.0}
    highest: dict[str, float] = {}
    for row in every:
        group = row["id"].split("/")[0]
        highest[group] = max(highest.get(group, 0.0), row["reward"])
    assert len(best) == len(highest)
    assert {row["id"].split("/")[0]: row["reward"] for row in best} == highest
    first = store[every[0]["id"]]
    assert (every[0]["prompt"], every[0]["completion"]) == (first["prompt_text"], first["text"])


def test_samples_with_images_name_their_files(tmp_path: Path) -> None:
    rows = [
        {"prompt": "<image>?", "images": ["/a.png", "/b.png"]},
        {"prompt": "<image>?", "image": {"bytes": 3}},
    ]
    files, itself = (
        make_run(tmp_path / f"made-{n}", steps=1, row=json.dumps(row)) for n, row in enumerate(rows)
    )
    images = [row["images"] for row in in_rows(files, file=tmp_path / "files.jsonl")]
    assert images == [["/a.png", "/b.png"]] * len(images) != []
    refused = export(itself, "--samples", tmp_path / "itself.jsonl")
    assert "images must be files" in str(refused.exception)


async def conversation(tokenizer: Tokenizer, *texts: str) -> list[Trajectory]:
    """A chat in which the policy says these texts, cut into tokens at `|`; a tool or a user answers."""
    said = iter(texts)

    async def generate(ids: Any, sampling: Sampling, images: Any) -> Answer:
        pieces = [tokenizer.encode_text(piece) for piece in next(said).split("|")]
        tokens = np.append(np.concatenate(pieces), END).astype(np.int32)
        logprobs, versions = np.full(len(tokens), -1, np.float32), np.zeros(len(tokens), np.int32)
        return Answer(tokens, logprobs, versions, "stop", tokenizer.decode(tokens), "inference-0")

    prompt = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "a few-shot answer"}]
    chat = Conversation(generate, tokenizer, Sampling(), [*prompt, {"role": "user", "content": "2+2?"}])
    for text in texts:
        await chat.reply()
        chat.add({"role": "tool" if "tool_call" in text else "user", "content": "next"})
    return chat.trajectories(Score(1.0))


async def test_rows_of_a_tool_run_train_the_tokens_of_the_run(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(TEMPLATE, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    folder = make_run(tmp_path / "made", steps=1)
    document = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(document | {"model": str(tmp_path / "model")}))
    shutil.rmtree(folder / "samples")
    kept, expected = Kept(folder), dict[str, Any]()
    spoken = (
        [CALL, "4"],
        [CALL, CALL, "4", "sure"],
        ["<think>so</think>4", "yes"],  # the template leaves out the thought: two trajectories
        ["th|ink"],
    )
    for number, texts in enumerate(spoken, 1):
        ticket = Ticket(number, 1, "train", 0, 0, 1)
        sampled = await conversation(tokenizer, *texts)
        wires = wire_trajectories(ticket, sampled, ())
        notes = record_of(ticket, "rollout-0", {}, sampled, tokenizer)
        bundle = TrajectoryBundle(number, 1, 0, tuple(wires))
        figures = trained([wire.id for wire in wires], 0, weights=[1.0])
        kept.add(bundle, notes, done(bundle, notes), figures)
        for wire, each in zip(wires, sampled, strict=True):
            expected[wire.id] = each.tokens.tolist(), each.loss_mask.tolist()
    kept.flush()
    said = exported(folder, "--samples", tmp_path / "said.jsonl")
    assert "5 rows in" in said
    assert "1 of them with tokens" in said
    rows = in_rows(folder, file=tmp_path / "sft.jsonl")
    assert [("tokens" in row, len(row["completion"])) for row in rows[:2]] == [(False, 3), (False, 7)]
    component = Plugins().get("algorithm", "sft")
    config = msgspec.convert({"use": "sft"}, component.config)
    sft: Any = component.make(config, Context(run="r", name="n", seed=1))
    encoded = {row["id"]: sft.encode(row, 0, tokenizer) for row in rows}
    assert {id: (list(each.tokens), list(each.loss_mask)) for id, each in encoded.items()} == expected
