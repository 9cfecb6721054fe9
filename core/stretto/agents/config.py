"""The keys that the sections of all workflows with agents share."""

from stretto.agents.recorder import CallLimits
from stretto.chat.calls import ParserName
from stretto.component import PositiveInt
from stretto.workflow import WorkflowConfig

__all__ = ["AgentCallsConfig"]


class AgentCallsConfig(WorkflowConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the section of a workflow whose agents call the policy over HTTP."""

    max_calls: PositiveInt = 64
    """Maximum number of answers that one run of the agent may request."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens of a whole chat, prompt included. By default only the engine's own limit
    applies, beyond which a call fails."""
    max_total_tokens: PositiveInt | None = None
    """Maximum number of tokens that may be sampled in one run of the agent; null for no limit."""
    tool_parser: ParserName = "auto"
    """Format in which the policy writes tool calls: hermes (also Qwen), llama3, mistral, or auto: the
    one that the chat template writes."""

    @property
    def call_limits(self) -> CallLimits:
        """The limits of one run of an agent."""
        return CallLimits(self.max_calls, self.max_total_tokens, self.max_tokens)
