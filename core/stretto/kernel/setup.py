"""The parts of a kernel that exist before its server starts: components, scheduler, fleet."""

from pathlib import Path

import msgspec
import structlog

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import Composed
from stretto.assembly.contracts import expect_contract
from stretto.assembly.variants import variants_of
from stretto.bus.listening import url_host
from stretto.bus.messages.events import RunOwned
from stretto.bus.messages.subjects import Subjects
from stretto.config import BusConfig
from stretto.dataset import Curriculum, CurriculumDataset, Dataset
from stretto.errors import ConfigError, PluginError
from stretto.kernel.durable.changes import fingerprint_changes
from stretto.kernel.durable.checkpoint import KernelState, checkpoints_in
from stretto.kernel.durable.journal import OnStored
from stretto.kernel.durable.recovery import Replay
from stretto.kernel.facts import RunFacts
from stretto.kernel.fleet.fleet import Fleet
from stretto.kernel.fleet.forks import ForkServer
from stretto.kernel.schedule.commands import SchedulerSettings
from stretto.kernel.schedule.scheduler import Scheduler
from stretto.kernel.waits import Waits
from stretto.launcher import ClusterLauncher, ForkingLauncher, Launcher
from stretto.models.files import fingerprint_of
from stretto.weights import WeightsTransport

log = structlog.get_logger()


class RunSetup:
    """The parts of one kernel that need no bus.

    `resumed` is None for a new run, else folder and state of a checkpoint; the folder is None if the run
    resumes from its beginning. `values` is the number of the values in `assembly`. With `expires_batch`, an
    incomplete batch expires. With `replays`, the kernel trains the batches of a replay, then ends.
    """

    def __init__(
        self,
        assembly: Assembly,
        resumed: tuple[Path | None, KernelState] | None,
        *,
        forks: ForkServer | None = None,
        values: int = 1,
        expires_batch: bool = False,
        replays: Replay | None = None,
    ) -> None:
        self.assembly = assembly
        self.composed = composed = assembly.composed
        self.config = config = assembly.config
        self.folder = folder = assembly.folder
        self.resumed = resumed
        self.checkpoints = checkpoints_in(folder)
        """The names of the run's checkpoints when `resumed` was chosen."""
        self.values = values
        self.expires_batch = expires_batch
        self.replays = replays
        self.run = assembly.context.run
        self.names = Subjects(self.run)
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.forks: ForkServer | None = None
        self.datasets: dict[str, Dataset] = {
            path: assembly.make(path)
            for path in ("dataset", "evaluation.dataset")
            if path in composed.components
        }
        self.graph = assembly.graph
        self.placement = assembly.placement
        self.workers = [each for each in assembly.workers if replays is None or each.role == "trainer"]
        self.launcher: Launcher = assembly.make("launcher")
        if forks is not None and isinstance(self.launcher, ForkingLauncher):
            forks.keep_output(self.logs / "forks.out")
            self.launcher.use_forks(forks)
            self.forks = forks
        self.transport: WeightsTransport = assembly.make("weights")
        self.sources = {
            path: dataset.source_of if isinstance(dataset, CurriculumDataset) else _no_source
            for path, dataset in self.datasets.items()
        }
        self.scheduler = self.new_scheduler()
        self.fleet = Fleet(
            self.launcher,
            folder / "bus",
            self.logs,
            assembly.imports_of,
            max_restarts=config.launcher.max_restarts,
            values=values,
        )
        self.fleet.memory_of = lambda worker: f"; {need}" if (need := assembly.need_of(worker)) else ""
        self.facts = RunFacts(self.fleet, resumed[1] if resumed else None)
        self.waits = Waits(sampled=self.graph.samples)
        self.on_stored: OnStored = lambda sequence, message, events: None
        """Observers set it before the kernel begins."""

    def ownership(self, incarnation: int, *, attempts_from: int) -> RunOwned:
        """Return the kernel's event `RunOwned`."""
        return RunOwned(incarnation, self.scheduler.version, self.values, self.layout, attempts_from)

    def new_scheduler(self) -> Scheduler:
        return Scheduler(
            _settings(self.assembly, self.datasets),
            self.assembly.algorithm.keep,
            curriculum=curriculum_of(self.composed, self.datasets["dataset"]),
            evaluation_source=self.sources.get("evaluation.dataset", _no_source),
        )

    @property
    def bus(self) -> BusConfig:
        """The run's bus. The bundled server listens on an address that workers on other machines reach."""
        bus = self.config.bus
        if bus.url or bus.listen or not isinstance(self.launcher, ClusterLauncher):
            return bus
        return msgspec.structs.replace(bus, listen=url_host(self.launcher.address))

    @property
    def layout(self) -> str:
        """Engine, processes and threads of each group. Another layout may change bits of a repeated step."""
        return "; ".join(
            f"{group.path}: {group.section.use} x {group.section.processes}, {group.section.threads} threads"
            for group in self.placement.groups.values()
        )

    def check_inputs(self, *, accept: bool) -> None:
        """Refuse changed rows, as tickets name rows by number, and changed models, with which frozen copies
        begin. With `accept`, only report the change."""
        datasets = self.datasets if self.replays is None else {"dataset": self.datasets["dataset"]}
        rows = {path: each.fingerprint for path, each in datasets.items()}
        models = {f"models.{name}.path": each.path for name, each in self.config.models.items()}
        models["model"] = self.config.model
        weights = {path: text for path, model in models.items() if (text := fingerprint_of(model or ""))}
        changes = fingerprint_changes(self.folder, rows | weights, accept=accept)
        for path, (former, present) in changes.items():
            what, use = ("rows", "tickets name") if path in rows else ("weights", "frozen copies begin with")
            if not accept:
                raise ConfigError(
                    f"{path}: the {what} have changed since the run began (fingerprint {former}, now "
                    f"{present}), and its {use} them; put the previous ones back, or continue with the "
                    f"current ones: stretto resume {self.folder} --accept-dataset",
                    path=path,
                )
            log.warning("input changed", path=path, former=former, present=present)
            self.facts.problems.append(f"{path}: continued with changed {what} ({former}, now {present})")


def curriculum_of(composed: Composed, dataset: Dataset) -> Curriculum | None:
    """Return the curriculum of the run's dataset; None if the dataset has none."""
    if not isinstance(dataset, CurriculumDataset):
        return None
    try:
        curriculum = dataset.curriculum(composed.config.seed)
    except Exception as error:
        raise PluginError(composed.blame(error, "dataset")) from error
    expect_contract(curriculum, Curriculum, f"the curriculum of {composed.origin('dataset').label}")
    return curriculum


def _no_source(row: int) -> str:
    del row
    return ""


def _settings(assembly: Assembly, datasets: dict[str, Dataset]) -> SchedulerSettings:
    config, graph = assembly.config, assembly.graph
    queue, evaluation = config.queue, config.evaluation
    held_out = len(datasets.get("evaluation.dataset", ()))
    rows = evaluation.first_rows(held_out) if evaluation and config.evaluates_answers else 0
    return SchedulerSettings(
        steps=config.steps,
        batch_size=queue.batch_size,
        max_staleness=queue.max_staleness if graph.samples else 0,  # dataset rows have no version
        alternates=graph.samples and config.inference.sleeps,
        max_divergence=queue.max_divergence,
        rows=len(datasets["dataset"]),
        group_size=graph.source.samples,
        on_late=queue.on_late,
        max_attempts=queue.max_attempts,
        max_failures=queue.max_failures or 2 * queue.batch_size,
        max_filtered=queue.max_filtered or 16 * queue.batch_size,
        shuffle=config.dataset.shuffle,
        seed=config.seed,
        evaluation_rows=rows,
        evaluation_every=evaluation.every if evaluation else 0,
        evaluation_samples=evaluation.samples if evaluation else 1,
        evaluation_pace=assembly.evaluation_pace(rows),
        stops_on_collapse=config.on_collapse == "stop",
        variants={name: variant.weight for name, variant in variants_of(config).items()},
    )
