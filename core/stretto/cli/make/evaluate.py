"""`stretto evaluate`: one evaluation of a model or of a run's checkpoint, by the system that also trains.

This module composes a run without train steps. The run publishes the weights unchanged and evaluates
version 0. The figures follow from its answers, with R rows and n answers to each row, of which c pass:

- avg@n, the mean score (`accuracy` if all answers have one, else the reward);
- pass@k = the mean over rows of 1 - C(n - c, k) / C(n, k), the unbiased estimate of the probability that at
  least one of k answers passes (Chen et al. 2021, arXiv 2107.03374, eq. 1);
- 95 % intervals, mean ± 1.96 s / √R where s is the standard deviation of the rows' values (see
  `stretto.records.accuracy`).
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import msgspec

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import Composed, compose
from stretto.assembly.plugins import Plugins
from stretto.bus.messages.events import Measure
from stretto.errors import ConfigError, offer
from stretto.kernel.durable.changes import read_fingerprints
from stretto.kernel.durable.checkpoint import checkpoint_name, find_checkpoint, version_in
from stretto.kernel.fleet.forks import ForkServer
from stretto.machine.private_file import write_private
from stretto.models.files import fingerprint_of
from stretto.records.accuracy import estimate, row_scores
from stretto.records.document import read_document
from stretto.records.intervals import Estimate
from stretto.records.samples.answers import KeptAnswer, by_sample, measure_of, read_answers
from stretto.records.samples.store import SampleStore

# An evaluation of a checkpoint takes over the run's keys, except those for training and the output folder.
_EXCLUDED_KEYS = {
    *("algorithm", "dataset", "groups", "models", "queue", "checkpoint", "trackers", "out", "variants")
}


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of the command line; None means the run's own value, or the default."""

    version: str | None = None
    dataset: str | None = None
    reward: str | None = None
    n: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    rows: int | None = None
    inference: str | None = None
    out: str | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one evaluation."""

    source: str
    """The model: a folder, or a hub id."""
    version: int
    """Version of the run that the checkpoint belongs to; 0 for another model."""
    rows: int
    """Rows with scored answers."""
    failed: int
    """Rows that failed and have no score."""
    n: int
    """Answers to each row; the smallest number where rows differ."""
    samples: int
    avg: Estimate
    """Score of an answer: its accuracy or its reward, as `measure` says."""
    measure: Measure
    """`accuracy` if all answers have one, otherwise `reward`."""
    reward: Estimate
    pass_at: dict[int, Estimate]
    """k -> pass@k, for the powers of two up to n, and n itself."""
    threshold: float
    """An answer with at least this score passes."""
    length: float
    truncated: float
    """Share of answers that reached the length limit."""
    tokens_per_s: float
    """Sampled tokens per second of all engines together, while they were busy."""


def compose_evaluation(source: str, options: EvaluationOptions, overrides: Sequence[str] = ()) -> Composed:
    """Compose the run that evaluates a run's checkpoint, or a model by its folder or hub id."""
    for item in overrides:
        if item.partition("=")[0].split(".")[0] == "dataset":
            text = f"override {item!r}: an evaluation reads `evaluation.dataset`; write evaluation.{item}"
            raise ConfigError(text)
    folder = Path(source).expanduser()
    if (folder / "config.yaml").is_file():
        file, document = folder / "config.yaml", _document_of_run(folder.absolute(), options.version)
    elif options.version is not None:
        raise ConfigError(
            f"--version {options.version}: {source!r} is not a run's folder; only a run has versions"
        )
    elif folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"{source!r} is neither a run (no config.yaml) nor a model (no config.json)")
    else:
        file, document = Path("evaluate"), {"name": _name_of(source), "model": source, "evaluation": {}}
    _apply_options(document, options)
    _require_rows_and_reward(document, overrides)
    document |= {
        "steps": 0,
        "algorithm": "grpo",  # any algorithm that samples from one model: the run trains nothing
        "dataset": "${evaluation.dataset}",
    }
    engine = [f"inference.use={options.inference}"] if options.inference else []
    composed = compose(file, [*engine, *overrides], document=document)
    evaluation = composed.config.evaluation
    assert evaluation is not None
    greedy = evaluation.sampling is not None and evaluation.sampling.temperature == 0
    if greedy and evaluation.samples > 1:
        note = f"at temperature 0 the {evaluation.samples} answers to a row are identical"
        composed = replace(composed, notices=(*composed.notices, note))
    return composed


def _document_of_run(folder: Path, version: str | None) -> dict[str, Any]:
    # Keep the references to environment variables: they are resolved when the evaluation is composed.
    run = read_document(folder / "config.yaml")
    evaluation: dict[str, Any] = run.get("evaluation") or {}
    return {
        **{key: value for key, value in run.items() if key not in _EXCLUDED_KEYS and value is not None},
        "name": f"evaluate-{run['name']}",
        "model": _model_of(folder, run, version),
        "training": {"use": "frozen", "dtype": run["training"].get("dtype", "auto")},
        "sampling": evaluation.get("sampling") or run["sampling"],
        "evaluation": {
            key: evaluation[key] for key in ("dataset", "rows", "samples") if evaluation.get(key) is not None
        },
    }


def _model_of(folder: Path, run: Mapping[str, Any], version: str | None) -> str:
    """Return a version's model folder (None: the newest intact one); the run's `model` for an unsaved 0."""
    first = checkpoint_name(0)
    if version in ("0", first) and run.get("model") and not (folder / "checkpoints" / first).is_dir():
        if adapter := (run["training"].get("lora") or {}).get("adapter"):
            raise ConfigError(
                f"--version {version}: the run began with the adapter {adapter!r}, which no engine can load; "
                f"merge it into {run['model']!r}, and evaluate that folder"
            )
        if read_fingerprints(folder).get("model", now := fingerprint_of(run["model"])) != now:
            raise ConfigError(f"--version {version}: the weights of {run['model']!r} changed after the start")
        return run["model"]
    advice = "; `--version 0` evaluates the model it started from"
    checkpoint = find_checkpoint(folder, version, advice)
    if not (checkpoint / "model").is_dir():
        raise ConfigError(
            f"{checkpoint} has no model: the training engine {run['training']['use']!r} does not save one"
        )
    return str(checkpoint / "model")


def answers_file(version: int) -> str:
    """Return the name of the file with the answers, in the folder of the evaluation."""
    return f"answers/{checkpoint_name(version)}.jsonl"


def _name_of(source: str) -> str:
    stem = Path(source).absolute().name
    return "evaluate-" + "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in stem)


def _apply_options(document: dict[str, Any], options: EvaluationOptions) -> None:
    evaluation: dict[str, Any] = document["evaluation"]
    evaluation |= {"sampling": "${sampling}", "every": 0, "keep_answers": True}
    if options.dataset is not None:
        evaluation["dataset"] = _dataset_of(options.dataset)
        evaluation.pop("rows", None)
    counts = {"samples": options.n, "rows": options.rows}
    evaluation |= {key: value for key, value in counts.items() if value is not None}
    sampling = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    document["sampling"] = {
        **document.get("sampling", {}),
        **{key: value for key, value in sampling.items() if value is not None},
    }
    document.setdefault("training", {"use": "frozen"})
    if options.reward is not None:
        document["reward"] = {"use": options.reward}
    if options.out is not None:
        document["out"] = options.out


def _dataset_of(name: str) -> dict[str, Any]:
    if Path(name).expanduser().is_file():
        return {"use": "jsonl", "path": str(Path(name).expanduser().absolute())}
    installed = Plugins().names("dataset")
    if name not in installed:
        hint = offer(name, installed, "installed")
        raise ConfigError(f"--dataset {name!r} is neither a file nor a dataset component{hint}")
    return {"use": name}


def _require_rows_and_reward(document: Mapping[str, Any], overrides: Sequence[str]) -> None:
    keys = [item.partition("=")[0] for item in overrides]
    if "dataset" not in document["evaluation"] and not any(
        key.startswith("evaluation.dataset") for key in keys
    ):
        raise ConfigError(
            "no held-out rows: give `--dataset FILE.jsonl`, or the name of a dataset component and its keys, "
            "for example `--dataset hf evaluation.dataset.path=openai/gsm8k`"
        )
    # Some workflows score answers themselves.
    overridden = any(key.split(".")[0] in ("reward", "workflow") for key in keys)
    if not overridden and not {"reward", "workflow"} & document.keys():
        raise ConfigError("no reward to score the answers: give `--reward NAME`, for example `--reward math`")


def run_evaluation(
    assembly: Assembly, forks: ForkServer | None, threshold: float
) -> tuple[Result | None, dict[str, Any]]:
    """Run the evaluation. Return its result and the run's summary (`stretto.runs.life.run`). The result is
    None if the run did not complete or lacks answers. Otherwise also write the result to `summary.json`, and
    the answers to `answers_file`."""
    from stretto.runs.life import run

    config, folder = assembly.config, assembly.folder
    summary = run(assembly, forks)
    answers = read_answers(SampleStore(folder), 0, texts=True) if summary["status"] == "completed" else []
    if not answers:
        return None, summary
    kept, expected = len(by_sample(answers)), summary["evaluation"][-1]["samples"]
    if kept < expected:
        problem = f"only {kept} of {expected} answers are kept; see {folder / 'logs' / 'samples.jsonl'}"
        return None, {**summary, "problems": [*summary["problems"], problem]}
    # This run evaluated its own version 0. Replace it by the version of the evaluated checkpoint.
    version = version_in(Path(cast("str", config.model)).parent.name) or 0
    answers = [msgspec.structs.replace(answer, version=version) for answer in answers]
    (folder / "answers").mkdir(exist_ok=True)
    (folder / answers_file(version)).write_bytes(msgspec.json.Encoder().encode_lines(answers))
    busy_s = summary["busy_s"]["generate"] / config.inference.replicas
    result = result_of(
        answers,
        source=cast("str", config.model),
        version=version,
        failed=summary["evaluation"][-1]["failed"],
        threshold=threshold,
        tokens_per_s=summary["tokens"]["generated"] / busy_s if busy_s else 0.0,
    )
    full_summary = {**summary, "result": msgspec.to_builtins(result, str_keys=True)}
    write_private(folder / "summary.json", json.dumps(full_summary, indent=1).encode() + b"\n")
    return result, full_summary


def result_of(
    answers: Sequence[KeptAnswer],
    *,
    source: str,
    version: int,
    failed: int,
    threshold: float,
    tokens_per_s: float,
) -> Result:
    """Compute the figures. A sample with several answers counts as the last one, with the tokens of all."""
    tokens = sum(answer.tokens for answer in answers)
    answers = list(by_sample(answers).values())
    rows: defaultdict[int, list[KeptAnswer]] = defaultdict(list)
    for answer in answers:
        rows[answer.row].append(answer)
    measure = measure_of(answers)
    scores = {row: [answer.score(measure) for answer in of_row] for row, of_row in rows.items()}
    n = min(map(len, scores.values()))
    counts = [(len(of_row), sum(score >= threshold for score in of_row)) for of_row in scores.values()]
    finishes = Counter(answer.finish for answer in answers)
    return Result(
        source=source,
        version=version,
        rows=len(rows),
        failed=failed,
        n=n,
        samples=len(answers),
        avg=estimate(list(row_scores(answers, measure).values())),
        measure=measure,
        reward=estimate([fmean(answer.reward for answer in of_row) for of_row in rows.values()]),
        pass_at={
            k: estimate([pass_at_k(of_row, correct, k) for of_row, correct in counts])
            for k in sorted({n, *(2**power for power in range(n.bit_length()))})
        },
        threshold=threshold,
        length=tokens / len(answers),
        truncated=finishes["length"] / len(answers),
        tokens_per_s=tokens_per_s,
    )


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k): the probability that k of n answers, drawn without replacement,
    contain at least one of the c answers that pass (Chen et al. 2021, eq. 1). 1 <= k <= n."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)
