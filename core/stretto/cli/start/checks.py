"""All checks of `stretto check` and `stretto run` before a worker starts. Composing checks types."""

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from stretto.algorithm import Stateful
from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import marks_of
from stretto.assembly.plugins import missing_extra
from stretto.assembly.sections import kind_of
from stretto.assembly.variants import own_sections, variants_of
from stretto.assembly.worker_numbers import EVALUATOR
from stretto.bus.probe import bus_problems
from stretto.cli.start.check_memory import memory_problems
from stretto.cli.start.check_models import loaded_models, model_problems, source_problems, token_problems
from stretto.cli.start.check_rows import ReadRows, RowForm, dataset_problems, leaked_rows
from stretto.cli.start.folders import is_free
from stretto.cli.start.row_check import faults_of_rows, row_checks
from stretto.component import Problem
from stretto.config import RunConfig
from stretto.errors import ConfigError, StrettoError
from stretto.launcher import Launcher
from stretto.machine.cores import available_cores
from stretto.machine.gpus import visible_gpus
from stretto.machine.interfaces import is_loopback
from stretto.models.files import known_config
from stretto.models.images import IMAGE_COLUMNS
from stretto.models.vision import is_vision_language
from stretto.records.remote_folder import missing_file_system
from stretto.tools import ToolsConfig
from stretto.training.memory import end_counting
from stretto.training.source_files import tensor_problems
from stretto.user_code.importable import fault_of_importable
from stretto.user_code.plain_data import encode_row
from stretto.user_code.reward import ScoringResult, Task, try_to_score
from stretto.user_code.sandbox import sandbox_problems

T = TypeVar("T")

_warning = partial(Problem, severity="warning")

_TRY_S = 60.0  # time limit of each trial: making components, or scoring the first rows
_NOT_TRIED = "the run does not need this check; move downloads and large imports out of it"
_LENGTH_COLUMN = "completion_tokens"
"""The column with the length of an answer; in a trial it is 1."""
_ANSWER = "0"  # the text of an answer in a trial of the reward
_HIGH_TEMPERATURE = 2.0
_FEW_TICKETS = 8  # warn of fewer tickets at once, unless they are a quarter of the batch
_SHORT_S = 0.1  # warn of a shorter time limit of a ticket, a call or a score
_TIME_LIMIT = re.compile(
    r"(.*_)?timeout_s|time_s|answer_s|request_s|answer_cpu_s|outage_s|deadline_s|start_s"
)
_FAR_STALENESS = 16
"""Warn about a larger `queue.max_staleness`: the project has measured no run above 8."""


def problems(
    assembly: Assembly,
    *,
    starting: bool = True,
    resumed: bool = False,
    memory_limit: bool = True,
    trials: bool = True,
) -> list[Problem]:
    """Return everything that is wrong with the run, errors first. No trial makes the engines of a `starting`
    run, because its workers make them. Only a run that is not `resumed` needs an empty folder and, if
    `memory_limit`, enough memory. `trials`: look not only at the keys."""
    faults = [] if resumed else [*_folder_problems(assembly)]
    try:
        faults += _problems(assembly, starting, memory_limit and not resumed, trials)
    finally:
        end_counting()
    # Drop repeated problems: a variant repeats those of inherited sections, an engine those of each model.
    faults = list(dict.fromkeys(faults))
    return sorted(faults, key=lambda problem: problem.severity == "warning")


def faults_and_warnings(
    assembly: Assembly, *, starting: bool, **options: bool
) -> tuple[list[str], list[str]]:
    """Return the texts of faults and of warnings. This machine's faults refuse only a `starting` run.
    `options`: those of `problems`."""
    composed = assembly.composed
    faults: list[str] = []
    warnings: list[str] = []
    for problem in problems(assembly, starting=starting, **options):
        text = f"{composed.place(problem.path)}: {composed.redact(problem.message)}"
        is_fatal = _is_fatal(problem, starting)
        text += "; a run cannot start here" if problem.severity == "environment" and not is_fatal else ""
        (faults if is_fatal else warnings).append(text)
    return faults, warnings


def _is_fatal(problem: Problem, starting: bool) -> bool:
    return problem.severity == "error" or (problem.severity == "environment" and starting)


def _problems(assembly: Assembly, starting: bool, memory_limit: bool, trials: bool) -> Iterator[Problem]:
    config, components = assembly.config, assembly.composed.components
    placement_problems = _plugin_problems(assembly, "algorithm", _placement_problems(assembly))
    section_problems = _section_problems(assembly, is_placed=not placement_problems)
    found = [*section_problems, *placement_problems]
    found += [] if placement_problems else _key_problems(assembly)
    yield from found
    if not trials or any(_is_fatal(problem, starting) for problem in found):
        return  # trials take long, and so do rows
    failed_sections = _failed_sections(section_problems)
    with ThreadPoolExecutor() as pool:  # most trials run in a process of their own
        tools = pool.submit(list, _tool_trial_problems(assembly, failed_sections))
        server = pool.submit(list, bus_problems(config.bus))
        made = pool.submit(list, _trial_problems(assembly, starting, failed_sections))
        loaded = [] if starting else loaded_models(assembly)  # a trainer that starts compares them itself
        tensors = pool.submit(list, tensor_problems(loaded))
        read: dict[str, ReadRows] = {}
        wait([tools])  # the prompts that are checked below show the tools
        for path in ("dataset", "evaluation.dataset"):
            if path in components:
                yield from _plugin_problems(assembly, path, dataset_problems(assembly, path, read))
        if config.steps:
            yield from leaked_rows(read)
        rewards = pool.submit(list, _reward_problems(assembly, read, failed_sections))
        rows = pool.submit(list, _row_problems(assembly, read, failed_sections))
        yield from _plugin_problems(assembly, "model", memory_problems(assembly, limited=memory_limit))
        yield from _plugin_problems(assembly, "launcher", _launcher_problems(assembly))
        for trial in (server, rewards, rows, made, tools, tensors):
            yield from trial.result()
    yield from _variant_problems(assembly, read)


def _key_problems(assembly: Assembly) -> Iterator[Problem]:
    """Yield what the values of keys show, without a trial and without rows."""
    yield from _plugin_problems(assembly, "model", model_problems(assembly))
    yield from _batch_problems(assembly)
    if assembly.graph.samples and assembly.config.steps:
        yield from _sampling_problems(assembly.config)
    yield from _sleep_problems(assembly)
    yield from _measure_problems(assembly)
    yield from _value_problems(assembly.config)
    yield from _odd_values(assembly.config)
    yield from _thread_problems(assembly)
    yield from _gpu_problems(assembly)
    yield from _variant_problems(assembly, None)


def _folder_problems(assembly: Assembly) -> Iterator[Problem]:
    config, folder = assembly.config, assembly.folder
    if config.out and "://" in config.out:
        advice = "is a URL, and a run's folder is on the kernel's machine; write it as `checkpoint.store`"
        yield Problem("out", f"{config.out!r} {advice}")
        return
    parent = next(ancestor for ancestor in folder.absolute().parents if ancestor.exists())
    if not folder.exists() and not (parent.is_dir() and os.access(parent, os.W_OK)):
        yield Problem(
            "out", f"{str(folder)!r} cannot be written: {str(parent)!r} is not writable", "environment"
        )
    if not is_free(folder):
        if (folder / "config.yaml").exists():
            advice = f"already holds a run; choose another folder, or resume it: `stretto resume {folder}`"
        else:
            advice = "is not an empty folder; choose another folder"
        yield Problem("out", f"{str(folder)!r} {advice}")


def _placement_problems(assembly: Assembly) -> Iterator[Problem]:
    try:
        _ = assembly.placement
    except ConfigError as error:
        yield Problem(error.path or "algorithm", str(error))


def _plugin_problems(assembly: Assembly, path: str, problems: Iterator[Problem]) -> list[Problem]:
    """Return the problems that a plugin's code reports, or its failure as a problem. The error of a dataset
    may name a key of its section."""
    try:
        return list(problems)
    except StrettoError as error:
        key: str = getattr(error, "path", "") if path.endswith("dataset") else ""
        is_own = key and hasattr(assembly.composed.section(path), key.partition(".")[0])
        return [Problem(f"{path}.{key}" if is_own else path, str(error))]
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything; the problem reports it
        components = assembly.composed.components
        return [Problem(path, assembly.composed.blame(error, path if path in components else ""))]


def _section_problems(assembly: Assembly, *, is_placed: bool = True) -> list[Problem]:
    """Return the problems of the sections that can be found without making a component."""
    problems_of_sections: list[Problem] = []
    groups = assembly.placement.groups.values() if is_placed else ()
    models = {group.path: group.models for group in groups}
    for path in assembly.composed.components:
        if not path.startswith("variants."):  # a variant is checked as a run of its own
            of_component = _component_problems(assembly, path, models.get(path, ()))
            problems_of_sections += _plugin_problems(assembly, path, of_component)
    return [*problems_of_sections, *_tool_problems(assembly.config), *_tracker_problems(assembly.config)]


def _failed_sections(section_problems: Iterable[Problem]) -> set[str]:
    """Return the sections with an error. No trial makes them: it would only repeat the error."""
    return {problem.path.partition(".")[0] for problem in section_problems if problem.severity != "warning"}


def _component_problems(assembly: Assembly, path: str, models: Iterable[str]) -> Iterator[Problem]:
    """Yield the problems of a section. `models` are the models of the section's worker group."""
    component, config = assembly.composed.components[path], assembly.config
    section = assembly.composed.section(path)
    for field in msgspec.structs.fields(type(section)):
        value = getattr(section, field.name)
        if "model" in marks_of(field.type) and value is not None:
            yield from source_problems(f"{path}.{field.name}", value)
    if missing := missing_extra(component):
        yield Problem(f"{path}.use", missing)
    elif component.check is not None:
        # Call a training engine's `check` once for each model that it will hold, as the run's `model`.
        runs = [msgspec.structs.replace(config, model=config.source_of(model)) for model in models]
        for run in runs or [config]:
            for problem in component.check(section, run):
                kind = kind_of(path)  # a check names the keys of its kind's usual section
                if path.startswith(("groups.", f"{kind}.parts.")) and problem.path.startswith(kind):
                    problem = replace(problem, path=path + problem.path.removeprefix(kind))
                yield problem


def _launcher_problems(assembly: Assembly) -> Iterator[Problem]:
    launcher: Launcher = assembly.composed.make("launcher", assembly.trial_context)
    yield from launcher.check([worker.job() for worker in assembly.workers])


def _trial_problems(assembly: Assembly, starting: bool, failed_sections: Set[str]) -> Iterator[Problem]:
    """Make components of other packages on trial, in a child process. stretto's own need no trial."""
    roles = {worker.role for worker in assembly.workers}
    paths = [path for path in assembly.composed.components if path.startswith("trackers.")]
    if "inference" in roles:
        paths += ["weights"] if starting else ["weights", "inference"]
    if "rollout" in roles:
        paths.append("workflow")
    if not starting:  # the engine of a larger group needs all its ranks, and there is only one process here
        paths += [group.path for group in assembly.placement.groups.values() if group.section.processes == 1]
    yield from _component_trial_problems(assembly, paths, failed_sections)


def _component_trial_problems(
    assembly: Assembly, paths: list[str], failed_sections: Set[str]
) -> Iterator[Problem]:
    from stretto.user_code.trial import try_to_make

    composed = assembly.composed
    paths = [
        path
        for path in paths
        if path.partition(".")[0] not in failed_sections and composed.origin(path).distribution != "stretto"
    ]
    if not paths:
        return
    document = msgspec.to_builtins(composed.config)
    try:
        yield from try_to_make(document, paths, assembly.trial_context, _TRY_S)
    except TimeoutError:
        for path in paths:
            yield _warning(path, f"not verified: making it took longer than {_TRY_S:.0f} s; {_NOT_TRIED}")


def _reward_problems(
    assembly: Assembly, read: Mapping[str, ReadRows], failed_sections: Set[str]
) -> Iterator[Problem]:
    config = assembly.config
    if config.reward is None:
        scores = assembly.graph.scores or config.evaluates_answers
        if scores and not config.workflow.gives_reward:
            yield Problem("reward", "required: the run scores answers; set for example `reward: exact`")
        return
    if "reward" in failed_sections:
        return
    tasks = _scoring_tasks(assembly, read)
    try:
        error, results = _trial_scores(assembly, tasks)
    except TimeoutError:
        action = "making it and scoring the first row" if tasks else "making it"
        yield _warning("reward", f"not verified: {action} took longer than {_TRY_S:.0f} s; {_NOT_TRIED}")
        return
    if error:
        yield Problem("reward", error)
    if unused := next((each.unused for each in results.values() if each.unused), ()):
        yield _warning(
            "reward",
            f"no column of the rows is called {unused[0]!r}, an optional parameter of the function: it "
            "always has its default",
        )
    label, refused, first_faults = assembly.composed.origin("reward").label, set[str](), set[str]()
    for (path, form), result in results.items():
        fault = result.fault.error if result.fault else ""
        if fault and form is None:
            refused.add(path)
            if fault not in first_faults:  # most faults are of the reward, not of a dataset
                first_faults.add(fault)
                yield Problem("reward", f"{label} cannot score the first row of `{path}`: {fault}")
        elif fault and form is not None and path not in refused:
            yield _warning(
                "reward",
                f"{label} cannot score row {form.index + 1} of `{path}`, and {form.count:,} of "
                f"{read[path].read:,} rows have these columns; their tickets would fail: {fault}",
            )


def _trial_scores(assembly: Assembly, tasks: Mapping[T, Task]) -> tuple[str, dict[T, ScoringResult]]:
    """Score tasks as often as the run would. Return the results, and why the reward cannot be made, if so."""
    document, results = msgspec.to_builtins(assembly.config), dict[T, "ScoringResult"]()
    for attempt in range(1 + assembly.config.workflow.member_retries):
        remaining = {key: task for key, task in tasks.items() if key not in results or results[key].fault}
        if attempt and not remaining:
            break
        error, scored = try_to_score(document, assembly.trial_context, [*remaining.values()], _TRY_S)
        if error:
            return error, {}
        results |= zip(remaining, scored, strict=True)
    return "", results


def _scoring_tasks(
    assembly: Assembly, read: Mapping[str, ReadRows]
) -> dict[tuple[str, RowForm | None], Task]:
    """Return (key of a dataset, form of a row; None for the first row) -> task for a trial of the reward."""
    columns = assembly.composed.components["workflow"].reward_columns
    if columns is None:
        return {}
    config, graph = assembly.config, assembly.graph
    evaluation = config.evaluation
    samples = {
        "dataset": graph.source.samples if graph.scores and config.steps else 0,
        "evaluation.dataset": evaluation.samples if evaluation and config.evaluates_answers else 0,
    }
    hidden = IMAGE_COLUMNS if is_vision_language(known_config(config.model)) else ()
    has_answers = set(columns) <= {_LENGTH_COLUMN}  # only the workflow knows values of other columns
    tasks: dict[tuple[str, RowForm | None], Task] = {}
    for path, rows in read.items():
        # The reward's own check of rows, if it has one, says more of the rows after the first.
        others = [] if row_checks(assembly.composed, "reward") else rows.other_forms()
        for form in [None, *others] if samples[path] else []:
            row, count = (rows.first, samples[path]) if form is None else (form.row, 1)
            tasks[path, form] = Task(
                encode_row({name: value for name, value in row.items() if name not in hidden}),
                (_ANSWER,) * count if has_answers else (),
                msgspec.msgpack.encode(
                    {
                        "prompt_opened": [""] * count if has_answers else [],
                        "reasoning_end": [0] * count if has_answers else [],
                        **{name: [1] * count if has_answers else [] for name in columns},
                    }
                ),
                trial=True,
            )
    return tasks


def _tool_problems(config: RunConfig) -> Iterator[Problem]:
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
    folders = Counter(section.folder_name for section in config.trackers)
    for index, section in enumerate(config.trackers):
        if folders[section.folder_name] > 1:
            yield Problem(
                f"trackers.{index}.folder",
                f"another tracker has the folder {section.folder_name!r} too; give each its own `folder`",
            )


def _tool_trial_problems(assembly: Assembly, failed_sections: Set[str]) -> Iterator[Problem]:
    from stretto.user_code.tools import try_to_make

    config = assembly.config
    if isinstance(config.workflow, ToolsConfig) and failed_sections.isdisjoint({"workflow", "sandbox"}):
        assembly.tools, problems = try_to_make(config.workflow, config)
        yield from problems


def _row_problems(
    assembly: Assembly,
    read: Mapping[str, ReadRows],
    failed_sections: Set[str],
    sections: Iterable[str] = ("reward", "workflow"),
) -> Iterator[Problem]:
    datasets = ["dataset"] if assembly.graph.samples else []  # other runs have no answers to score
    datasets += ["evaluation.dataset"] if assembly.config.evaluates_answers else []
    for section in sections:
        if section not in failed_sections and row_checks(assembly.composed, section):
            for path in filter(read.__contains__, datasets):
                yield from _row_problems_of(assembly, section, path)


def _row_problems_of(assembly: Assembly, section: str, path: str) -> Iterator[Problem]:
    document = msgspec.to_builtins(assembly.config)
    try:
        faults = faults_of_rows(document, path, section, assembly.trial_context, _TRY_S)
    except TimeoutError:
        yield _warning(path, f"rows not verified: checking them took longer than {_TRY_S:.0f} s")
    except ChildProcessError as error:
        yield _warning(path, f"rows not verified: {error}")
    else:
        if faults.faulty:
            use = "score" if section == "reward" else "use"
            yield Problem(
                path,
                f"the {section} cannot {use} {faults.faulty:,} of {faults.read:,} rows, and their tickets "
                f"would fail {faults.count_and_examples}",
                "error" if faults.faulty == faults.read else "warning",
            )


def _batch_problems(assembly: Assembly) -> Iterator[Problem]:
    config, graph = assembly.config, assembly.graph
    batch = config.queue.batch_size
    for call in graph.step_calls:
        if batch % call.minibatches:
            yield Problem(
                "queue.batch_size",
                f"{batch} groups cannot be split into the {call.minibatches} minibatches of call "
                f"{call.name!r}; expected a multiple of {call.minibatches}",
            )
        if reason := assembly.placement.lack_of_rows(call, batch // call.minibatches):
            yield Problem("queue.batch_size", reason)
    least = config.queue.min_members
    if isinstance(least, int) and graph.samples and least > graph.source.samples:
        yield _warning(
            "queue.min_members",
            f"is {least}, but a group has {graph.source.samples} samples: all are needed, as with 'all'",
        )
    for path, value, limited in (
        ("queue.max_divergence", config.queue.max_divergence, "how far sampled answers are off-policy"),
        ("dataset.max_prompt_tokens", config.dataset.max_prompt_tokens, "the prompts of sampled answers"),
    ):
        if not graph.samples and value is not None:
            text = f"limits {limited}, but this algorithm samples none: it trains on the rows themselves"
            yield Problem(path, f"{text}; remove it")


def _sleep_problems(assembly: Assembly) -> Iterator[Problem]:
    engine = assembly.config.inference
    if engine.sleeps and not engine.may_sleep:
        yield Problem("inference.sleep", f"engine {engine.use!r} cannot free its device's memory; remove it")
    if engine.sleeps and assembly.config.steps and not assembly.graph.samples:
        yield Problem("inference.sleep", "is true, but this algorithm trains on rows as they are; remove it")


def _sampling_problems(config: RunConfig) -> Iterator[Problem]:
    sampling = config.sampling
    if sampling.temperature == 0:
        yield Problem(
            "sampling.temperature",
            "0 is greedy: all answers of a group are equal, so nothing can be learned; expected above 0 in "
            "training",
        )
    sampler, trainer = config.inference, config.training
    for path, use, fits, what in (
        ("inference", sampler.use, sampler.sends_kept_tokens, "does not send the tokens that it drew from"),
        ("training", trainer.use, trainer.reads_drawn, "does not compute logprobs from these tokens"),
    ):
        if sampling.reshapes and not fits:
            yield Problem(
                "sampling",
                f"top_p < 1, top_k > 0, min_p > 0 and logit_bias need engines that agree on what tokens are "
                f"drawn from, and the engine {use!r} of `{path}` {what}; use these "
                "options in `evaluation.sampling`, or another engine",
            )
    if sampling.temperature > _HIGH_TEMPERATURE:
        yield _warning(
            "sampling.temperature",
            f"is {sampling.temperature:g}: answers become almost random tokens; usual values are 0.6 to 1.2",
        )
    for path, section in config.samplings():
        if odd := [text for text in section.stop if re.search(r"\\[nrt](?![a-zA-Z])", text)]:
            yield _warning(
                f"{path}.stop",
                f"has {odd[0]!r}, a backslash and a letter, at which no answer ends; in YAML a line end is "
                'written in double quotes: "\\n"',
            )
    if config.model is not None and sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
        yield _warning(
            "sampling.ignore_eos",
            "is true, and there is no `stop` and no `stop_token_ids`: every answer has sampling.max_tokens "
            "tokens",
        )


def _variant_problems(assembly: Assembly, read: Mapping[str, ReadRows] | None) -> Iterator[Problem]:
    """Check the variants. `read`: the rows for trials; None: without trials."""
    config, variants = assembly.config, variants_of(assembly.config)
    if not variants:
        return
    if not assembly.graph.samples:
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
        elif variant.sampling is not None and variant.sampling.shape != config.sampling.shape:
            yield Problem(
                f"variants.{name}.sampling",
                "top_p, top_k, min_p, logit_bias or max_kept differ from those of `sampling`, and a train "
                "step computes all its logprobs as one of them says; compare them in runs of their own: "
                "stretto sweep FILE sampling.top_p=…",
            )
        if variant.reward is not None and assembly.graph.source.samples == 1:
            yield Problem(
                f"variants.{name}.reward",
                "with a single answer to each prompt, training compares answers of different variants, and "
                "their rewards may differ in scale; expected algorithm.group_size of at least 2",
            )
        own_keys = own_sections(variant).keys()
        for problem in _problems_of_variant(assembly.of_variant(name), own_keys, read):
            is_own = problem.path.partition(".")[0] in own_keys
            yield replace(problem, path=f"variants.{name}.{problem.path}") if is_own else problem


def _problems_of_variant(
    run: Assembly, own: Set[str], read: Mapping[str, ReadRows] | None
) -> Iterator[Problem]:
    """Check a variant as a run, but only what depends on the variant's own sections."""
    section_problems = _section_problems(run)
    failed_sections = _failed_sections(section_problems)
    yield from section_problems
    yield from _sampling_problems(run.config)
    if run.config.model is not None:
        yield from token_problems(run.config)
    if read is None:
        return
    if "workflow" in own:
        yield from _component_trial_problems(run, ["workflow"], failed_sections)
        yield from _tool_trial_problems(run, failed_sections)
    if not own.isdisjoint({"workflow", "reward"}):
        yield from _reward_problems(run, read, failed_sections)
    yield from _row_problems(run, read, failed_sections, own & {"reward", "workflow"})


def _measure_problems(assembly: Assembly) -> Iterator[Problem]:
    """Check that the trainers can measure the algorithm's loss on held-out rows, if the run asks for it."""
    evaluation, use = assembly.config.evaluation, assembly.config.algorithm.use
    if evaluation is None or not assembly.config.evaluates_loss:
        return
    if assembly.graph.samples:
        if evaluation.measure:
            text = f"{use!r} samples its answers, and has no loss on rows; set it to `answers`"
            yield Problem("evaluation.measure", f"is {evaluation.measure!r}, but the algorithm {text}")
    elif isinstance(assembly.algorithm, Stateful):
        text = (
            f"{use!r} changes its own numbers, and the held-out rows would change them; set it to `answers`"
        )
        yield Problem("evaluation.measure", f"is `loss`, but the algorithm {text}")


def _value_problems(config: RunConfig) -> Iterator[Problem]:
    if config.steps == 0 and not config.evaluates_answers:
        yield Problem("steps", "is 0, and no `evaluation` samples answers: the run would do nothing")
    if config.checkpoint.store and (fault := missing_file_system(config.checkpoint.store)):
        yield Problem("checkpoint.store", fault, "environment")
    if config.metrics and not config.metrics.insecure and not is_loopback(config.metrics.address):
        yield Problem(
            "metrics.address",
            f"is {config.metrics.address!r}: other machines could read the figures without login or TLS; "
            "set `metrics.insecure: true` if they may, or listen on loopback",
        )
    if config.metrics is not None and importlib.util.find_spec("prometheus_client") is None:
        needed = "needs prometheus-client: pip install 'stretto[prometheus]'"
        yield Problem("metrics", needed, "environment")


def _odd_values(config: RunConfig) -> Iterator[Problem]:
    bound, evaluation = config.queue.max_staleness, config.evaluation
    for path, seconds in _time_limits(config):
        if seconds < _SHORT_S:
            yield _warning(path, f"is {seconds:g}: nothing ends in so short a time; the unit is seconds")
    capacity = config.rollout.most * config.rollout.processes
    if config.steps and capacity < min(config.queue.batch_size / 4, _FEW_TICKETS):
        yield _warning(
            "rollout.concurrency",
            f"is {config.rollout.most}: rollout workers run {capacity} of the "
            f"{config.queue.batch_size} tickets of a batch at once; the others wait (see docs/choosing.md)",
        )
    if config.checkpoint.keep_best and not config.evaluates_answers:
        yield _warning(
            "checkpoint.keep_best",
            "has no effect: no `evaluation` samples answers, whose rewards say which version is the best",
        )
    greedy = evaluation is not None and (evaluation.sampling or config.sampling).temperature == 0
    if evaluation is not None and evaluation.samples > 1 and greedy:
        yield _warning(
            "evaluation.samples",
            f"is {evaluation.samples}, but at temperature 0 all answers to a row are equal; set it to 1, or "
            "`evaluation.sampling.temperature` above 0",
        )
    if bound > _FAR_STALENESS:
        yield _warning(
            "queue.max_staleness",
            f"is {bound}: tokens may be {bound} train steps old, and training on them rarely works; usual "
            "values are 0 to 8",
        )
    if evaluation is not None and config.steps and evaluation.every > config.steps:
        yield _warning(
            "evaluation.every",
            f"is {evaluation.every}, but the run has {config.steps} steps: the run evaluates only its first "
            "and its last version",
        )


def _time_limits(struct: msgspec.Struct, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield (dotted key, seconds) for each time limit in a section and in the sections inside it."""
    for key in struct.__struct_fields__:
        value = getattr(struct, key)
        inner = f"{path}.{key}" if path else key
        if isinstance(value, msgspec.Struct):
            yield from _time_limits(value, inner)
        elif isinstance(value, float) and _TIME_LIMIT.fullmatch(key):
            yield inner, value


def _thread_problems(assembly: Assembly) -> Iterator[Problem]:
    cores = available_cores()
    threads = Counter({"trainer": 0, "inference": 0})
    for worker in assembly.workers:
        if worker.id != EVALUATOR:  # it has a lower priority than the others
            threads[worker.role] += worker.resources.threads
    training, inference = threads["trainer"] if assembly.config.steps else 0, threads["inference"]
    if training + inference > cores:
        yield _warning(
            "training.threads",
            f"{training} training + {inference} inference threads on {cores:g} cores: threads that share "
            "cores wait for each other and run up to 30 times slower; expected at most "
            f"{cores:.0f} threads in all",
        )


def _gpu_problems(assembly: Assembly) -> Iterator[Problem]:
    """Refuse GPUs that a process would not use. Warn of an engine that leaves this machine's GPU idle: its
    section must ask for a GPU to get one."""
    config, composed = assembly.config, assembly.composed
    groups = {group.path: group.section for group in assembly.placement.groups.values()}
    for path, section in {**groups, "inference": config.inference}.items():
        if section.gpus > 1 and hasattr(section, "device"):
            count = "replicas" if path == "inference" else "processes"
            yield Problem(
                f"{path}.gpus",
                f"is {section.gpus}, and each process of this engine computes on one; write "
                f"`gpus: 1` and `{count}: {section.gpus}`",
            )
    if config.launcher.use != "local" or not visible_gpus(os.environ):
        return
    roles = {worker.role for worker in assembly.workers}
    for path, role, section in (
        ("training", "trainer", config.training),
        ("inference", "inference", config.inference),
    ):
        is_decided = section.gpus or getattr(section, "device", "auto") == "cpu"
        if role in roles and composed.components[path].needs_model and not is_decided:
            yield _warning(
                f"{path}.gpus",
                "is 0, so a GPU of this machine stays idle; set it, and `share` where processes share a GPU, "
                "or `device: cpu`",
            )
