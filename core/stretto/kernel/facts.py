"""Facts about a run that are in no event: progress, problems, time and tokens used."""

import msgspec
import structlog

from stretto.bus.client import Bus
from stretto.bus.messages.events import JournalHead
from stretto.kernel.durable.checkpoint import KernelState, LostData
from stretto.kernel.ending import Ending
from stretto.kernel.fleet.fleet import Fleet
from stretto.machine import clock

log = structlog.get_logger()


class RunFacts:
    """The facts of one kernel. Its parts update the facts; status, summary and checkpoints report them."""

    def __init__(self, fleet: Fleet, resumed: KernelState | None) -> None:
        self._fleet = fleet
        self._resumed = resumed or KernelState.initial()
        self._began = clock.now()
        self.note = "starting"
        """What the run is doing while it does not train; empty while it waits for workers."""
        self.loss = ""
        """Message about the lost trainer while trainers are replaced; otherwise empty."""
        self.started = False
        """Whether the kernel has issued its first tickets."""
        self.begun = resumed is None
        """Whether the kernel may change the run's files. A resume that is refused earlier leaves no trace."""
        self.ending = Ending()
        self.bus: Bus | None = None
        """The kernel's connection; None before it is open."""
        self.problems = [*self._resumed.problems]
        """Problems that did not end the run, including those of previous kernels up to the checkpoint."""
        self.checkpoints: list[str] = []
        self.lost = self._resumed.lost
        self.trained_tokens = self._resumed.trained_tokens
        """Tokens trained so far, including those of previous kernels up to the checkpoint."""
        self.events_on_disk = 0
        """Sequence number in the journal's stream up to which the run's folder has the events."""
        self.journal = JournalHead(0, "")
        self.refused = 0
        """Number of malformed messages that the kernel has refused; set at the end of the run."""

    @property
    def wall_s(self) -> float:
        """Seconds so far, including those of previous kernels up to the checkpoint."""
        return self._resumed.wall_s + clock.now() - self._began

    @property
    def generated_tokens(self) -> int:
        """Number of tokens sampled so far, including those of previous kernels up to the checkpoint."""
        return self._resumed.generated_tokens + self._fleet.generated_tokens()

    def add_loss(self, loss: LostData, version: int | None, *, changed: bool) -> None:
        """Report data that the run lost because the store is damaged or the values have changed."""
        self.lost += loss
        parts = [f"{loss.groups} finished groups", f"{loss.messages} messages of the log"]
        parts += ["a part of the journal"] if loss.journals else []
        if version is not None:
            parts.insert(0, f"{loss.steps} steps, from version {version} on")
        is_damage = not changed or loss.messages or loss.journals
        why = "the store was damaged" if is_damage else "the values have changed"
        self.problems.append(f"{why}; lost: {', '.join(parts)}; what is lost is done again")
        log_loss = log.error if is_damage else log.warning
        log_loss(why, version=version, **msgspec.structs.asdict(loss))
