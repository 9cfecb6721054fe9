"""What a composed run will be, and what is wrong with it, before any process starts.

Private to the core. `problems` is all that `stretto check` and `stretto run` refuse beyond the types
of single keys; `describe` is the text of `stretto check`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from stretto.algorithm import Algorithm
from stretto.component import Context, Problem
from stretto.config import Composed, RunConfig
from stretto.dataset import Dataset
from stretto.errors import ConfigError, StrettoError, place_of
from stretto.kernel.dataflow import Graph, graph_of
from stretto.launcher import Job, Launcher, Resources, Role
from stretto.plugins import missing_extra
from stretto.tokenizer import fault_of

__all__ = ["Worker", "context_of", "describe", "graph", "problems", "resources_of", "run_folder", "workers"]


_TRY_S = 60.0
"""What a reward gets to be made, on trial."""


@dataclass(frozen=True)
class Worker:
    """One worker process of the run."""

    id: str
    role: Role
    resources: Resources


def resources_of(config: RunConfig, role: Role) -> Resources:
    """What each process of a role gets."""
    sections: dict[Role, Resources] = {
        "trainer": config.training,
        "inference": config.inference,
        "rollout": config.rollout,
        "verifier": config.verifier,
    }
    return sections[role]


def workers(config: RunConfig) -> list[Worker]:
    """Every worker process the run starts with."""
    counts: dict[Role, int] = {
        "trainer": config.training.processes,
        "inference": config.inference.replicas,
        "rollout": config.rollout.processes,
        "verifier": config.verifier.processes,
    }
    return [
        Worker(f"{role}-{index}", role, resources_of(config, role))
        for role, count in counts.items()
        for index in range(count)
    ]


def context_of(config: RunConfig, *, run: str = "", folder: str = "", worker: str = "kernel") -> Context:
    """What a component is told about the run."""
    return Context(
        run=run, name=config.name, seed=config.seed, model=config.model, folder=folder, worker=worker
    )


def run_folder(config: RunConfig) -> Path:
    """Where the run will write."""
    if config.out is not None:
        return Path(config.out).expanduser().absolute()
    now = datetime.now().astimezone()
    return Path("runs", f"{config.name}-{now:%Y%m%d-%H%M%S}-{config.seed}").absolute()


def graph(composed: Composed) -> Graph:
    """The algorithm's dataflow, checked.

    Raises:
        ConfigError: if it cannot run.
    """
    algorithm: Algorithm = composed.make("algorithm", context_of(composed.config))
    if missing := [name for name in ("models", "calls", "keep") if not hasattr(algorithm, name)]:
        raise ConfigError(
            f"{type(algorithm).__name__} has no {', '.join(missing)}; see stretto.algorithm", path="algorithm"
        )
    return graph_of(algorithm.calls(), algorithm.models)


def problems(composed: Composed) -> list[Problem]:
    """Everything wrong with the run as a whole, errors first."""
    found = list(_problems(composed))
    return sorted(found, key=lambda problem: problem.severity == "warning")


# --------------------------------------------------------------------------------------- problems


def _problems(composed: Composed) -> Iterator[Problem]:
    config = composed.config
    found: list[Problem] = []
    for path in composed.components:
        found += _of_plugin(path, partial(_component_problems, composed, path))
    yield from found
    yield from _model_problems(composed)
    for path in ("dataset", "evaluation.dataset"):
        if path in composed.components:
            yield from _of_plugin(path, partial(_dataset_problems, composed, path))
    yield from _of_plugin("algorithm", partial(_algorithm_problems, composed))
    yield from _sampling_problems(config)
    yield from _thread_problems(config)
    yield from _of_plugin("launcher", partial(_launcher_problems, composed))
    if not any(problem.path.startswith("reward") for problem in found):
        yield from _reward_problems(composed)
    folder = run_folder(config)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if (folder / "config.yaml").exists():
            advice = f"already holds a run; choose another, or go on with it: `stretto resume {folder}`"
        else:
            advice = "is not an empty folder; choose another"
        yield Problem("out", f"{str(folder)!r} {advice}")
    for plugin, error in composed.plugins.life("stretto_run_configured", config=config):
        yield Problem("plugins", f"{plugin}: {error}")


def _of_plugin(path: str, problems: Callable[[], Iterable[Problem]]) -> list[Problem]:
    """What a plugin's code has to say, or how it failed."""
    try:
        return list(problems())
    except StrettoError as error:
        return [Problem(path, str(error))]
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything; it is told
        return [Problem(path, f"the plugin raised {place_of(error)}")]


def _component_problems(composed: Composed, path: str) -> Iterator[Problem]:
    component = composed.components[path]
    if missing := missing_extra(component):
        yield Problem(f"{path}.use", missing)
    elif component.check is not None:
        yield from component.check(composed.section(path), composed.config)


def _launcher_problems(composed: Composed) -> Iterable[Problem]:
    launcher: Launcher = composed.make("launcher", context_of(composed.config))
    return launcher.check([_blank_job(worker) for worker in workers(composed.config)])


def _reward_problems(composed: Composed) -> Iterator[Problem]:
    """Have a scoring process make the reward, as the verifiers will."""
    from stretto.roles.scoring import try_to_make

    document = msgspec.to_builtins(composed.config)
    try:
        error = try_to_make(document, context_of(composed.config), _TRY_S)
    except TimeoutError:
        yield Problem("reward", f"not verified: not made within {_TRY_S:.0f} s", "warning")
        return
    if error:
        yield Problem("reward", error)


def _model_problems(composed: Composed) -> Iterator[Problem]:
    config = composed.config
    if config.model is None:
        for path in ("training", "inference"):
            if composed.components[path].needs_model:
                name = composed.components[path].name
                yield Problem("model", f"required by {path} engine {name!r}: a local folder or a hub id")
        return
    if Path(config.model).is_dir():
        if not Path(config.model, "config.json").exists():
            yield Problem("model", f"{config.model!r} is not a model: the folder has no config.json")
        return
    parts = config.model.split("/")
    written_as_path = config.model.startswith((".", "/", "~")) or len(parts) > 2
    if written_as_path or (len(parts) == 2 and Path(parts[0]).is_dir()):
        yield Problem("model", f"no such folder: {config.model!r}")
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", config.model):
        yield Problem("model", f"{config.model!r} is neither a folder nor a hub id such as 'org/name'")
    else:
        yield from _hub_problems(config.model)


def _hub_problems(model: str) -> Iterator[Problem]:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    try:
        HfApi().model_info(model, timeout=5.0)
    except RepositoryNotFoundError:
        yield Problem("model", f"the hub has no model {model!r}, and there is no such folder")
    except Exception as error:  # noqa: BLE001 - which HTTP library raises what differs between versions
        reason = type(error).__name__
        yield Problem("model", f"{model!r} not verified: the hub cannot be reached ({reason})", "warning")


def _dataset_problems(composed: Composed, path: str) -> Iterator[Problem]:
    dataset: Dataset = composed.make(path, context_of(composed.config))
    if len(dataset) == 0:
        yield Problem(path, "the dataset is empty; expected at least one row")
        return
    row = dataset[0]
    if "prompt" not in row:
        keys = ", ".join(row) or "none"
        yield Problem(path, f"the first row has no column 'prompt'; its columns: {keys}")
    elif fault := fault_of(row["prompt"]):
        yield Problem(path, f"the first row's prompt: {fault}")


def _algorithm_problems(composed: Composed) -> Iterator[Problem]:
    calls = graph(composed).calls
    batch = composed.config.queue.batch_size
    for call in calls:
        if batch % call.minibatches:
            yield Problem(
                "queue.batch_size",
                f"{batch} groups cannot be split into the {call.minibatches} minibatches of {call.name}; "
                f"expected a multiple of {call.minibatches}",
            )


def _sampling_problems(config: RunConfig) -> Iterator[Problem]:
    sampling = config.sampling
    if sampling.temperature == 0:
        yield Problem(
            "sampling.temperature", "0 is greedy: nothing to learn from; expected above 0 in training"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        yield Problem(
            "sampling",
            "top_p < 1 and top_k > 0 are refused in training: the trainer's logprobs would not be those "
            "of the distribution sampled from; they are for `evaluation.sampling`",
        )


def _thread_problems(config: RunConfig) -> Iterator[Problem]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    training = config.training.processes * config.training.threads
    inference = config.inference.replicas * config.inference.threads
    if training + inference > cores:
        yield Problem(
            "training.threads",
            f"{training} training + {inference} inference threads on {cores} cores: oversubscribed threads "
            "wait for each other and run up to 30 times slower; give both together at most the cores",
            "warning",
        )


# ------------------------------------------------------------------------------------- description


def describe(composed: Composed) -> str:
    """The composed run as text: processes, models, batch arithmetic, queue, folder."""
    config = composed.config
    n, batch, bound = config.algorithm.group_size, config.queue.batch_size, config.queue.max_staleness
    lines = [f"run {config.name!r}, seed {config.seed}, {config.steps} steps", ""]
    lines += _table(
        ["role", "processes", "threads", "gpus", "share", "component"],
        [
            ["kernel", "1", "1", "0", "", f"bus: {config.bus.url or 'bundled nats-server'}"],
            *(_role_row(composed, role) for role in ("trainer", "inference", "rollout", "verifier")),
        ],
    )
    lines += ["", f"model      {config.model or 'none'}"]
    for call in graph(composed).calls:
        reads = ", ".join(call.reads) or "-"
        writes = ", ".join(call.writes) or "-"
        lines.append(f"call       {call.name}: {reads} -> {writes}")
    lines += [
        f"batch      {batch} groups x {n} samples = {batch * n} samples a step, "
        f"{batch * n * config.steps} in all",
        f"queue      staleness at most {bound}: up to {(bound + 1) * batch} groups "
        f"({(bound + 1) * batch * n} samples) issued ahead, on_late={config.queue.on_late}",
    ]
    for path in ("dataset", "evaluation.dataset"):
        if path in composed.components:
            dataset: Dataset = composed.make(path, context_of(composed.config))
            name = composed.components[path].name
            lines.append(f"{'rows' if path == 'dataset' else 'held out':10} {len(dataset)} ({name})")
    if config.evaluation is not None:
        every = f", every {config.evaluation.every} versions" if config.evaluation.every else ""
        lines.append(f"evaluation version 0 and {config.steps}{every}")
    every = f"every {config.checkpoint.every} steps and " if config.checkpoint.every else ""
    lines.append(f"checkpoint {every}at the end, the newest {config.checkpoint.keep} kept")
    lines.append(f"writes to  {run_folder(config)}")
    return "\n".join(lines)


def _role_row(composed: Composed, role: Role) -> list[str]:
    members = [worker for worker in workers(composed.config) if worker.role == role]
    resources = members[0].resources
    section = {"trainer": "training", "inference": "inference", "rollout": "workflow", "verifier": "reward"}
    share = f"{resources.share:g}" if resources.gpus else ""
    component = f"{section[role]}: {composed.components[section[role]].name}"
    return [role, str(len(members)), str(resources.threads), str(resources.gpus), share, component]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]


# ----------------------------------------------------------------------------------------- helpers


def _blank_job(worker: Worker) -> Job:
    return Job(worker=worker.id, role=worker.role, command=(), env={}, resources=worker.resources, log="")
