"""The text of `stretto check`: processes, models, batch arithmetic, queue and folder of a composed run."""

from collections.abc import Iterator
from contextlib import suppress

from stretto.assembly.assembly import Assembly
from stretto.assembly.placement import DEFAULT_GROUP, Placement
from stretto.assembly.variants import own_sections, variants_of
from stretto.assembly.worker_numbers import EVALUATOR
from stretto.cli.start.check_chat import chat_lines
from stretto.cli.start.check_memory import checkpoint_sizes, memory_lines
from stretto.config import RunConfig
from stretto.dataset import Dataset
from stretto.errors import EngineError
from stretto.launcher import Resources
from stretto.serving.config import ServerEngineConfig, interpreter_of
from stretto.training.config import ModelTrainingConfig, lr_factor

_SHOWN = 6  # evaluated versions


def describe(assembly: Assembly) -> str:
    """Return the run as text: processes, models, batch arithmetic, queue, folder."""
    composed, config, placement = assembly.composed, assembly.config, assembly.placement
    graph = placement.graph
    n, batch, bound = graph.source.samples, config.queue.batch_size, config.queue.max_staleness
    lines = [f"run {config.name!r}, seed {config.seed}, {config.steps} steps", ""]
    lines += _table(
        ["role", "processes", "threads", "gpus", "share", "component"],
        [
            ["kernel", "1", "1", "0", "", f"bus: {', '.join(config.bus.servers) or 'bundled nats-server'}"],
            *_worker_rows(assembly),
        ],
    )
    for key, (number, place) in assembly.numbers.in_force().items():
        lines.append(f"number     {key} is {number}: {place}")
    lines += ["", f"model      {config.model or 'none'}", *chat_lines(assembly), *_server_lines(config)]
    lines += [*_placement_lines(config, placement), *memory_lines(assembly)]
    for call in graph.calls:
        reads = ", ".join(call.reads) or "-"
        writes = ", ".join(call.writes) or "-"
        lines.append(f"call       {call.name}: {reads} -> {writes}")
    lines += [
        f"batch      {batch} groups x {n} samples = {batch * n} samples per step, "
        f"{batch * n * config.steps} in all",
    ]
    if graph.samples:
        lines.append(
            f"queue      staleness at most {bound}: up to {(bound + 1) * batch} groups "
            f"({(bound + 1) * batch * n} samples) issued ahead, on_late={config.queue.on_late}"
        )
        if config.queue.max_divergence is not None:
            lines.append(
                f"           fewer while the divergence is above {config.queue.max_divergence:g} nats"
            )
    lines += [*_rate_lines(config, placement), *_variant_lines(config)]
    for path in ("dataset", "evaluation.dataset"):
        if path in composed.components:
            dataset: Dataset = composed.make(path, assembly.trial_context)
            name = composed.components[path].name
            lines.append(f"{'rows' if path == 'dataset' else 'held out':10} {len(dataset)} ({name})")
    if config.evaluates_loss and config.steps:
        lines.append(f"{'':10} loss after {_numbers('step', 1, config)}")
    if config.evaluates_answers:
        takes_turns = (
            config.steps and graph.samples and config.inference.replicas == 1 and not assembly.has_evaluator
        )
        meanwhile = "; training waits meanwhile" if takes_turns else ""
        lines.append(f"evaluation {_numbers('version', 0, config)}{meanwhile}")
    every = f"every {config.checkpoint.every} steps and " if config.checkpoint.every else ""
    lines.append(f"checkpoint {every}at the end, the newest {config.checkpoint.keep} kept")
    lines += _copy_lines(config, placement)
    lines.append(f"writes to  {assembly.folder}")
    return "\n".join(lines)


def _numbers(what: str, first: int, config: RunConfig) -> str:
    """Return the steps or versions that are evaluated, as text."""
    every = config.evaluation.every if config.evaluation else 0
    numbers = sorted({first, *(range(every, config.steps, every) if every else ()), config.steps})
    texts = [str(number) for number in numbers]
    if len(texts) > _SHOWN:
        texts[_SHOWN - 2 : -1] = ["…"]
    return f"{what}{'s' if len(texts) > 1 else ''} {', '.join(texts)}"


def _rate_lines(config: RunConfig, placement: Placement) -> Iterator[str]:
    """Yield the learning rates of the policy at the first, the tenth and the last step."""
    section, settings = placement.lead.section, config.models.get(placement.graph.lead)
    if not isinstance(section, ModelTrainingConfig) or not config.steps:
        return
    lr = (settings and settings.lr) or section.lr
    calls = [call for call in placement.graph.step_calls if call.model == placement.graph.lead]
    updates = sum(call.minibatches * call.epochs for call in calls)  # of a step
    rates = {step: lr * lr_factor(section, (step - 1) * updates) for step in (1, min(10, config.steps))}
    rates[config.steps] = lr * lr_factor(section, config.steps * updates - 1)
    yield f"lr         {', '.join(f'{rate:.2g} at step {step}' for step, rate in rates.items())}"


def _server_lines(config: RunConfig) -> Iterator[str]:
    if isinstance(config.inference, ServerEngineConfig) and not config.inference.urls:
        with suppress(EngineError):  # the check has warned
            yield f"server     {interpreter_of(config.inference)}"


def _variant_lines(config: RunConfig) -> Iterator[str]:
    variants = variants_of(config)
    total = sum(variant.weight for variant in variants.values())
    for name, variant in variants.items():
        sections = own_sections(variant)
        origin = f"its own {', '.join(sections)}" if sections else "the run's own sections"
        yield f"variant    {name}: {100 * variant.weight / total:.0f} % of the tickets, {origin}"


def _worker_rows(assembly: Assembly) -> Iterator[list[str]]:
    components = assembly.composed.components
    for group in assembly.placement.groups.values():
        component = f"{group.path}: {components[group.path].name}"
        yield _row("trainer", len(group.workers), group.section, component)
    sections = {"inference": "inference", "rollout": "workflow"}
    sections["verifier"] = "reward" if assembly.config.reward is not None else "workflow"
    for role, section in sections.items():
        members = [each for each in assembly.workers if each.role == role and each.id != EVALUATOR]
        if members:
            component = f"{section}: {components[section].name}"
            yield _row(role, len(members), members[0].resources, component)
    if assembly.has_evaluator:
        component = f"inference: {components['inference'].name}, for evaluations alone"
        yield _row("inference", 1, assembly.config.inference, component)


def _row(role: str, processes: int, resources: Resources, component: str) -> list[str]:
    share = f"{resources.share:g}" if resources.gpus else ""
    return [role, str(processes), str(resources.threads), str(resources.gpus), share, component]


def _placement_lines(config: RunConfig, placement: Placement) -> Iterator[str]:
    """Yield a line for each model; none for a single model in the default group (see line `model`)."""
    if list(placement.groups) == [DEFAULT_GROUP] and len(placement.graph.models) == 1 and not config.models:
        return
    for group in placement.groups.values():
        for name in group.models:
            model, settings = placement.graph.models[name], config.models.get(name)
            kind = f"{model.head}, {'trained' if model.trainable else 'frozen'}"
            source = (settings and settings.path) or config.model or "none"
            yield f"  {name:8} {kind}, in {group.path}, from {source}"


def _copy_lines(config: RunConfig, placement: Placement) -> Iterator[str]:
    """Yield each group's memory for the copy of a checkpoint, if the group's models are on this machine."""
    for name, whole in checkpoint_sizes(config, placement).items():
        group = placement.groups[name]
        size = whole * 1e-9 / group.section.processes  # GB
        if size <= config.checkpoint.copy_gb:
            yield f"           {group.path}: {size:.2g} GB copied in each process; no step waits"
        else:
            yield (
                f"           {group.path}: {size:.2g} GB in each process, more than checkpoint.copy_gb "
                f"({config.checkpoint.copy_gb:g}): the next step waits"
            )


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
