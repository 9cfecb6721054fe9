"""The verifier worker: rewards, tools and environments in child processes, each call with a time limit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from stretto.assembly.compose import Composed
from stretto.assembly.variants import runs_of
from stretto.bus.messages import scoring
from stretto.bus.messages.membership import Heartbeat
from stretto.environment import ENVIRONMENTS, EnvironmentConfig, EnvironmentToolsConfig, Feedback
from stretto.errors import ConfigError
from stretto.reward import RewardConfig
from stretto.tools import ToolAnswer, ToolsConfig
from stretto.user_code import environment, reward, tools
from stretto.user_code.faults import SampleFault
from stretto.user_code.guard import guarded
from stretto.workers.context import WorkerContext
from stretto.workers.scoring.child_pool import ChildEnded, Program
from stretto.workers.scoring.pause import Pause

log = structlog.get_logger()

C = TypeVar("C")
S = TypeVar("S", bound="_Service")

_Score = tuple[float, dict[str, float]]
"""Reward and metrics of an answer."""

_DRAIN_POLL_S = 0.05
_ROUTES_S = 2.0  # then all rollout workers have new routes: the kernel sends them at once, and every second
_MOST_LOGGED = 20
"""Maximum number of answers over a limit that one verifier worker logs."""
_END = 200
"""Characters of such an answer in the log: its end, which has the result."""
_LONGEST_REASON = 500
"""Maximum number of characters of a reason in a heartbeat."""


class VerifierWorker:
    """One verifier worker with its children."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        runs = runs_of(context.composed)
        self._rewards = _by_variant(context, runs, "reward", RewardConfig, _Rewards)
        self._tools = _by_variant(context, runs, "workflow", ToolsConfig, _Tools)
        self._environments = _by_variant(context, runs, "workflow", ENVIRONMENTS, _Environments)
        services = (self._rewards, self._tools, self._environments)
        self._services: list[_Service] = list(
            {id(service): service for of_variant in services for service in of_variant.values()}.values()
        )

    async def run(self, ready: Callable[[], None]) -> None:
        """Start the children, then serve until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                for service in self._services:
                    await service.open(tasks)
                await self._serve()
                ready()
                await anyio.sleep_forever()
        finally:
            self._context.bus.stop_serving()  # rollout workers ask another verifier
            for service in self._services:
                await service.children.close()

    async def drain(self) -> None:
        """Wait until rollout workers have routes to others only, and then until no child works on a call."""
        await anyio.sleep(_ROUTES_S)
        while any(service.children.calls for service in self._services):
            await anyio.sleep(_DRAIN_POLL_S)

    async def _serve(self) -> None:
        bus, subject = self._context.bus, self._context.subject
        if rewards := self._rewards:
            await bus.serve(
                subject("score"),
                scoring.ScoreSamples,
                lambda each: _service(rewards, each.variant).score(each),
            )
        if tools := self._tools:
            await bus.serve(
                subject("tools"), scoring.AskTools, lambda each: _service(tools, each.variant).list()
            )
            await bus.serve(
                subject("tool"), scoring.RunTool, lambda each: _service(tools, each.variant).call(each)
            )
        if environments := self._environments:
            await bus.serve(
                subject("environment"),
                scoring.EnvironmentTurn,
                lambda each: _service(environments, each.variant).answer(each),
            )

    def heartbeat(self, heartbeat: Heartbeat) -> Heartbeat:
        """Add the children's seconds of work, the share of them that work, and why calls pause."""
        busy_s = sum(service.children.busy_s for service in self._services)
        used = max((service.used for service in self._services), default=0.0)
        paused = "; ".join(service.pause.reason for service in self._services if service.pause.reason)
        return msgspec.structs.replace(heartbeat, busy_s=busy_s, used=used, paused=paused[:_LONGEST_REASON])


class _Service:
    """One sort of requests to this worker, and the children that answer them."""

    def __init__(self, context: WorkerContext, program: Program, children: int) -> None:
        self.children = context.process.children(program, children)
        self._most = children
        self.pause = Pause("", 0)
        self.reported = b""

    async def open(self, tasks: TaskGroup) -> None:
        self.reported = await self.children.open(tasks)

    @property
    def used(self) -> float:
        """Share of the children that work; 1 if more calls than children are under way."""
        return min(1.0, self.children.calls / self._most)


def _by_variant(
    context: WorkerContext,
    runs: Mapping[str, Composed],
    section: str,
    kind: type[C] | tuple[type[C], ...],
    make: Callable[[WorkerContext, Composed, C], S],
) -> dict[str, S]:
    """Return the service of each variant with a section of a kind. Variants with one section share one."""
    by_section: dict[int, S] = {}
    services: dict[str, S] = {}
    for variant, composed in runs.items():
        config = getattr(composed.config, section)
        if isinstance(config, kind):
            if id(config) not in by_section:
                by_section[id(config)] = make(context, composed, config)
            services[variant] = by_section[id(config)]
    return services


def _service(services: Mapping[str, S], variant: str) -> S:
    if variant not in services:
        raise ConfigError(f"this verifier worker serves no such request for the variant {variant!r}")
    return services[variant]


class _Rewards(_Service):
    """Scores the answers of a group in one call. If that fails, scores them one by one."""

    def __init__(self, context: WorkerContext, composed: Composed, config: RewardConfig) -> None:
        self._timeout_s = config.timeout_s
        self._answer_s = config.limits[0] or 0.0
        self._num_logged = 0
        setup = reward.setup_frame(msgspec.to_builtins(composed.config), context.component_context)
        program = Program("the scoring process", guarded(reward.COMMAND), setup)
        super().__init__(context, program, composed.config.verifier.children)
        self.pause = Pause("the reward", composed.config.verifier.pause_s)

    async def score(self, message: scoring.ScoreSamples) -> scoring.Scored:
        task = reward.Task(message.row, message.completions, message.columns)
        scored = await self._scored(task)
        if isinstance(scored, SampleFault):
            scored = await self._one_by_one(task, scored)
        return scoring.Scored(tuple(scored))

    async def _one_by_one(self, task: reward.Task, fault: SampleFault) -> Sequence[_Score | SampleFault]:
        if len(task.completions) == 1:
            return [fault]
        columns = msgspec.msgpack.decode(task.columns, type=dict[str, list[Any]])
        scores: list[_Score | SampleFault] = [fault] * len(task.completions)

        async def score_one(index: int) -> None:
            single = {name: values[index : index + 1] for name, values in columns.items()}
            completion = task.completions[index : index + 1]
            scored = await self._scored(reward.Task(task.row, completion, msgspec.msgpack.encode(single)))
            [scores[index]] = [scored] if isinstance(scored, SampleFault) else scored

        async with anyio.create_task_group() as tasks:
            for index in range(len(scores)):
                tasks.start_soon(score_one, index)
        return scores

    async def _scored(self, task: reward.Task) -> Sequence[_Score] | SampleFault:
        return await self.pause.call(lambda: self._asked(task))

    async def _asked(self, task: reward.Task) -> Sequence[_Score] | SampleFault:
        timeout_s = self._timeout_s + self._answer_s * len(task.completions)
        try:
            answer = await self.children.ask(task, reward.ScoringResult, timeout_s)
        except TimeoutError:
            return _lost(f"reward took longer than reward.timeout_s={self._timeout_s:g}")
        except ChildEnded as error:
            return _ended("reward", error)
        if answer.fault:
            return answer.fault
        for index, reason in answer.over.items():
            self._log_limit(task.completions[index], reason)
        return answer.scores

    def _log_limit(self, completion: str, reason: str) -> None:
        """Log why an answer scored 0, only for the first `_MOST_LOGGED` answers. The metrics count all."""
        self._num_logged += 1
        if self._num_logged <= _MOST_LOGGED:
            log.warning(
                "answer scored 0", reason=f"it {reason}", characters=len(completion), end=completion[-_END:]
            )
        if self._num_logged == _MOST_LOGGED:
            log.warning("further answers over a limit are not logged, only counted in the metrics")


class _Tools(_Service):
    """Calls tools in the sandbox. If a tool fails, the policy gets the error as the tool's answer."""

    def __init__(self, context: WorkerContext, composed: Composed, config: ToolsConfig) -> None:
        self._timeout_s = config.tool_timeout_s
        run = composed.config
        command = tools.command(config, run.sandbox, context.component_context.folder)
        program = Program(
            "the tool process",
            command.argv,
            tools.setup_frame(config),
            command.env,
            command.folder,
            tools.max_answer(config),
            repeats=False,
        )
        super().__init__(context, program, run.verifier.tool_children)

    async def list(self) -> scoring.ToolList:
        return scoring.ToolList(self.reported)

    async def call(self, message: scoring.RunTool) -> scoring.ToolDone:
        invocation = tools.Invocation(message.name, message.arguments, message.images)
        try:
            return scoring.ToolDone(await self.children.ask(invocation, ToolAnswer, self._timeout_s))
        except TimeoutError:
            return self._failed(message, f"took longer than {self._timeout_s:g} s")
        except ChildEnded as error:
            return self._failed(message, f"ended its process: {error}")

    def _failed(self, message: scoring.RunTool, fault: str) -> scoring.ToolDone:
        log.warning("tool failed", tool=message.name, error=fault)
        return scoring.ToolDone(ToolAnswer(f"error: {message.name} {fault}", failed=True))


class _Environments(_Service):
    def __init__(
        self, context: WorkerContext, composed: Composed, config: EnvironmentConfig | EnvironmentToolsConfig
    ) -> None:
        self._timeout_s = config.environment_timeout_s
        setup = environment.setup_frame(config.environment)
        program = Program("the environment process", guarded(environment.COMMAND), setup)
        super().__init__(context, program, composed.config.verifier.children)
        self.pause = Pause("the environment", composed.config.verifier.pause_s)

    async def answer(self, message: scoring.EnvironmentTurn) -> scoring.EnvironmentAnswer:
        question = environment.Question(message.arguments)
        answer = await self.pause.call(lambda: self._answered(question))
        if isinstance(answer, SampleFault):
            return scoring.EnvironmentAnswer(fault=answer)
        return scoring.EnvironmentAnswer(answer)

    async def _answered(self, question: environment.Question) -> Feedback | SampleFault:
        try:
            reaction = await self.children.ask(question, environment.Reaction, self._timeout_s)
        except TimeoutError:
            return _lost(f"environment took longer than workflow.environment_timeout_s={self._timeout_s:g}")
        except ChildEnded as error:
            return _ended("environment", error)
        return reaction.fault or reaction.feedback


def _lost(error: str) -> SampleFault:
    return SampleFault(error, "infrastructure", error)


def _ended(name: str, error: ChildEnded) -> SampleFault:
    return SampleFault(f"{name} ended its process: {error}", "environment", f"{name} ended its process")
