"""Find what is wrong with a composed run before any worker process starts.

Composing a run checks the type of each key. `problems` makes all other checks of `stretto check` and
`stretto run`.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio
import msgspec

from stretto.algorithm import Call
from stretto.assembly.assembly import Worker, context_of, run_folder, workers
from stretto.assembly.assembly import placement as placement_of
from stretto.assembly.compose import Composed, marks_of
from stretto.assembly.placement import Placement
from stretto.assembly.plugins import missing_extra
from stretto.assembly.sections import kind_of
from stretto.assembly.variants import own_sections, run_of_variant, variants_of
from stretto.base.cores import available_cores
from stretto.base.remote_folder import missing_file_system
from stretto.bus.listening import is_loopback, listening
from stretto.bus.probe import faults_of_bus
from stretto.bus.server import binary
from stretto.children.row_check import faults_of_rows, row_checks
from stretto.cli.start.check_rows import ReadRows, RowForm, leaked_rows, read_rows
from stretto.cli.start.folders import is_free
from stretto.component import Problem
from stretto.config import BusConfig, RunConfig
from stretto.dataset import Dataset, Row
from stretto.engine import Sampling
from stretto.errors import BusError, ConfigError, StrettoError
from stretto.kernel.setup import curriculum_of
from stretto.launcher import Job, Launcher
from stretto.models.files import known_config, text_config
from stretto.models.images import IMAGE_COLUMNS, has_images
from stretto.models.tokenizer import Tokenizer, fault_of, load_tokenizer
from stretto.models.vision import is_vision_language
from stretto.tools import ToolsConfig
from stretto.training.config import ModelTrainingConfig
from stretto.user_code.importable import fault_of_importable
from stretto.user_code.sandbox import sandbox_problems

if TYPE_CHECKING:
    from stretto.children.reward import Task

__all__ = ["blank_job", "faults_and_warnings", "problems"]

_TRY_S = 60.0
"""Time limit of each trial: making components, scoring the first rows, or reading a row with images."""
_LOOK_S = 2.0
"""Time limit of the search for a prompt that is short enough."""
_CONNECT_S = 3.0
"""Time limit of the connection to the nats-server at `bus.url`."""
_LENGTH_COLUMN = "completion_tokens"
"""The column with the length of an answer; in a trial it is 1."""
_ANSWER = "0"
"""The answer that the reward scores in its trial."""
_MAX_FORMS = 3
"""Maximum number of rows besides the first that the reward scores in its trial, each with other columns."""
_TRACING_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_FILE_SUFFIXES = (".yaml", ".yml", ".json", ".jsonl", ".safetensors", ".bin", ".pt", ".pth", ".gguf")
_HIGH_TEMPERATURE = 2.0
_FEW_TICKETS = 8
_SHORT_S = 0.1
"""Warn of a shorter time limit of a ticket, a call or a score."""
_TIME_LIMIT = re.compile(
    r"(.*_)?timeout_s|time_s|answer_s|request_s|answer_cpu_s|outage_s|deadline_s|start_s"
)
_FAR_STALENESS = 16
"""Warn about a larger `queue.max_staleness`: the project has measured no run above 8."""


def problems(composed: Composed, *, starting: bool = True, resumed: bool = False) -> list[Problem]:
    """Return everything wrong with the run as a whole, errors first.

    Args:
        starting: the run is about to start. Do not make the engines in a trial: the workers will make them.
        resumed: the run continues in its own folder. Do not check whether that folder is empty.
    """
    faults = [*_problems(composed, starting), *([] if resumed else _folder_problems(composed.config))]
    faults = list(dict.fromkeys(faults))  # a variant has the faults of the sections that it takes over
    return sorted(faults, key=lambda problem: problem.severity == "warning")


def faults_and_warnings(
    composed: Composed, *, starting: bool, resumed: bool = False
) -> tuple[list[str], list[str]]:
    """Return the problems as texts with their places: those that refuse the run, and those that do not.

    Args:
        starting: a fault of this machine's environment refuses the run too.
        resumed: see `problems`.
    """
    faults: list[str] = []
    warnings: list[str] = []
    for problem in problems(composed, starting=starting, resumed=resumed):
        fatal = problem.severity == "error" or (problem.severity == "environment" and starting)
        text = f"{composed.place(problem.path)}: {composed.redact(problem.message)}"
        (faults if fatal else warnings).append(text)
    return faults, warnings


# --------------------------------------------------------------------------------------- problems


def _problems(composed: Composed, starting: bool) -> Iterator[Problem]:
    config = composed.config
    placement = _placement_or_problem(composed)
    section_problems = _section_problems(composed, None if isinstance(placement, Problem) else placement)
    yield from section_problems
    if isinstance(placement, Problem):
        yield placement
        return
    failed_sections = _failed_sections(section_problems)
    with ThreadPoolExecutor() as trials:  # most trials are a process of their own
        tools = trials.submit(lambda: list(_tool_trial_problems(config, failed_sections)))
        server = trials.submit(lambda: list(_server_problems(config)))
        components = trials.submit(
            lambda: list(_trial_problems(composed, placement, starting, failed_sections))
        )
        rows = trials.submit(lambda: list(_row_problems(composed, failed_sections)))
        read: dict[str, ReadRows] = {}
        for path in ("dataset", "evaluation.dataset"):
            if path in composed.components:
                find_problems = partial(_dataset_problems, composed, path, placement, read)
                yield from _plugin_problems(composed, path, find_problems)
        if config.steps:
            yield from leaked_rows(read)
        rewards = trials.submit(lambda: list(_reward_problems(composed, placement, read, failed_sections)))
        yield from _plugin_problems(composed, "model", partial(_model_problems, composed, placement))
        yield from _batch_problems(config, placement)
        if config.steps == 0 and config.evaluation is None:
            yield Problem("steps", "is 0, and there is no `evaluation`: the run would do nothing")
        if placement.graph.samples and config.steps:
            yield from _sampling_problems(config)
        yield from _odd_values(config)
        if config.checkpoint.store and (fault := missing_file_system(config.checkpoint.store)):
            yield Problem("checkpoint.store", fault, "environment")
        if config.tracing is not None and (module := _missing_module(*_TRACING_MODULES)):
            yield Problem("tracing", f"needs {module!r}: pip install 'stretto[otel]'")
        yield from _thread_problems(config, placement)
        yield from _plugin_problems(composed, "launcher", partial(_launcher_problems, composed, placement))
        if config.metrics and not config.metrics.insecure and not is_loopback(config.metrics.address):
            yield Problem(
                "metrics.address",
                f"is {config.metrics.address!r}: other machines could read the figures without login or TLS; "
                "set `metrics.insecure: true` if they may, or listen on loopback",
            )
        if config.metrics is not None and importlib.util.find_spec("prometheus_client") is None:
            needed = "needs prometheus-client: pip install 'stretto[prometheus]'"
            yield Problem("metrics", needed, "environment")
        yield from server.result()
        yield from rewards.result()
        yield from rows.result()
        yield from components.result()
        yield from tools.result()
    yield from _variant_problems(composed, placement, read)


def _server_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that the run's nats-servers answer and can store what the run needs, or that there is one to
    start. Warn of connections that others can read."""
    bus = config.bus
    if bus.servers:
        try:
            faults = anyio.run(faults_of_bus, bus, _CONNECT_S)
        except ConfigError as error:
            yield Problem(error.path, str(error))
            return
        for fault in faults:
            yield Problem(fault.key, fault.message, "environment" if fault.fatal else "warning")
        if (open_servers := _open_servers(bus)) and not bus.insecure:
            yield Problem(
                "bus.url",
                f"no TLS to {', '.join(open_servers)}: whoever can read the network reads the run's "
                "credentials and samples; use tls:// (see docs/nats.md), or set `bus.insecure: true` if you "
                "trust the network",
                "warning",
            )
        if bus.replicas > len(bus.servers):
            yield Problem(
                "bus.url",
                f"names {len(bus.servers)} of at least {bus.replicas} servers: while these are down, no new "
                "process can connect; name all of them",
                "warning",
            )
        return
    try:
        binary()
    except BusError as error:
        yield Problem("bus", str(error), "environment")
    try:
        public = listening(bus).public
    except ConfigError as error:
        yield Problem(error.path, str(error), "environment")
        return
    if public and bus.insecure:
        yield Problem(
            "bus.insecure",
            f"nats-server will listen at {bus.listen} without TLS: whoever can read the network reads the "
            "run's credentials and samples, and with them can do all that its workers can",
            "warning",
        )


def _open_servers(bus: BusConfig) -> list[str]:
    """Return the servers on other machines to which connections have no TLS, without logins."""
    places = [urlsplit(server) for server in bus.servers]
    return [
        f"{place.hostname}:{place.port or 4222}"
        for place in places
        if place.scheme == "nats" and not is_loopback(place.hostname or "")
    ]


def _folder_problems(config: RunConfig) -> Iterator[Problem]:
    """Refuse an output folder that is not empty."""
    if config.out and "://" in config.out:
        advice = "is a URL, and a run's folder is on the kernel's machine; write it as `checkpoint.store`"
        yield Problem("out", f"{config.out!r} {advice}")
        return
    folder = run_folder(config)
    above = next(each for each in folder.absolute().parents if each.exists())
    if not folder.exists() and not (above.is_dir() and os.access(above, os.W_OK)):
        yield Problem(
            "out", f"{str(folder)!r} cannot be written: {str(above)!r} is not writable", "environment"
        )
    if not is_free(folder):
        if (folder / "config.yaml").exists():
            advice = f"already holds a run; choose another folder, or resume it: `stretto resume {folder}`"
        else:
            advice = "is not an empty folder; choose another folder"
        yield Problem("out", f"{str(folder)!r} {advice}")


def _missing_module(*modules: str) -> str:
    """Return the first of these modules that is not installed; empty if all are."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            return error.name or module
    return ""


def _placement_or_problem(composed: Composed) -> Placement | Problem:
    """Return the placement of the dataflow's models, or what is wrong with the dataflow or the placement."""
    try:
        return placement_of(composed)
    except ConfigError as error:
        return Problem(error.path or "algorithm", str(error))
    except StrettoError as error:
        return Problem("algorithm", str(error))
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything; the problem reports it
        return Problem("algorithm", composed.blame(error, "algorithm"))


def _plugin_problems(
    composed: Composed, path: str, problems: Callable[[], Iterable[Problem]]
) -> list[Problem]:
    """Return the problems that a plugin's code reports, or its failure as a problem."""
    try:
        return list(problems())
    except StrettoError as error:
        return [Problem(path, str(error))]
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything; the problem reports it
        return [Problem(path, composed.blame(error, path if path in composed.components else ""))]


def _section_problems(composed: Composed, placement: Placement | None) -> list[Problem]:
    """Return what is wrong with the sections, as far as it can be seen without making a component."""
    found: list[Problem] = []
    for path in composed.components:
        if not path.startswith("variants."):  # a variant is checked as a run of its own
            found += _plugin_problems(composed, path, partial(_component_problems, composed, path, placement))
    return [*found, *_tool_problems(composed.config), *_tracker_problems(composed.config)]


def _failed_sections(section_problems: Iterable[Problem]) -> set[str]:
    """Return the sections with an error. They are not tried: the trial would only repeat the error."""
    return {problem.path.partition(".")[0] for problem in section_problems if problem.severity != "warning"}


def _component_problems(composed: Composed, path: str, placement: Placement | None) -> Iterator[Problem]:
    component, config = composed.components[path], composed.config
    for field in msgspec.structs.fields(type(composed.section(path))):
        value = getattr(composed.section(path), field.name)
        if "model" in marks_of(field.type) and value is not None:
            yield from _source_problems(f"{path}.{field.name}", value)
    if missing := missing_extra(component):
        yield Problem(f"{path}.use", missing)
    elif component.check is not None:
        group = (
            next((candidate for candidate in placement.groups.values() if candidate.path == path), None)
            if placement
            else None
        )
        # Call a training engine's `check` once for each model that it will hold, as the run's `model`.
        runs = [
            msgspec.structs.replace(config, model=_path_of(config, model))
            for model in (group.models if group else ())
        ]
        reported: set[Problem] = set()
        for run in runs or [config]:
            for problem in component.check(composed.section(path), run):
                kind = kind_of(path)  # a check names the keys of its kind's usual section
                if path.startswith(("groups.", f"{kind}.parts.")) and problem.path.startswith(kind):
                    problem = replace(problem, path=path + problem.path.removeprefix(kind))
                if problem not in reported:
                    reported.add(problem)
                    yield problem


def _launcher_problems(composed: Composed, placement: Placement) -> Iterable[Problem]:
    launcher: Launcher = composed.make("launcher", context_of(composed.config))
    return launcher.check([blank_job(worker) for worker in workers(composed.config, placement)])


def _trial_problems(
    composed: Composed, placement: Placement, starting: bool, failed_sections: Set[str]
) -> Iterator[Problem]:
    """Make the components that the kernel does not make, in a child process, to see if they keep their
    contracts. Skip stretto's own components: they keep theirs, and its engines take seconds to import."""
    roles = {worker.role for worker in workers(composed.config, placement)}
    paths = [path for path in composed.components if path.startswith("trackers.")]
    if "inference" in roles:
        paths += ["weights"] if starting else ["weights", "inference"]
    if "rollout" in roles:
        paths.append("workflow")
    if not starting:  # the engine of a larger group needs all its ranks, and there is only one process here
        paths += [group.path for group in placement.groups.values() if group.section.processes == 1]
    yield from _component_trial_problems(composed, paths, failed_sections)


def _component_trial_problems(
    composed: Composed, paths: list[str], failed_sections: Set[str]
) -> Iterator[Problem]:
    """Make the components of these sections in a child process, except stretto's own."""
    from stretto.children.trial import try_to_make

    paths = [
        path
        for path in paths
        if path.partition(".")[0] not in failed_sections and composed.origin(path).distribution != "stretto"
    ]
    if not paths:
        return
    document = msgspec.to_builtins(composed.config)
    try:
        yield from try_to_make(document, paths, context_of(composed.config), _TRY_S)
    except TimeoutError:
        for path in paths:
            yield Problem(path, f"not verified: making it took longer than {_TRY_S:.0f} s", "warning")


def _reward_problems(
    composed: Composed, placement: Placement, read: Mapping[str, ReadRows], failed_sections: Set[str]
) -> Iterator[Problem]:
    """Have a scoring process make the reward and score the first rows, as the verifiers will."""
    config = composed.config
    if config.reward is None:
        scores = placement.graph.scores or config.evaluation is not None
        if scores and not config.workflow.gives_reward:
            yield Problem("reward", "required: the run scores answers; set for example `reward: exact`")
        return
    if "reward" in failed_sections:
        return
    from stretto.children.reward import try_to_score

    tasks = _scoring_tasks(composed, placement, read)
    try:
        error, faults = try_to_score(
            msgspec.to_builtins(config), context_of(config), list(tasks.values()), _TRY_S
        )
    except TimeoutError:
        action = "making it and scoring the first row" if tasks else "making it"
        yield Problem("reward", f"not verified: {action} took longer than {_TRY_S:.0f} s", "warning")
        return
    if error:
        yield Problem("reward", error)
    label, refused, first_faults = composed.origin("reward").label, set[str](), set[str]()
    for (path, form), fault in zip(tasks, faults, strict=False):  # none if the reward cannot be made
        if fault and form is None:
            refused.add(path)
            if fault not in first_faults:  # most faults are of the reward, not of a dataset
                first_faults.add(fault)
                yield Problem("reward", f"{label} cannot score the first row of `{path}`: {fault}")
        elif fault and form is not None and path not in refused:
            yield Problem(
                "reward",
                f"{label} cannot score row {form.index + 1} of `{path}`, and {form.count:,} of "
                f"{read[path].read:,} rows have these columns; their tickets would fail: {fault}",
                "warning",
            )


def _scoring_tasks(
    composed: Composed, placement: Placement, read: Mapping[str, ReadRows]
) -> dict[tuple[str, RowForm | None], Task]:
    """Return the tasks of the reward's trial, by the section of the dataset that has the row, with the row's
    form if it is not that of the first row."""
    from stretto.children.reward import Task

    columns = composed.components["workflow"].reward_columns
    if columns is None:
        return {}
    evaluation = composed.config.evaluation
    samples = {
        "dataset": placement.graph.source.samples if placement.graph.scores and composed.config.steps else 0,
        "evaluation.dataset": evaluation.samples if evaluation is not None else 0,
    }
    hidden = IMAGE_COLUMNS if is_vision_language(known_config(composed.config.model)) else ()
    known = set(columns) <= {_LENGTH_COLUMN}  # the values of other columns are the workflow's
    tasks: dict[tuple[str, RowForm | None], Task] = {}
    for path, rows in read.items():
        # The reward's own check of rows, if it has one, says more of the rows after the first.
        others = [] if row_checks(composed, "reward") else rows.other_forms(_MAX_FORMS)
        for form in [None, *others] if samples[path] else []:
            row, count = (rows.first, samples[path]) if form is None else (form.row, 1)
            tasks[path, form] = Task(
                msgspec.msgpack.encode({name: value for name, value in row.items() if name not in hidden}),
                (_ANSWER,) * count if known else (),
                msgspec.msgpack.encode({name: [1] * count if known else [] for name in columns}),
            )
    return tasks


def _tool_problems(config: RunConfig) -> Iterator[Problem]:
    """Find what is wrong with the tools of a workflow without making them."""
    section = config.workflow
    if not isinstance(section, ToolsConfig):
        return
    if not section.tools and not section.mcp:
        yield Problem(
            "workflow.tools", "there is no tool; list functions here, or MCP servers in `workflow.mcp`"
        )
        return
    for index, reference in enumerate(section.tools):
        if fault := fault_of_importable(reference):
            yield Problem(f"workflow.tools.{index}", fault)
    if section.mcp and importlib.util.find_spec("mcp") is None:
        yield Problem("workflow.mcp", "needs mcp: pip install 'stretto[mcp]'", "environment")
    for index, server in enumerate(section.mcp):
        if server.url is not None and not section.network:
            yield Problem(
                f"workflow.mcp.{index}.url",
                "the tools cannot reach it without a network; set `workflow.network: true`",
            )
    yield from sandbox_problems(config, network=section.network)


def _tracker_problems(config: RunConfig) -> Iterator[Problem]:
    """Find trackers that would share a folder."""
    folders = Counter(section.folder_name for section in config.trackers)
    for index, section in enumerate(config.trackers):
        if folders[section.folder_name] > 1:
            yield Problem(
                f"trackers.{index}.folder",
                f"another tracker has the folder {section.folder_name!r} too; give each its own `folder`",
            )


def _tool_trial_problems(config: RunConfig, failed_sections: Set[str]) -> Iterator[Problem]:
    """Make the tools of a workflow in a child process, as the verifiers will."""
    from stretto.children.tools import try_to_make

    if isinstance(config.workflow, ToolsConfig) and failed_sections.isdisjoint({"workflow", "sandbox"}):
        yield from try_to_make(config.workflow, config)


def _row_problems(
    composed: Composed, failed_sections: Set[str], sections: Iterable[str] = ("reward", "workflow")
) -> Iterator[Problem]:
    """Check rows of the datasets with the `check_row` of reward and workflow, in child processes."""
    document = msgspec.to_builtins(composed.config)
    datasets = [path for path in ("dataset", "evaluation.dataset") if path in composed.components]
    for section in sections:
        if section not in failed_sections and row_checks(composed, section):
            for path in datasets:
                yield from _row_problems_of(composed, document, section, path)


def _row_problems_of(
    composed: Composed, document: Mapping[str, object], section: str, path: str
) -> Iterator[Problem]:
    try:
        faults = faults_of_rows(document, path, section, context_of(composed.config), _TRY_S)
    except TimeoutError:
        yield Problem(path, f"rows not verified: checking them took longer than {_TRY_S:.0f} s", "warning")
    except ChildProcessError as error:
        yield Problem(path, f"rows not verified: {error}", "warning")
    else:
        if faults.faulty:
            number = (
                "all rows"
                if faults.read == faults.rows
                else f"{faults.read:,} of {faults.rows:,} rows, drawn at random"
            )
            examples = "".join(f"\n  row {index + 1}: {fault}" for index, fault in faults.first)
            ellipsis = "\n  …" if faults.faulty > len(faults.first) else ""
            use = "score" if section == "reward" else "use"
            yield Problem(
                path,
                f"the {section} cannot {use} {faults.faulty:,} of {faults.read:,} rows, and their tickets "
                f"would fail (checked: {number}):{examples}{ellipsis}",
                "error" if faults.faulty == faults.read else "warning",
            )


def _model_problems(composed: Composed, placement: Placement) -> Iterator[Problem]:
    """Check the sources of the models, and whether the models fit together."""
    config, graph = composed.config, placement.graph
    sampling = graph.samples or config.evaluation is not None
    if config.model is not None:
        yield from _source_problems("model", config.model)
        inference = composed.components["inference"]
        if sampling:
            yield from _context_problems(config)
            yield from _token_problems(config)
        trained = isinstance(placement.lead.section, ModelTrainingConfig)
        if trained and graph.samples and config.steps and not inference.needs_model:
            yield Problem(
                "inference.use",
                f"{inference.name!r} samples answers without {config.model!r}, and the run trains that model "
                "on them; choose an engine that has the model, or `training: mock`",
                "warning",
            )
        if sampling and not inference.reads_images and is_vision_language(known_config(config.model)):
            yield Problem(
                "inference.use",
                f"{inference.name!r} reads text only, but {config.model!r} is a vision-language model",
            )
    else:
        paths = [group.path for group in placement.groups.values()]
        for path in [*paths, *(["inference"] if sampling else [])]:
            if composed.components[path].needs_model:
                name = composed.components[path].name
                yield Problem(
                    "model", f"required by the {path} engine {name!r}; give a local folder or a hub id"
                )
    for name, own in config.models.items():
        if own.path is not None:
            yield from _source_problems(f"models.{name}.path", own.path)
            yield from _vocabulary_problems(f"models.{name}.path", own.path, config.model)
        if own.lr is not None and not graph.models[name].trainable:
            yield Problem(f"models.{name}.lr", "has no effect: the algorithm does not train it", "warning")
    if config.evaluation is not None and graph.models[graph.lead].head != "policy":
        yield Problem(
            "evaluation",
            f"it samples answers from the model {graph.lead!r}, which is not a policy; remove `evaluation`",
        )
    section, source = placement.lead.section, _path_of(config, graph.lead)
    lora = section.lora if isinstance(section, ModelTrainingConfig) else None
    if sampling and lora is not None and lora.send == "adapter" and source != config.model:
        yield Problem(
            f"{placement.lead.path}.lora.send",
            f"is 'adapter': inference workers would apply the adapter to {config.model!r}, but the run "
            f"trains {source!r}; set it to 'merged'",
        )


def _context_problems(config: RunConfig) -> Iterator[Problem]:
    """Find samples that are longer than the model's positions, if its config is on this machine."""
    positions = text_config(config.model).get("max_position_embeddings")
    if positions is None:
        return
    room: int | None = getattr(config.inference, "context_length", None)
    if room is not None and room > positions:
        # A server may extend them; the engine `torch` refuses to.
        yield Problem(
            "inference.context_length",
            f"is {room}, but {config.model!r} has {positions} positions",
            "error" if config.inference.use == "torch" else "warning",
        )
    for path, sampling in _samplings(config):
        if room is None and sampling.max_tokens >= positions:
            yield Problem(
                f"{path}.max_tokens",
                f"is {sampling.max_tokens}, but {config.model!r} has {positions} positions for prompt and "
                "answer",
            )
        elif room is not None and path != "sampling" and sampling.max_tokens >= room:
            yield Problem(
                f"{path}.max_tokens",
                f"is {sampling.max_tokens}, but inference.context_length, for prompt and answer, is {room}",
            )
    canary = config.inference.canary
    if canary is not None and canary.tokens > min(room or positions, positions):
        yield Problem(
            "inference.canary.tokens",
            f"is {canary.tokens}, more than a sample can have ({min(room or positions, positions)})",
        )


def _token_problems(config: RunConfig) -> Iterator[Problem]:
    """Find token ids that the model does not have, if its config is on this machine."""
    vocabulary, reported = _vocabulary(config.model), set[tuple[str, int]]()
    for path, sampling in _samplings(config):
        for key, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
            unknown = [token for token in ids if vocabulary and not 0 <= token < vocabulary]
            if unknown and (key, unknown[0]) not in reported:  # an evaluation takes over keys of `sampling`
                reported.add((key, unknown[0]))
                yield Problem(
                    f"{path}.{key}",
                    f"has the token {unknown[0]}, but {config.model!r} has a vocabulary of {vocabulary}: the "
                    "ids begin at 0",
                )


def _samplings(config: RunConfig) -> Iterator[tuple[str, Sampling]]:
    """Yield the run's ways to sample, each with its dotted key."""
    yield "sampling", config.sampling
    if config.evaluation is not None and config.evaluation.sampling is not None:
        yield "evaluation.sampling", config.evaluation.sampling


def _path_of(config: RunConfig, model: str) -> str | None:
    settings = config.models.get(model)
    return (settings.path if settings else None) or config.model


def _vocabulary_problems(path: str, model: str, run_model: str | None) -> Iterator[Problem]:
    """Refuse a vocabulary of another size: every model of a run gets the token ids of `model`'s tokenizer."""
    own, expected = _vocabulary(model), _vocabulary(run_model)
    if own and expected and own != expected:
        yield Problem(
            path,
            f"{model!r} has a vocabulary of {own} tokens, but the run's model ({run_model}) has {expected}: "
            "both get the same token ids, so they must have the same tokenizer",
        )


def _vocabulary(model: str | None) -> int | None:
    """Return the size of a model's vocabulary; None if its config cannot be read on this machine."""
    config = known_config(model)
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")


def _source_problems(path: str, model: str) -> Iterator[Problem]:
    """Check that a model is a folder with a model, or a hub id that exists."""
    if Path(model).is_file():
        yield Problem(path, f"{model!r} is a file; expected the folder of a model, or a hub id")
        return
    if Path(model).is_dir():
        if not Path(model, "config.json").exists():
            yield Problem(path, f"{model!r} is not a model: the folder has no config.json")
        return
    parts = model.split("/")
    looks_like_path = model.startswith((".", "/", "~")) or len(parts) > 2 or model.endswith(_FILE_SUFFIXES)
    if looks_like_path or (len(parts) == 2 and Path(parts[0]).is_dir()):
        yield Problem(path, f"no such folder: {model!r}")
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        yield Problem(path, f"{model!r} is neither a folder nor a hub id such as 'org/name'")
    else:
        yield from _hub_problems(path, model)


def _hub_problems(path: str, model: str) -> Iterator[Problem]:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    try:
        HfApi().model_info(model, timeout=5.0)
    except RepositoryNotFoundError:
        yield Problem(path, f"no model {model!r}: the hub does not have it, and there is no such folder")
    except Exception as error:  # noqa: BLE001 - the exceptions differ between versions of the hub's client
        reason = type(error).__name__
        text = f"{model!r} not verified: there is no such folder, and the hub cannot be reached ({reason})"
        yield Problem(path, text, "warning")


def _dataset_problems(
    composed: Composed, path: str, placement: Placement, read: dict[str, ReadRows]
) -> Iterator[Problem]:
    """Check the rows of a dataset. Store what was read in `read` if the first row has a valid prompt."""
    config, graph = composed.config, placement.graph
    dataset: Dataset = composed.make(path, context_of(config))
    if len(dataset) == 0:
        yield Problem(path, "the dataset is empty; expected at least one row")
        return
    if path == "dataset":
        curriculum_of(composed, dataset)
    row = dataset[0]
    if "prompt" not in row:
        keys = ", ".join(row) or "none"
        yield Problem(path, f"the first row has no column 'prompt'; its columns: {keys}")
        return
    if fault := fault_of(row["prompt"]):
        yield Problem(path, f"the first row's prompt: {fault}")
        return
    read[path] = rows = read_rows(dataset)
    yield from rows.problems(path)
    if is_vision_language(model := known_config(config.model)):
        yield from _image_problems(composed, path)
    elif model and has_images(row):
        yield Problem(
            path,
            f"the first row has images, but the model {config.model!r} does not read images; choose a "
            "vision-language model, or rows without the columns 'images' and 'image'",
        )
    elif path == "dataset" and graph.source.encode is not None:
        yield from _encoding_problems(config.model, graph.source, rows)
    elif config.model is None or Path(config.model, "tokenizer.json").exists():
        yield from _length_problems(composed, path, placement, dataset)
    if path != "dataset" and config.evaluation is not None and (config.evaluation.rows or 0) > len(dataset):
        yield Problem(
            "evaluation.rows",
            f"is {config.evaluation.rows}, but the dataset has {len(dataset)} rows: the run uses all of them",
            "warning",
        )
    if path == "dataset" and len(dataset) < config.queue.batch_size and config.steps:
        yield Problem(
            "queue.batch_size",
            f"is {config.queue.batch_size}, but the dataset has {len(dataset)} rows: one step would train on "
            "the same row several times",
            "warning",
        )


def _answer_problems(config: RunConfig, row: Row, tokenizer: Tokenizer) -> Iterator[Problem]:
    """Warn if the answer in the first row is longer than a sample can be."""
    answer, limit = row.get("answer"), config.sampling.max_tokens
    if isinstance(answer, str) and (length := len(tokenizer.encode_text(answer))) > limit:
        yield Problem(
            "sampling.max_tokens",
            f"is {limit}, but the answer in the first row has {length} tokens: answers like it are cut",
            "warning",
        )


def _length_problems(
    composed: Composed, path: str, placement: Placement, dataset: Dataset
) -> Iterator[Problem]:
    """Find prompts that are all longer than the limit, or so long that a sequence exceeds a micro-batch."""
    config = composed.config
    limit = composed.section(path).max_prompt_tokens
    tokenizer = load_tokenizer(config.model)
    tokens = len(tokenizer.encode_prompt(dataset[0]["prompt"]))
    whole: int | None = getattr(config.workflow, "max_tokens", None)
    if whole is not None and tokens >= whole:
        yield Problem(
            "workflow.max_tokens",
            f"is {whole}, but the first row's prompt has {tokens} tokens: there is no room for an answer",
            "warning",
        )
    if limit is not None and tokens > limit:
        yield from _limit_problems(f"{path}.max_prompt_tokens", limit, tokenizer, dataset)
    elif path == "dataset" and config.steps:
        yield from _answer_problems(config, dataset[0], tokenizer)
        longest = tokens + config.sampling.max_tokens
        context: int | None = getattr(config.inference, "context_length", None)
        if placement.graph.samples and context is not None and longest > context:
            yield Problem(
                "inference.context_length",
                f"is {context}; the first row's prompt has {tokens} tokens, and with sampling.max_tokens, "
                f"{config.sampling.max_tokens}, a sample needs {longest}: the tickets of such rows fail",
                "warning",
            )
        for group in placement.groups.values():
            budget = (
                group.section.micro_batch_tokens
                if isinstance(group.section, ModelTrainingConfig)
                else longest
            )
            if budget < longest:
                yield Problem(
                    f"{group.path}.micro_batch_tokens",
                    f"is {budget}, but a sequence can have {longest} tokens: the first row's prompt has "
                    f"{tokens}, and sampling.max_tokens is {config.sampling.max_tokens}. A sequence above "
                    "the limit gets a micro-batch of its own, which takes more memory",
                    "warning",
                )


def _limit_problems(path: str, limit: int, tokenizer: Tokenizer, dataset: Dataset) -> Iterator[Problem]:
    """Look for a prompt that is short enough, for `_LOOK_S` seconds at most."""
    start, shortest, count = time.monotonic(), math.inf, 0
    while count < len(dataset) and time.monotonic() - start < _LOOK_S:
        shortest = min(shortest, len(tokenizer.encode_prompt(dataset[count]["prompt"])))
        count += 1
        if shortest <= limit:
            return
    every = count == len(dataset)
    yield Problem(
        path,
        f"is {limit}, but the prompts of {'all' if every else 'the first'} {count} rows are longer (the "
        f"shortest has {shortest} tokens): the run would skip these rows",
        "error" if every else "warning",
    )


def _image_problems(composed: Composed, path: str) -> Iterator[Problem]:
    """Read the first row with the model's processor in a child process, if the model is on this machine."""
    from stretto.children.first_row import fault_of_first_row

    config = composed.config
    if config.model is None or not Path(config.model).is_dir() or importlib.util.find_spec("PIL") is None:
        return
    try:
        fault = fault_of_first_row(msgspec.to_builtins(config), path, context_of(config), _TRY_S)
    except TimeoutError:
        yield Problem(path, f"not verified: reading the first row took longer than {_TRY_S:.0f} s", "warning")
        return
    if fault:
        yield Problem(path, f"the first row: {fault}")


def _encoding_problems(model: str | None, source: Call, rows: ReadRows) -> Iterator[Problem]:
    """Have the algorithm make the sequences of the first row, and of rows of other forms, if the tokenizer is
    on this machine."""
    if source.encode is None or (model is not None and not Path(model).is_dir()):
        return
    tokenizer = load_tokenizer(model)

    def fault_in(row: Row) -> str:
        assert source.encode is not None
        try:
            for index in range(source.samples):
                source.encode(row, index, tokenizer)
        except ConfigError as error:
            return str(error)
        return ""

    if fault := fault_in(rows.first):
        yield Problem("dataset", f"the first row: {fault}")
        return
    for form in rows.other_forms(_MAX_FORMS):
        if fault := fault_in(form.row):
            yield Problem(
                "dataset",
                f"row {form.index + 1}: {fault}; {form.count:,} of {rows.read:,} rows have these columns",
                "warning",
            )


def _batch_problems(config: RunConfig, placement: Placement) -> Iterator[Problem]:
    """Find batches that cannot be split into a call's minibatches, or over a group's data-parallel ranks."""
    graph, batch = placement.graph, config.queue.batch_size
    for call in graph.step_calls:
        if batch % call.minibatches:
            yield Problem(
                "queue.batch_size",
                f"{batch} groups cannot be split into the {call.minibatches} minibatches of call "
                f"{call.name!r}; expected a multiple of {call.minibatches}",
            )
        group = placement.group_of(call)
        by_group = call.loss is not None and call.loss.unit == "group"
        units = batch // call.minibatches * (1 if by_group else graph.source.samples)
        if call.op != "function" and units < (parts := group.section.data_parallel):
            yield Problem(
                "queue.batch_size",
                f"call {call.name!r} has {units} {'groups' if by_group else 'sequences'} for the {parts} "
                f"data-parallel ranks of {group.path!r}; expected at least one for each rank",
            )
    if not graph.samples and config.queue.max_divergence is not None:
        yield Problem(
            "queue.max_divergence",
            "limits how far sampled answers are off-policy, but this algorithm samples none: it trains on "
            "the rows themselves; remove it",
        )
    if not graph.samples and config.dataset.max_prompt_tokens is not None:
        yield Problem(
            "dataset.max_prompt_tokens",
            "limits the prompts of sampled answers, but this algorithm samples none: it trains on the rows "
            "themselves; remove it",
        )


def _sampling_problems(config: RunConfig) -> Iterator[Problem]:
    sampling = config.sampling
    if sampling.temperature == 0:
        yield Problem(
            "sampling.temperature",
            "0 is greedy: all answers of a group are equal, so nothing can be learned; expected above 0 in "
            "training",
        )
    if sampling.reshapes:
        yield Problem(
            "sampling",
            "training does not allow top_p < 1, top_k > 0, min_p > 0 or logit_bias: the trainer's logprobs "
            "would belong to another distribution than the sampled one; use them in `evaluation.sampling`",
        )
    if sampling.temperature > _HIGH_TEMPERATURE:
        yield Problem(
            "sampling.temperature",
            f"is {sampling.temperature:g}: answers become almost random tokens; usual values are 0.6 to 1.2",
            "warning",
        )
    if config.model is not None and sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
        yield Problem(
            "sampling.ignore_eos",
            "is true, and there is no `stop` and no `stop_token_ids`: every answer has sampling.max_tokens "
            "tokens",
            "warning",
        )


def _variant_problems(
    composed: Composed, placement: Placement, read: Mapping[str, ReadRows]
) -> Iterator[Problem]:
    """Check the A/B test as a whole, and each variant as a run of its own."""
    config, variants = composed.config, variants_of(composed.config)
    if not variants:
        return
    if not placement.graph.samples:
        yield Problem(
            "variants",
            "they compare sampled answers, but this algorithm samples none: it trains on the rows "
            "themselves; remove them",
        )
        return
    if len(variants) == 1:
        yield Problem(
            "variants",
            f"{next(iter(variants))!r} is the only variant, so there is nothing to compare it with; add "
            "another: one with nothing but a weight, such as `base: {weight: 1}`, has the run's own sections",
        )
    for name, variant in variants.items():
        temperature = config.sampling.temperature
        if variant.sampling is not None and variant.sampling.temperature != temperature:
            yield Problem(
                f"variants.{name}.sampling.temperature",
                f"is {variant.sampling.temperature:g}, but a train step computes all its logprobs at one "
                f"temperature, that of `sampling` ({temperature:g}); compare temperatures in runs of their "
                "own: stretto sweep FILE sampling.temperature=…",
            )
        if variant.reward is not None and placement.graph.source.samples == 1:
            yield Problem(
                f"variants.{name}.reward",
                "with a single answer to each prompt, training compares answers of different variants, and "
                "their rewards may differ in scale; expected algorithm.group_size of at least 2",
            )
        own, run = own_sections(variant).keys(), run_of_variant(composed, name)
        for problem in _run_problems_of_variant(run, own, placement, read):
            is_own = problem.path.partition(".")[0] in own
            yield replace(problem, path=f"variants.{name}.{problem.path}") if is_own else problem


def _run_problems_of_variant(
    run: Composed, own: Set[str], placement: Placement, read: Mapping[str, ReadRows]
) -> Iterator[Problem]:
    """Check a variant as a run, as far as its own sections matter.

    Args:
        own: the sections that the variant has of its own.
    """
    section_problems = _section_problems(run, placement)
    failed_sections = _failed_sections(section_problems)
    yield from section_problems
    yield from _sampling_problems(run.config)
    if run.config.model is not None:
        yield from _token_problems(run.config)
    if "workflow" in own:
        yield from _component_trial_problems(run, ["workflow"], failed_sections)
        yield from _tool_trial_problems(run.config, failed_sections)
    if not own.isdisjoint({"workflow", "reward"}):
        yield from _reward_problems(run, placement, read, failed_sections)
    yield from _row_problems(run, failed_sections, own & {"reward", "workflow"})


def _odd_values(config: RunConfig) -> Iterator[Problem]:
    """Warn about values that are allowed but are probably a mistake."""
    bound, evaluation = config.queue.max_staleness, config.evaluation
    for path, seconds in _time_limits(config):
        if seconds < _SHORT_S:
            yield Problem(
                path, f"is {seconds:g}: nothing ends in so short a time; the unit is seconds", "warning"
            )
    capacity = config.rollout.concurrency * config.rollout.processes
    if config.steps and capacity < min(config.queue.batch_size / 4, _FEW_TICKETS):
        yield Problem(
            "rollout.concurrency",
            f"is {config.rollout.concurrency}: rollout workers run {capacity} of the "
            f"{config.queue.batch_size} tickets of a batch at once; the others wait (see docs/choosing.md)",
            "warning",
        )
    if config.checkpoint.keep_best and evaluation is None:
        yield Problem(
            "checkpoint.keep_best",
            "has no effect: there is no `evaluation` that says which version is the best",
            "warning",
        )
    greedy = evaluation is not None and (evaluation.sampling or config.sampling).temperature == 0
    if evaluation is not None and evaluation.samples > 1 and greedy:
        yield Problem(
            "evaluation.samples",
            f"is {evaluation.samples}, but at temperature 0 all answers to a row are equal; set it to 1, or "
            "`evaluation.sampling.temperature` above 0",
            "warning",
        )
    if bound > _FAR_STALENESS:
        yield Problem(
            "queue.max_staleness",
            f"is {bound}: tokens may be {bound} train steps old, and training on them rarely works; usual "
            "values are 0 to 8",
            "warning",
        )
    if evaluation is not None and config.steps and evaluation.every > config.steps:
        yield Problem(
            "evaluation.every",
            f"is {evaluation.every}, but the run has {config.steps} steps: the run evaluates only versions 0 "
            f"and {config.steps}",
            "warning",
        )


def _time_limits(struct: msgspec.Struct, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the time limits of a section and of the sections in it, in seconds, each with its dotted key."""
    for key in struct.__struct_fields__:
        value = getattr(struct, key)
        inner = f"{path}.{key}" if path else key
        if isinstance(value, msgspec.Struct):
            yield from _time_limits(value, inner)
        elif isinstance(value, float) and _TIME_LIMIT.fullmatch(key):
            yield inner, value


def _thread_problems(config: RunConfig, placement: Placement) -> Iterator[Problem]:
    cores = available_cores()
    run_workers = workers(config, placement)
    trainers = [worker for worker in run_workers if worker.role == "trainer" and config.steps]
    training = sum(worker.resources.threads for worker in trainers)
    inference = sum(worker.resources.threads for worker in run_workers if worker.role == "inference")
    if training + inference > cores:
        yield Problem(
            "training.threads",
            f"{training} training + {inference} inference threads on {cores:g} cores: threads that share "
            "cores wait for each other and run up to 30 times slower; expected at most "
            f"{cores:.0f} threads in all",
            "warning",
        )


def blank_job(worker: Worker) -> Job:
    """Return the job of a worker without its command: enough to find it a place."""
    return Job(
        worker=worker.id,
        role=worker.role,
        command=(),
        env={},
        resources=worker.resources,
        log="",
        unit=worker.unit,
    )
