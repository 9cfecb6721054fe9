"""The values of a run: their files, and the changes with which a run may be resumed.

    config.yaml        the values in force
    config-1.yaml …    the previous values, in order; config-1.yaml has the values that the run started with
    references.yaml    keys that were written as a reference to another key, such as `${steps}`
    origin.json        the keys that somebody has set, and where the run was started
    fingerprints.json  fingerprint of each dataset, by the key of its section

A change takes effect when `config.yaml` is replaced. The run then begins again with its newest checkpoint
(`stretto.kernel.durable.recovery`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog
import yaml

from stretto.assembly.assembly import Assembly, decided, new_run_id
from stretto.assembly.compose import Composed, compose
from stretto.assembly.placement import Placement
from stretto.assembly.variants import variants_of
from stretto.bus.server import run_id
from stretto.component import Problem
from stretto.dataset import Dataset
from stretto.errors import ConfigError
from stretto.kernel.durable.checkpoint import newest_intact
from stretto.machine.private_file import write_private
from stretto.records.origin import add_written
from stretto.records.values import dotted_values
from stretto.training.config import ModelTrainingConfig

log = structlog.get_logger()


def newest_values(folder: Path) -> int:
    """Return the number of the values in `config.yaml`; 1 for a run whose values never changed."""
    number = 1
    while (folder / f"config-{number}.yaml").exists():
        number += 1
    present, former = folder / "config.yaml", folder / f"config-{number - 1}.yaml"
    was_killed = former.exists() and former.read_bytes() == present.read_bytes()  # between the two writes
    return number - was_killed


def values_file(folder: Path, number: int) -> Path:
    """Return the file that holds the values with this number."""
    former = folder / f"config-{number}.yaml"
    return former if former.exists() else folder / "config.yaml"


def write_values(folder: Path, composed: Composed) -> None:
    """Write the values of a composed run as the values in force."""
    references = folder / "references.yaml"
    if composed.references or references.exists():
        write_private(references, yaml.safe_dump(dict(composed.references)).encode())
    decisions = "".join(f"# {key}: {reason}\n" for key, reason in composed.reasons)
    document = yaml.safe_dump(dict(composed.document), sort_keys=False)
    write_private(folder / "config.yaml", f"{decisions}{document}".encode())


def assemble_existing(composed: Composed, folder: Path) -> Assembly:
    """Assemble a run that has a folder already."""
    return Assembly(composed, folder=folder, run=run_id(folder / "bus") or new_run_id(folder))


def assemble_in_force(folder: Path) -> Assembly:
    """Assemble the run in a folder, with the values in force."""
    file = folder / "config.yaml"
    if not file.exists():
        raise ConfigError(f"{folder} holds no run: it has no config.yaml")
    return assemble_existing(compose(file), folder)


def is_complete(folder: Path, steps: int) -> bool:
    """Return whether a run has completed at least this number of steps."""
    file = folder / "summary.json"
    if not file.exists():
        return False
    try:
        summary = json.loads(file.read_bytes())
        return summary["status"] == "completed" and summary["version"] >= steps
    except (ValueError, TypeError, KeyError) as error:  # the kernel writes it again at the end of the run
        log.warning("summary is damaged", file=str(file), damage=f"{type(error).__name__}: {error}")
        return False


def fingerprint_changes(folder: Path, present: dict[str, str], *, accept: bool) -> dict[str, tuple[str, str]]:
    """Compare the fingerprints of datasets and models, by key of the run file, with `fingerprints.json`.
    Record new ones there and, with `accept`, changed ones. Return key -> (previous, new) of changed ones."""
    recorded = read_fingerprints(folder)
    changed = {
        path: (recorded[path], present[path])
        for path in present
        if recorded.get(path, present[path]) != present[path]
    }
    updated = recorded | present if accept else present | recorded
    if updated != recorded:
        _write_fingerprints(folder, updated)
    return changed


def compose_changes(current: Assembly, overrides: Sequence[str]) -> Assembly:
    """Assemble a run with some of its values changed."""
    folder = current.folder
    document = document_of(folder, newest_values(folder))
    composed = compose(folder / "config.yaml", overrides, document=document)
    changed = assemble_existing(decided(composed), folder)
    if faults := list(_faults(current, changed)):
        raise ConfigError("\n".join(f"{composed.place(fault.path)}: {fault.message}" for fault in faults))
    return changed


def document_of(folder: Path, number: int) -> dict[str, Any]:
    """Return the values with this number as a run file, with references such as `${steps}` as written."""
    document: dict[str, Any] = yaml.safe_load(values_file(folder, number).read_text())
    references = folder / "references.yaml"
    if references.exists():
        for path, text in yaml.safe_load(references.read_text()).items():
            _put(document, path, text)
    return document


def put_into_force(folder: Path, changed: Composed) -> None:
    """Replace `config.yaml`, and keep the previous file under its number. The caller owns the run."""
    changes = differences(yaml.safe_load((folder / "config.yaml").read_text()), changed.document)
    if not changes:
        return
    if any(key.startswith("evaluation.dataset") for key in changes):
        recorded = read_fingerprints(folder)
        if recorded.pop("evaluation.dataset", None) is not None:
            _write_fingerprints(folder, recorded)
    former = folder / f"config-{newest_values(folder)}.yaml"
    write_private(former, (folder / "config.yaml").read_bytes())
    write_values(folder, changed)
    add_written(folder, changes)


def differences(former: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the dotted keys that differ, with the previous and the new value as JSON, `null` if missing."""
    before, after = dict(dotted_values(former)), dict(dotted_values(changed))
    return {
        key: values
        for key in sorted(before.keys() | after.keys())
        if (values := (before.get(key, "null"), after.get(key, "null")))[0] != values[1]
    }


# --------------------------------------------------------------------------------------- refusals


def _faults(former: Assembly, changed: Assembly) -> Iterator[Problem]:
    was, now, folder = former.config, changed.config, former.folder
    fixed = {
        "model": "the run's weights come from it",
        "seed": "the order of the rows is drawn from it",
        "dataset.shuffle": "it decides the order of the rows",
        "out": "the run lies there",
    }
    for path, why in fixed.items():
        before, after = (run.composed.section(path) for run in (former, changed))
        if before != after:
            yield _fixed(path, before, after, why)
    if set(was.bus.servers) != set(now.bus.servers) and not set(was.bus.servers) & set(now.bus.servers):
        yield _fixed("bus.url", was.bus.url, now.bus.url, "the run's journal lies there")
    for name in sorted(was.models.keys() | now.models.keys()):
        before, after = (run.models[name].path if name in run.models else None for run in (was, now))
        if before != after:
            yield _fixed(f"models.{name}.path", before, after, "the model's weights come from it")
    before, after = (
        {name: variant.weight for name, variant in variants_of(run).items()} for run in (was, now)
    )
    if before != after:
        yield _fixed("variants", before, after, "its tickets got their variants by these names and weights")
    yield from _structure_faults(former.placement, changed.placement)
    if was.dataset != now.dataset:  # an unchanged dataset need not be on this machine
        before, after = (_fingerprint(run) for run in (former, changed))
        if before != after:
            yield Problem(
                "dataset",
                f"has other rows ({after[0]}, fingerprint {after[1]}) than before ({before[0]}, "
                f"{before[1]}); a resumed run keeps its rows and their order; start a new run for others",
            )
    newest = newest_intact(folder / "checkpoints")
    if newest and now.steps < newest[1].version:
        yield Problem("steps", f"is {now.steps}, and the run is at version {newest[1].version} already")
    elif is_complete(folder, now.steps):
        yield Problem("steps", f"is {now.steps}, and the run is complete: give it more to continue it")


def _structure_faults(former: Placement, changed: Placement) -> Iterator[Problem]:
    before, after = former.graph, changed.graph
    if before.source.samples != after.source.samples:
        why = "the groups in the ledger have as many samples"
        yield _fixed("algorithm.group_size", before.source.samples, after.source.samples, why)
    if (before.samples, before.lead, before.models) != (after.samples, after.lead, after.models):
        models = (", ".join(sorted(graph.models)) for graph in (before, after))
        yield _fixed("algorithm.use", *models, why="checkpoints hold the models of the previous algorithm")
    elif _adapters(former) != _adapters(changed):
        yield Problem("training.lora", "cannot change: checkpoints hold the adapters as they were")


def _adapters(placed: Placement) -> dict[str, object]:
    return {
        model: (
            section.lora.rank,
            section.lora.alpha,
            section.lora.targets,
            section.lora.adapter,
            section.freeze_vision_tower,
        )
        for group in placed.groups.values()
        for model in group.models
        for section in [group.section]
        if isinstance(section, ModelTrainingConfig) and section.lora is not None
    }


def _fixed(path: str, former: object, changed: object, why: str) -> Problem:
    return Problem(
        path,
        f"cannot change from {former!r} to {changed!r} in a resumed run: {why}; start a new run for that",
    )


def _fingerprint(assembly: Assembly) -> tuple[int, str]:
    dataset: Dataset = assembly.make("dataset")
    return len(dataset), dataset.fingerprint


def read_fingerprints(folder: Path) -> dict[str, str]:
    file = folder / "fingerprints.json"
    try:
        return msgspec.json.decode(file.read_bytes() if file.exists() else b"{}", type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{file}: {error}; if the datasets have not changed, remove the file and resume again"
        ) from error


def _write_fingerprints(folder: Path, fingerprints: Mapping[str, str]) -> None:
    text = json.dumps(fingerprints, indent=2) + "\n"
    write_private(folder / "fingerprints.json", text.encode())


def _put(document: dict[str, Any], path: str, value: str) -> None:
    """Set the value at a dotted key if the key exists: a change that was killed may have added references."""
    *above, last = path.split(".")
    for part in above:
        document = document.get(part) or {}
    if last in document:
        document[last] = value
