"""The file `status.json`: what a run does, and who waits for whom. If a kernel hangs, the file is old."""

import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from stretto.bus.messages.events import Measure
from stretto.errors import ConfigError
from stretto.records.files import read_record

STATUS = "status.json"
LATE_S = 15.0
"""The kernel writes every 2 s; after this many seconds without a write it hangs, is stopped or is gone."""

State = Literal["running", "completed", "interrupted", "failed", "repeated"]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker that has joined."""

    worker: str
    ready: bool
    silent_s: float
    """Seconds since its last heartbeat."""
    blocked_s: float
    """Seconds for which its event loop has stood still."""
    leaving: bool = False
    """True while the worker finishes its work before it leaves."""


class Stall(msgspec.Struct, frozen=True):
    """A process that waits for the answer of another."""

    asker: str
    who: str
    verb: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.asker} waits for {self.who} ({self.verb}) since {self.seconds:.0f} s"


class EvaluationStatus(msgspec.Struct, frozen=True):
    """A complete evaluation."""

    version: Count
    score: float | None
    """Mean accuracy or reward of the answers, as `measure` says; None if no row had a result."""
    measure: Measure
    """`accuracy` if all answers of all evaluations have one, otherwise `reward`."""
    samples: Count
    failed: Count


class EvaluationProgress(msgspec.Struct, frozen=True):
    """The evaluation that runs now."""

    version: Count
    rows: Count
    """Finished rows."""
    of: Count  # all rows
    waiting: Count | None
    """Version of the evaluation that waits for this one."""


class AdviceStatus(msgspec.Struct, frozen=True):
    """Advice that is not withdrawn."""

    rule: str
    since: Count
    """First step with the problem."""
    message: str


class Verdict(msgspec.Struct, frozen=True):
    """The judgement whether a run learns, and what it waits for (see `stretto.observe.verdict`)."""

    state: Literal["waiting", "unknown", "learning", "flat", "falling", "collapsing", "broken"]
    text: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file: everything that a live view of the run shows."""

    written: float
    """Unix time."""
    pid: int
    name: str
    folder: str
    state: State
    started: bool = False
    """True once the run has begun to generate and train; False while its workers start."""
    reason: str = ""
    """Why the run ended; empty while it runs, and if it is complete."""
    version: Count
    steps: Count
    wall_s: float = 0.0
    """Seconds so far, without the pauses before a resume."""
    left_s: float | None = None
    """Estimated seconds until the last step; None while they are not known."""
    now: str
    verdict: Verdict | None = None
    """None in the files of former versions of stretto."""
    sampled: bool = True
    """True if the run trains on sampled trajectories, False if on rows of a dataset."""
    newest: dict[str, float | None] = {}
    """Key in `metrics.jsonl` -> main figure of the newest step."""
    recent: dict[str, float] = {}
    """Means over the newest 10 steps, of figures with curves."""
    curves: dict[str, list[float]] = {}
    """Figures over the whole run, as at most 64 means over equal numbers of steps."""
    evaluations: list[EvaluationStatus] = []
    best: EvaluationStatus | None = None
    evaluating: EvaluationProgress | None = None
    ledger: dict[str, Count] = {}
    finished: Count = 0
    """Tickets in flight whose group is complete."""
    reasons: dict[str, Count] = {}
    """Most frequent reasons why tickets or evaluation rows gave no result."""
    generate_tokens_per_s: float = 0.0
    """Speed of generation during the last seconds."""
    advice: list[AdviceStatus] = []
    connected: bool
    """True while the kernel has a connection to nats-server."""
    restarts: Count = 0
    workers: list[WorkerStatus]
    starting: dict[str, str]
    """Workers that are not ready, with their state."""
    waits: list[Stall]
    """The longest wait of each process, longest first."""
    metrics_url: str = ""
    """Where Prometheus reads the run's figures; empty without such an address."""


def decode_status(content: bytes) -> Status:
    """Return the status encoded in a file or a message, or raise `msgspec.DecodeError`."""
    try:
        return msgspec.json.decode(content, type=Status)
    except UnicodeDecodeError as error:  # msgspec raises it for some strings
        raise msgspec.DecodeError(f"a string is not UTF-8: {error}") from error
    except RecursionError as error:  # msgspec also reads the fields that it ignores
        raise msgspec.DecodeError("nested too deeply") from error


def read_status(folder: Path) -> Status | None:
    """Return the status of the run in `folder`; None if its kernel has not written one yet."""
    file = folder / STATUS
    try:
        return decode_status(read_record(file))
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} is not the status of a run: {error}") from error


def is_of_former_kernel(folder: Path, status: Status) -> bool:
    """Return whether a former kernel wrote this status: another one owns the run in `folder` now."""
    owner = read_record(folder / "bus" / "kernel.lock").decode(errors="replace")
    return bool(owner) and not owner.startswith(f"pid {status.pid},")


def standstill(folder: Path, status: Status) -> str:
    """Return a sentence if a status is too old, or a former kernel wrote it; otherwise an empty text."""
    age_s = time.time() - status.written
    if is_of_former_kernel(folder, status):
        return f"this was the state of a previous kernel, {age_s:.0f} s ago; another one is starting"
    if age_s <= LATE_S:
        return ""
    return f"the kernel (pid {status.pid}) stands still: it wrote its status {age_s:.0f} s ago"
