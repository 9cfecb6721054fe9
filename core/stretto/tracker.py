"""The contract of trackers: a tracker sends the figures of a run to a service or into files of its own.

Each tracker lives in a child process of its own, which reads the run's `metrics.jsonl` while the run
continues. Its methods may block and may raise: the run neither waits for them nor ends with them. The run
writes `metrics.jsonl` and `summary.json` with or without a tracker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import msgspec

from stretto.component import Context, NonNegativeInt, PositiveFloat, PositiveInt

__all__ = [
    "SAMPLE_FIELDS",
    "Sent",
    "Tracker",
    "TrackerConfig",
    "figures",
    "kept_id",
    "sample_cells",
    "tracker_folder",
]

SAMPLE_FIELDS = (
    *("id", "purpose", "step", "reward", "metrics", "staleness", "finish", "length"),
    *("prompt_text", "text"),
)
"""Fields of a sample that trackers get; `docs/samples.md` says what they mean."""


class TrackerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every tracker's section."""

    use: str
    """Name of the tracker."""
    folder: (
        Annotated[
            str,
            msgspec.Meta(
                pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$(?!\n)",
                description="letters, digits, `-` and `_`, the first a letter or a digit",
            ),
        ]
        | None
    ) = None
    """Name of the tracker's folder in the run's folder `trackers`; default: the tracker's name. Two trackers
    of one name need different folders."""
    samples: NonNegativeInt = 4
    """Number of kept samples that the tracker gets of a step and of an evaluation; 0 for none."""
    samples_every: PositiveInt = 10
    """The tracker gets samples of every step whose number is a multiple of this, and of every evaluation."""
    call_s: PositiveFloat = 600.0
    """Seconds that one call of the tracker may take. A tracker that takes longer is dropped: it receives
    nothing more. The default exceeds the four minutes for which MLflow's client tries to reach a server."""
    finish_s: PositiveFloat = 30.0
    """Seconds that the end of the run waits for the tracker."""

    @property
    def folder_name(self) -> str:
        """The name of the tracker's folder in `trackers`."""
        return self.folder or self.use.rpartition(":")[2]


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What a tracker has received so far."""

    step: int = 0
    """The newest step; 0 if there is none."""
    evaluation: int = -1
    """The newest version whose evaluation it has received; -1 if there is none."""
    samples: int = 0
    """The newest step whose samples it has received; 0 if there is none."""
    evaluation_samples: int = -1
    """The newest version for which it has received samples of the evaluation; -1 if there is none."""


class Tracker(Protocol):
    """A tracker. All trackers of a run live in one process, which calls the methods of each one after the
    other, in a thread of its own. A call has to return within the tracker's `call_s`.

    The process notes what it has sent. It may be killed after a call and before the note: the next process
    then sends the same step, evaluation or samples again. A tracker makes this harmless: it returns from
    `start` what it has, or it overwrites or skips what comes a second time.

    After an exception, the process makes the tracker again some times, with growing pauses. A tracker that
    ends the process ends all trackers of the run.
    """

    def start(self, config: Mapping[str, Any], resumed_at: Sent | None) -> Sent | None:
        """Begin, or continue in the same curve.

        Args:
            config: the composed run as a plain mapping. Values from the environment appear as the
                interpolations that read them, not as values.
            resumed_at: what this tracker has certainly received before; None at the first start.

        Returns:
            What the tracker has received, if it can find out; the next steps, evaluations and samples follow
            that. None to continue after `resumed_at`.
        """
        ...

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Send the metrics of one train step, the object in `metrics.jsonl` (see `figures`). Steps come in
        order. A tracker whose `start` returns None must not lose them when this process is killed."""
        ...

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Send one evaluation, the object in `metrics.jsonl`; `step` is the version that was evaluated.
        Evaluations come in the order of their versions, and later steps may come before."""
        ...

    def advice(self, advice: Mapping[str, Any]) -> None:
        """Send one piece of advice, as `summary.json` shows it, when it is given and when it is withdrawn;
        `until` is None while it is open. It comes after its step, and may come a second time after a
        kill."""
        ...

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send a few samples of one step, or of one evaluation.

        Samples come some time after the line of their step, in the order of steps; those of evaluations, in
        the order of versions. Models wrote the texts: they are printable and of bounded length, but a tracker
        that shows them as Markdown or HTML must escape them.

        Args:
            rows: one or more, with the fields `SAMPLE_FIELDS`; `purpose` and `step` are those of all rows.
                The rewards rise from the lowest of the step to its highest.
        """
        ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the end of the run; `summary` is the content of `summary.json`. No method of this object is
        called afterwards. A run that is resumed later has another end."""
        ...


def tracker_folder(config: TrackerConfig, context: Context) -> Path:
    """Return the folder of a tracker, in which it can keep files of its own."""
    return context.path("trackers", config.folder_name)


def figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line of metrics by name, without `step` and `time`. Those of the ledger
    are named `ledger/trained` and so on."""
    ledger = cast("Mapping[str, Any]", metrics.get("ledger", {}))
    named = {**metrics, **{f"ledger/{name}": count for name, count in ledger.items()}}
    return {key: value for key, value in named.items() if key not in ("step", "time") and _is_finite(value)}


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def sample_cells(row: Mapping[str, Any]) -> list[str | float | None]:
    """Return a sample as cells of a table with the columns `SAMPLE_FIELDS`. `metrics` becomes JSON."""
    return [
        msgspec.json.encode(row[name]).decode() if name == "metrics" else row[name] for name in SAMPLE_FIELDS
    ]


def kept_id(config: TrackerConfig, context: Context, make: Callable[[], str]) -> str:
    """Return the id of this run in the tracker's service, from the file `id` in the tracker's folder. The
    first process makes the id with `make` and writes the file."""
    file = tracker_folder(config, context) / "id"
    if not file.exists():
        aside = file.with_name(".id")
        aside.write_text(make())
        aside.replace(file)
    return file.read_text()
