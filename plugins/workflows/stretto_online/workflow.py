"""The workflow `online`: offer each sample as a session, and wait until it has ended and has a reward."""

from collections.abc import Sequence

import anyio

from stretto import Context, StrettoError
from stretto.agents.recorder import CallRecorder
from stretto.workflow import Prompt, Score, Session, Trajectory
from stretto_online import OnlineConfig
from stretto_online.registry import AgentSession, SessionRegistry


class OnlineError(StrettoError):
    """A session failed: there is nothing to train on."""


class OnlineWorkflow:
    """Makes a group of sessions for each row, with one registry for all rows."""

    def __init__(self, config: OnlineConfig, context: Context) -> None:
        self._config = config
        self.registry = SessionRegistry(config, context)
        """The sessions of this worker. The registry's endpoint serves as long as the worker lives."""

    async def run(self, prompt: Prompt, session: Session) -> Sequence[Trajectory]:
        """Return the trajectories of all sessions; those of one session have the same score."""
        await self.registry.open()
        samples = await session.members(lambda number: self._sample(prompt, session, number))
        return [trajectory for recorder, score in samples for trajectory in recorder.trajectories(score)]

    async def _sample(self, prompt: Prompt, session: Session, number: int) -> tuple[CallRecorder, Score]:
        recorder = CallRecorder(session, f"a{number}", self._config.call_limits)
        agent = AgentSession(prompt.row, recorder)
        with self.registry.listed(agent):
            try:
                score = await self._score_of(agent)
                if recorder.last is None:
                    cause = f"; a call failed: {recorder.fault}" if recorder.fault else ""
                    raise OnlineError(f"session {agent.id} ended without an answer of the model{cause}")
            except OnlineError as error:
                agent.ending = str(error)
                raise
            agent.ending = "it is complete"
        return recorder, score

    async def _score_of(self, agent: AgentSession) -> Score:
        timeout_s = self._config.session_timeout_s
        async with self.registry.endpoint.serve(agent.recorder) as agent.key:
            await self.registry.offer(agent)
            deadline = anyio.current_time() + timeout_s
            with anyio.CancelScope(deadline=deadline):
                await agent.ended.wait()
        with anyio.CancelScope(deadline=deadline):
            await agent.rewarded.wait()
        if agent.fault:
            raise OnlineError(f"session {agent.id} was given up: {agent.fault}")
        if agent.score is None or not agent.ended.is_set():
            missing = "had no reward" if agent.score is None else "had not ended"
            message = f"session {agent.id} {missing} {timeout_s:g} s after its start"
            raise OnlineError(f"{message} (workflow.session_timeout_s)")
        return agent.score
