"""Requests to verifiers, and their answers: scores, tools, environments."""

from stretto.bus.messages.base import Message, VariantName
from stretto.environment import Feedback
from stretto.tools import ToolAnswer
from stretto.user_code.faults import SampleFault


class ScoreSamples(Message, frozen=True):
    """Rollout worker to verifier worker, answered by `Scored`: score these completions of one row."""

    row: bytes
    """The dataset row, in msgpack."""
    completions: tuple[str, ...]
    columns: bytes
    """More arguments for the reward: a msgpack map of lists, with a value for each completion."""
    variant: VariantName = ""


class Scored(Message, frozen=True):
    """Reward and metrics of each completion, or the fault because of which it has none."""

    scores: tuple[tuple[float, dict[str, float]] | SampleFault, ...]


class AskTools(Message, frozen=True):
    """Rollout worker to verifier worker, answered by `ToolList`: list the tools of the run."""

    variant: VariantName = ""


class ToolList(Message, frozen=True):
    """All tools of the run."""

    schemas: bytes
    """A msgpack list of JSON schemas."""


class RunTool(Message, frozen=True):
    """Rollout worker to verifier worker, answered by `ToolDone`: run the tool that the policy calls."""

    name: str
    arguments: bytes
    """A JSON object, as the policy wrote it."""
    variant: VariantName = ""
    images: bool = False
    """Whether the policy reads images. If not, the tool's answer contains none."""


class ToolDone(Message, frozen=True):
    """The tool's answer to the policy."""

    answer: ToolAnswer


class EnvironmentTurn(Message, frozen=True):
    """Rollout worker to verifier worker, answered by `EnvironmentAnswer`: react to the policy's answer."""

    arguments: bytes
    """Arguments by name: a msgpack map."""
    variant: VariantName = ""


class EnvironmentAnswer(Message, frozen=True):
    """The environment's feedback on the policy's answer, or the fault because of which there is none."""

    feedback: Feedback = Feedback()
    fault: SampleFault | None = None
