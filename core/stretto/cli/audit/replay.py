"""`stretto replay RUN`: train the recorded steps again on the kept trajectories, and compare the weights. The
replay has a folder of its own, and changes no file of the run."""

import re
import shutil
from collections.abc import Sequence
from itertools import chain, count, groupby
from pathlib import Path
from typing import Any

import msgspec

from stretto.assembly.assembly import Assembly, new_run_id
from stretto.assembly.compose import Composed, compose
from stretto.cli.audit.recording import KeptGroups, kept_weights, read_recording
from stretto.cli.audit.replay_report import ReplayReport, report_of
from stretto.cli.start.acceptance import accepted, print_notice
from stretto.cli.start.folders import is_free
from stretto.errors import ConfigError
from stretto.kernel.durable.changes import document_of, values_file
from stretto.kernel.durable.checkpoint import KernelState, find_checkpoint, state_of
from stretto.records.document import read_document
from stretto.records.events.history import RecordedBatch, RunHistory
from stretto.records.files import REPLAY
from stretto.records.run_folder import RunFolder
from stretto.runs.replay import ReplaySegment, train_again

_UNUSED = ("dataset", "evaluation", "inference", "queue", "reward", "rollout", "verifier", "workflow")
"""Sections that decide what is generated. A replay does not use them."""
_LAYOUT = re.compile(r"(?:\A|; )(\S+): \S+ x (\d+), ")  # key of a worker group, number of processes


class ReplayOptions(msgspec.Struct, frozen=True):
    """The options of the command line, without the overrides."""

    start: str | None
    """Version, or name of the checkpoint, at which the replay begins; None for the initial models."""
    stop: int | None
    out: Path | None


class Replayed(msgspec.Struct, frozen=True):
    """A replay that has ended."""

    folder: Path
    summary: dict[str, Any]
    report: ReplayReport | None


def replay_run(folder: Path, options: ReplayOptions, overrides: Sequence[str]) -> Replayed:
    """Replay a run that has ended, or whose kernel is dead."""
    folder = RunFolder(folder).folder
    if (folder / REPLAY).exists():
        raise ConfigError(f"{folder} is a replay itself; replay the run that it came from")
    recording = read_recording(folder)
    start = _start(folder, options.start)
    batches = _chosen(recording, start[1].version if start else 0, options.stop)
    out = _free_folder(folder, options.out)
    recorded = _segments(folder, recording, batches, (), out)
    segments = _segments(folder, recording, batches, overrides, out)
    _check(folder, recorded, segments, start)
    _accept(recorded, segments, overrides)
    kept = KeptGroups(folder)
    if segments[0].assembly.graph.samples and (missing := kept.missing(batches)):
        raise _kept_too_little(folder, recording, batches[0].version, missing)
    out.mkdir(parents=True, exist_ok=True)
    first, last = batches[0].version + 1, batches[-1].version + 1
    report = ReplayReport(run=str(folder), first=first, last=last, overrides=[*overrides], state="begun")
    report.write(out)
    if (fingerprints := folder / "fingerprints.json").exists():
        shutil.copy(fingerprints, out)
    summary, trained = train_again(out, segments, start, kept.groups)
    if summary["status"] != "completed":
        return Replayed(out, summary, None)
    weights = kept_weights(folder), trained
    report = report_of(report, recording, batches, RunFolder(folder), RunFolder(out), weights)
    report.write(out)
    return Replayed(out, summary, report)


def _start(folder: Path, version: str | None) -> tuple[Path, KernelState] | None:
    if version is None or version == "0":
        return None
    checkpoint = find_checkpoint(folder, version, option="--from")
    return checkpoint, state_of(checkpoint)


def _chosen(recording: RunHistory, first: int, stop: int | None) -> list[RecordedBatch]:
    end = len(recording.batches)
    if stop is not None and not first < stop <= end:
        raise ConfigError(f"--to {stop}: expected a step from {first + 1} to {end}, the last one of the run")
    if first >= end:
        raise ConfigError(f"--from {first}: the run has no step after version {first}")
    return [recording.batches[version] for version in range(first, stop or end)]


def _free_folder(run: Path, out: Path | None) -> Path:
    if out is not None:
        if not is_free(out.expanduser()):
            raise ConfigError(f"--out {out}: exists and is not an empty folder")
        return out.expanduser().absolute()
    suffixes = chain([""], (f"-{number}" for number in count(2)))
    folders = (run.with_name(f"{run.name}-replay{suffix}") for suffix in suffixes)
    return next(folder for folder in folders if is_free(folder))


def _kept_too_little(folder: Path, recording: RunHistory, first: int, missing: Sequence[int]) -> ConfigError:
    keep = read_document(folder / "config.yaml")["samples"]["keep"]
    states = (folder / "checkpoints").glob("step-*/kernel.json")
    versions = sorted(state_of(state.parent).version for state in states)
    later = [version for version in versions if max(missing) < version < len(recording.batches)]
    reason = "a run that is to be replayed from its beginning needs samples.keep: all, which is the default"
    if keep == "all" and max(missing) == len(recording.batches) - 1:
        reason = "a kernel that is killed has not written its last ones, which `stretto resume` does"
    hint = f"; steps after {later[0]} are kept: --from {later[0]}" if later else ""
    hint += f"; the steps before are kept: --to {missing[0]}" if missing[0] > first else ""
    return ConfigError(
        f"{folder} has not kept the trajectories of {len(missing)} of the steps, the first of them step "
        f"{missing[0] + 1} (samples.keep: {keep}); {reason}{hint}"
    )


def _segments(
    folder: Path, recording: RunHistory, batches: Sequence[RecordedBatch], overrides: Sequence[str], out: Path
) -> list[ReplaySegment]:
    """Split the batches into segments, each with the same values and the same numbers of processes."""

    def terms(batch: RecordedBatch) -> tuple[int, str]:
        return recording.values_at(batch.version), batch.layout

    run = new_run_id(out)
    return [
        ReplaySegment(
            Assembly(_composed(folder, values, layout, overrides, out), folder=out, run=run),
            tuple(part),
            recording.draws,
        )
        for (values, layout), part in groupby(batches, terms)
    ]


def _composed(folder: Path, values: int, layout: str, overrides: Sequence[str], out: Path) -> Composed:
    """Compose the recorded values with the number `values` for a replay, without evaluation and trackers.
    Worker groups get the numbers of processes in `layout`, because `stretto scale` may have changed them."""
    document = document_of(folder, values)
    document |= {"out": str(out), "evaluation": None, "metrics": None, "trackers": []}
    document["checkpoint"] = {**document["checkpoint"], "store": None}
    document["samples"] = {"keep": "all"}  # the trainers then record the importance weights
    for path, processes in _LAYOUT.findall(layout):
        section: dict[str, Any] = document
        for part in path.split("."):
            section = section[part]
        section["processes"] = int(processes)
    return compose(values_file(folder, values), overrides, document=document)


def _check(
    folder: Path,
    former: Sequence[ReplaySegment],
    segments: Sequence[ReplaySegment],
    start: tuple[Path, KernelState] | None,
) -> None:
    for recorded, replayed in zip(former, segments, strict=True):
        place = replayed.assembly.composed.place
        was, now = recorded.assembly.graph, replayed.assembly.graph
        if was.samples != now.samples:
            kind = "samples" if was.samples else "rows of a dataset"
            raise ConfigError(f"{place('algorithm')}: the run has trained on {kind}; this algorithm does not")
        had, needs = ({name for name, each in graph.models.items() if each.trainable} for graph in (was, now))
        if start is not None and (missing := sorted(needs - had)):
            raise ConfigError(
                f"{place('algorithm')}: checkpoint {start[0].name} has no model {missing[0]!r}; "
                "replay from the beginning, without --from"
            )
        if not now.samples:
            _check_rows(folder, replayed.assembly)


def _accept(
    former: Sequence[ReplaySegment], segments: Sequence[ReplaySegment], overrides: Sequence[str]
) -> None:
    """Refuse values with errors. Print the warnings that the recorded values do not have."""
    from stretto.cli.start.checks import faults_and_warnings  # it imports all checks of run files

    shown: set[str] = set()

    def show(level: str, text: str) -> None:
        if text not in shown:
            shown.add(text)
            print_notice(level, text)

    for recorded, replayed in zip(former, segments, strict=True):
        shown |= set(faults_and_warnings(recorded.assembly, starting=False)[1])
        accepted(replayed.assembly, starting=False, show=show)
    for item in overrides:
        key = item.partition("=")[0]
        if key.split(".")[0] in _UNUSED:
            show("note", f"{key} changes nothing: a replay generates and scores nothing")


def _check_rows(folder: Path, assembly: Assembly) -> None:
    dataset = assembly.make("dataset")
    recorded = msgspec.json.decode((folder / "fingerprints.json").read_bytes(), type=dict[str, str])
    if recorded.get("dataset", dataset.fingerprint) != dataset.fingerprint:
        raise ConfigError(
            f"{assembly.composed.place('dataset')}: the rows have changed since the run began (fingerprint "
            f"{recorded['dataset']}, now {dataset.fingerprint}), and the journal names them by number; put "
            "the previous rows back"
        )
