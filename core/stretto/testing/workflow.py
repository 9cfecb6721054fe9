"""The contract of workflows as tests, and a session without a run, for tests of workflows."""

import math
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple, TypeVar

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from stretto.agents.conversation import Conversation, conversation_in
from stretto.chat.prompts import both_tools
from stretto.component import Kind
from stretto.dataset import Message
from stretto.engine import Sampling
from stretto.environment import ENVIRONMENTS, Feedback, columns_of_turn, feedback_of
from stretto.errors import EngineError, together
from stretto.models.images import files_of
from stretto.models.tokenizer import ByteTokenizer, answer_texts
from stretto.reward import number_of
from stretto.testing.component import ComponentConformance, ComponentUnderTest
from stretto.tokenizer import Tokenizer
from stretto.tools import Tool, ToolAnswer, ToolResult, ToolsConfig, tool_of
from stretto.user_code.environment import with_files
from stretto.user_code.importable import load_importable
from stretto.workflow import (
    Answer,
    Images,
    OnTokens,
    Prompt,
    Score,
    Trajectory,
    Workflow,
    sample_numbers,
    texts_and_columns,
)

__all__ = ["FakeSession", "Generated", "ScoreCall", "WorkflowConformance", "assert_valid_trajectories"]


T = TypeVar("T")


class Generated(NamedTuple):
    """One sample that a workflow asked a `FakeSession` for."""

    prompt_ids: NDArray[np.int32]
    """(P,) ids of the prompt."""
    sampling: Sampling
    conversation_id: str
    """Empty outside of a conversation."""
    answer: Answer


class ScoreCall(NamedTuple):
    """One call of `FakeSession.score`."""

    texts: list[str]
    columns: Mapping[str, Sequence[Any]]
    """The columns besides those of the row, `completion_tokens` included."""


class FakeSession:
    """A `stretto.workflow.Session` without a run, which records the requests of the workflow. A script
    gives the answers; tools, environment and reward are plain functions.

    Tokens are bytes, unless there is another tokenizer. Token i of an answer has the logprob -0.5 - 0.001 i
    and the version 3 + i // 8, so a test sees whether a workflow mixes tokens up.

    Args:
        answers: texts of the answers, in a cycle; or a function of the prompt's text and the number of the
            conversation, from 0 (outside of one: of the sample).
        size: `group_size`.
        reward: reward of a text.
        tools: functions that the policy may call.
        environment: an environment, as a run file names one.
        images: the ticket's images, for a policy that reads images.
        row_tools: the tools of the row.
    """

    def __init__(
        self,
        answers: Sequence[str] | Callable[[str, int], str],
        *,
        size: int = 2,
        tokenizer: Tokenizer | None = None,
        sampling: Sampling | None = None,
        reward: Callable[[str], float] = len,
        tools: Sequence[Callable[..., Any]] = (),
        environment: Callable[..., Any] | None = None,
        images: Images | None = None,
        row_tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.group_size = size
        self.images = images
        self.row_tools = row_tools
        self.sampling = sampling or Sampling(max_tokens=400)
        self.tokenizer: Tokenizer = tokenizer or ByteTokenizer()
        self.generated: list[Generated] = []
        """Every sample, in the order of the requests."""
        self.scored: list[ScoreCall] = []
        self._answers = answers
        self._reward = reward
        self._tools: list[Tool] = [tool_of(function) for function in tools]
        self._environment = environment
        self._numbers: dict[str, int] = {}

    async def generate(
        self,
        prompt_ids: NDArray[np.int32],
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        conversation_id: str = "",
        on_tokens: OnTokens | None = None,
        images: Sequence[str] | None = None,
    ) -> list[Answer]:
        """Return the next n answers of the script, cut off at `max_tokens`."""
        del images
        number = self._number_of(conversation_id) if conversation_id else None
        sampling = sampling or self.sampling
        answers: list[Answer] = []
        for sample in range(n):
            answer = self._answer(prompt_ids, sampling, sample if number is None else number)
            self.generated.append(Generated(prompt_ids, sampling, conversation_id, answer))
            answers.append(answer)
            if on_tokens is not None:
                on_tokens(sample, answer.tokens)
        return answers

    def conversation(
        self,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        limit: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Conversation:
        """Begin a conversation, as in a run."""
        name, shown = f"c{len(self._numbers) + 1}", both_tools(self.row_tools, tools)
        return conversation_in(self, name, prompt, tools=shown, limit=limit, on_tokens=on_tokens)

    async def members(self, sample: Callable[[int], Awaitable[T]]) -> list[T]:
        """Run `sample` once for each sample of the group. The first error ends all."""
        return await together(sample, range(self.group_size))

    def begin(self, conversation_id: str) -> None:
        """Give the conversation the next number."""
        self._number_of(conversation_id)

    async def score(
        self,
        prompt: Prompt,
        answers: Sequence[Answer | str],
        *,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[Score]:
        """Score texts with the function `reward`, and add the metric `scored`."""
        del prompt
        texts, more = texts_and_columns(answers, columns or {})
        for name, values in more.items():
            assert len(values) == len(texts), (
                f"the column {name!r} has {len(values)} values for {len(texts)} answers"
            )
        self.scored.append(ScoreCall(texts, more))
        return [Score(float(self._reward(text)), {"scored": 1.0}) for text in texts]

    async def tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools."""
        return [tool.schema for tool in self._tools]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a tool in this process, without a sandbox."""
        tool = next((tool for tool in self._tools if tool.name == name), None)
        if tool is None:
            return ToolAnswer(f"error: no tool {name!r}", failed=True)
        result = await tool.run(arguments)
        result = result if isinstance(result, ToolResult) else ToolResult(result)
        return ToolAnswer(str(result.text), images=files_of(result.images))

    async def feedback(
        self, prompt: Prompt, conversation: Conversation, state: Mapping[str, Any]
    ) -> Feedback:
        """Call the environment in this process."""
        assert self._environment is not None, (
            "the workflow asks for feedback: give the session an environment"
        )
        state = dict(state)
        question = {**prompt.row, **columns_of_turn(conversation, state)}
        return feedback_of(with_files(self._environment(**question)), state)

    def _number_of(self, conversation_id: str) -> int:
        return self._numbers.setdefault(conversation_id, len(self._numbers))

    def _answer(self, prompt_ids: NDArray[np.int32], sampling: Sampling, number: int) -> Answer:
        if callable(self._answers):
            text = self._answers(self.tokenizer.decode(prompt_ids), number)
        else:
            text = self._answers[len(self.generated) % len(self._answers)]
        tokens = self.tokenizer.encode_text(text, after=self.tokenizer.decode(prompt_ids, special=True))
        finish = "stop" if len(tokens) <= sampling.max_tokens else "length"
        tokens = tokens[: sampling.max_tokens]
        positions = np.arange(len(tokens))
        return Answer(
            tokens=tokens,
            logprobs=(-0.5 - 0.001 * positions).astype(np.float32),
            versions=(3 + positions // 8).astype(np.int32),
            finish=finish,
            engine="inference-0",
            **answer_texts(prompt_ids, tokens, finish, self.tokenizer),
        )


def assert_valid_trajectories(trajectories: Sequence[Trajectory], session: FakeSession) -> None:
    """Assert that a trainer can train on the trajectories that a workflow made with this session: columns of
    one length, finite numbers, a reward; trained tokens are whole answers of the session, in the context in
    which they were sampled, with their own logprobs and versions."""
    assert trajectories, "the workflow returned no trajectory"
    assert not trajectories[0].part, "trajectory 0 is a part, but there is none before it"
    for number, trajectory in enumerate(trajectories):
        try:
            _assert_columns(trajectory)
            _assert_score(trajectory)
            _assert_sampled(trajectory, session.generated)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"trajectory {number}: {error}") from error


def _assert_columns(trajectory: Trajectory) -> None:
    mask = trajectory.loss_mask
    kinds = {"tokens": "i", "loss_mask": "b", "logprobs": "f", "versions": "i"}
    for name, kind in kinds.items():
        column = getattr(trajectory, name)
        assert column.shape == (len(trajectory.tokens),), (
            f"{name} has the shape {column.shape}, and tokens {trajectory.tokens.shape}"
        )
        assert column.dtype.kind == kind, f"{name} has the dtype {column.dtype}"
    assert mask.any(), "loss_mask marks no token, so there is nothing to train"
    assert not mask[0], "loss_mask marks the first token, which the policy cannot have sampled"
    logprobs, versions = trajectory.logprobs, trajectory.versions
    assert np.isfinite(logprobs).all(), f"logprobs are not finite: {logprobs[~np.isfinite(logprobs)]}"
    assert (logprobs <= 0).all(), f"a logprob is above 0: {logprobs.max()}"
    assert (logprobs[~mask] == 0).all(), "logprobs are not 0 where loss_mask is False"
    assert (versions[mask] >= 0).all(), "a sampled token has no version"
    assert (versions[~mask] == -1).all(), "versions are not -1 where loss_mask is False"


def _assert_score(trajectory: Trajectory) -> None:
    score = trajectory.score
    for name, number in {"reward": score.reward, **score.metrics}.items():
        number_of(number, repr(name))
    assert trajectory.finish in ("stop", "length"), f"finish is {trajectory.finish!r}"
    assert trajectory.engine, "engine is empty; expected that of the last answer"


def _assert_sampled(trajectory: Trajectory, generated: Sequence[Generated]) -> None:
    start = 0
    while (trained := np.flatnonzero(trajectory.loss_mask[start:])).size:
        start += int(trained[0])
        same_context = [
            each.answer for each in generated if np.array_equal(each.prompt_ids, trajectory.tokens[:start])
        ]
        assert same_context, f"no answer was sampled after the first {start} tokens"
        fitting = [answer for answer in same_context if _is_at(answer, trajectory, start)]
        assert fitting, (
            f"the trained tokens from {start} on are not an answer that was sampled there, with its own "
            "logprobs and versions"
        )
        start += max(len(answer.tokens) for answer in fitting)


def _is_at(answer: Answer, trajectory: Trajectory, start: int) -> bool:
    here = slice(start, start + len(answer.tokens))
    return bool(
        trajectory.loss_mask[here].all()
        and np.array_equal(trajectory.tokens[here], answer.tokens)
        and np.array_equal(trajectory.logprobs[here], answer.logprobs)
        and np.array_equal(trajectory.versions[here], answer.versions)
    )


class _BrokenSession(FakeSession):
    async def generate(self, *_: Any, **__: Any) -> list[Answer]:
        raise EngineError("no engine can serve this request")


class _IncompleteSession(FakeSession):
    """A session in which the first sample of `members` fails again and again."""

    has_members = False

    async def members(self, sample: Callable[[int], Awaitable[T]]) -> list[T]:
        self.has_members = True
        return await together(sample, range(1, self.group_size))


class _Watch:
    """Watches this thread's event loop from another thread, every 10 ms. On a machine that stands still, the
    other thread does not look either."""

    _LOOKS = 20

    def __init__(self) -> None:
        self.blocked = ""
        """Stack of the loop if it stood still for 20 looks in a row, not waiting for events; else empty."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, args=[threading.get_ident()])

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self, watched: int) -> None:
        last_place, num_same = None, 0
        while not self.blocked and not self._over.wait(0.01):
            frame = sys._current_frames()[watched]  # pyright: ignore[reportPrivateUsage]
            place = (frame.f_code, frame.f_lineno)
            idle = frame.f_code.co_filename.endswith("selectors.py")
            num_same = num_same + 1 if place == last_place and not idle else 0
            last_place = place
            if num_same == self._LOOKS:
                self.blocked = "".join(traceback.format_stack(frame, limit=3)).rstrip()


S = TypeVar("S", bound=FakeSession)


class WorkflowConformance(ComponentConformance):
    """The contract of `stretto.workflow.Workflow`: trajectories have what the policy sampled, and a workflow
    keeps nothing from one prompt to the next."""

    kind: ClassVar[Kind] = "workflow"
    row: ClassVar[Mapping[str, Any]] = {"prompt": "1+1=", "answer": "2"}
    """A row, with the columns that the workflow needs."""
    answers: ClassVar[Sequence[str]] = ("2", "It is 3.", "one more than one, so: 2")
    """Answers of the policy, in turn."""
    group_size: ClassVar[int] = 3
    chats: ClassVar[bool] = True
    """Whether the prompt of a row may be a chat, a list of messages, as most instruct models need."""

    @classmethod
    def session(
        cls,
        under_test: ComponentUnderTest,
        answers: Sequence[str] | Callable[[str, int], str],
        make: Callable[..., S] = FakeSession,
        reward: Callable[[str], float] = len,
    ) -> S:
        """Return a session of the row. It calls the environment or the tools that the section names."""
        return make(answers, size=cls.group_size, reward=reward, **_user_code(under_test.config))

    def test_its_trajectories_are_what_the_policy_sampled(self, under_test: ComponentUnderTest) -> None:
        """Each token has its own logprob and version, also when one object runs several prompts at once."""
        sessions = [
            self.session(under_test, [f"{text} ({number})" for text in self.answers]) for number in range(3)
        ]
        for session, trajectories in zip(sessions, self._played(under_test, *sessions), strict=True):
            assert_valid_trajectories(trajectories, session)

    def test_the_same_answers_make_the_same_trajectories(self, under_test: ComponentUnderTest) -> None:
        """A ticket that is issued again after a worker died must not train on something else."""
        first, second = (
            self._played(under_test, self.session(under_test, self.answers))[0] for _ in range(2)
        )
        assert [_plain(each) for each in first] == [_plain(each) for each in second], (
            "the same answers made other trajectories the second time"
        )

    def test_the_reward_gets_the_columns_that_the_component_names(
        self, under_test: ComponentUnderTest
    ) -> None:
        """`stretto check` uses `Component.reward_columns` to test whether the reward fits."""
        named = under_test.component.reward_columns
        if named is None:
            pytest.skip("the component names no `reward_columns`")
        session = self.session(under_test, self.answers)
        self._played(under_test, session)
        for scored in session.scored:
            assert scored.columns.keys() - {"prompt_opened", "reasoning_end"} == set(named), (
                f"the reward gets the columns {', '.join(scored.columns) or 'none'}; reward_columns names "
                f"{', '.join(named) or 'none'}"
            )

    def test_a_prompt_may_be_a_chat(self, under_test: ComponentUnderTest) -> None:
        """Skipped if the class says `chats = False`."""
        if not self.chats or not isinstance(self.row["prompt"], str):
            pytest.skip("its rows are chats" if self.chats else "its rows are no chats")
        row = {**self.row, "prompt": [{"role": "user", "content": self.row["prompt"]}]}
        session = self.session(under_test, self.answers)
        try:
            [trajectories] = self._played(under_test, session, row=row)
        except Exception as error:
            raise AssertionError(
                f"with the chat {row['prompt']} as prompt: {type(error).__name__}: {error}; a workflow whose "
                "prompts are texts says `chats = False`"
            ) from error
        assert_valid_trajectories(trajectories, session)

    def test_a_sample_gets_the_reward_of_its_own_answers(self, under_test: ComponentUnderTest) -> None:
        """It never gets that of another sample. The test shows nothing if a workflow changes the rewards."""
        rewards, turns = dict[str, float](), Counter[int]()

        def answer(_: str, number: int) -> str:
            turns[number] += 1
            return f"{self.answers[(turns[number] - 1) % len(self.answers)]} ({number})"

        session = self.session(
            under_test,
            answer,
            reward=lambda text: rewards.setdefault(text, 2.0 ** len(rewards)),  # no two sums are equal
        )
        [trajectories] = self._played(under_test, session)
        numbers = sample_numbers(trajectories)
        for number in set(numbers):
            parts = [each for of, each in zip(numbers, trajectories, strict=True) if of == number]
            sampled_text = "".join(session.tokenizer.decode(each.tokens[each.loss_mask]) for each in parts)
            own_answers = [each.answer.text for each in session.generated if each.answer.text in sampled_text]
            for text, reward in rewards.items():
                fits = any(text in each or each in text for each in own_answers)
                assert fits or reward != parts[0].score.reward, (
                    f"sample {number} has the reward of {text!r}, and its answers are {own_answers}"
                )

    def test_it_does_not_block_the_event_loop(self, under_test: ComponentUnderTest) -> None:
        """Anything that waits without `await`, such as `time.sleep`, stops a worker's hundreds of tickets."""
        self._played(under_test, self.session(under_test, self.answers))  # imports the modules that it needs
        watch = _Watch()
        self._played(under_test, self.session(under_test, self.answers), watch=watch)
        assert not watch.blocked, (
            f"it blocks the event loop; use `anyio.to_thread.run_sync`, or an asynchronous library:\n"
            f"{watch.blocked}"
        )

    def test_an_error_of_the_engine_fails_the_prompt(self, under_test: ComponentUnderTest) -> None:
        """The workflow does not turn it into a trajectory."""
        session = self.session(under_test, self.answers, _BrokenSession)
        try:
            [trajectories] = self._played(under_test, session)
        except Exception:  # noqa: BLE001 - any exception fails the ticket
            return
        raise AssertionError(f"no engine served a request, and it returned {len(trajectories)} trajectories")

    def test_a_sample_that_fails_costs_no_other(self, under_test: ComponentUnderTest) -> None:
        """The group is then the samples that `Session.members` returns."""
        session = self.session(under_test, self.answers, _IncompleteSession)
        [trajectories] = self._played(under_test, session)
        if not session.has_members:
            pytest.skip("the workflow does not make its samples apart from each other")
        assert_valid_trajectories(trajectories, session)
        number = len(set(sample_numbers(trajectories)))
        assert number == self.group_size - 1, f"{number} samples of the {self.group_size - 1} that were made"

    def test_an_answer_without_a_score_gets_none(self, under_test: ComponentUnderTest) -> None:
        """`Session.score` returns NaN if scoring an answer failed; all parts of its sample then have NaN."""
        scored: list[str] = []

        def reward(text: str) -> float:
            scored.append(text)
            return math.nan if len(scored) == 1 else 1.0

        session = self.session(under_test, self.answers, reward=reward)
        [trajectories] = self._played(under_test, session)
        if not scored:
            pytest.skip("the workflow gives the reward itself")
        numbers = sample_numbers(trajectories)
        unscored = {
            number
            for number, each in zip(numbers, trajectories, strict=True)
            if math.isnan(each.score.reward)
        }
        assert len(unscored) == 1, f"one answer has no score, and the samples {sorted(unscored)} have none"
        for number, each in zip(numbers, trajectories, strict=True):
            assert math.isnan(each.score.reward) == (number in unscored), (
                f"parts of sample {number} have different rewards"
            )

    def _played(
        self,
        under_test: ComponentUnderTest,
        *sessions: FakeSession,
        row: Mapping[str, Any] | None = None,
        watch: _Watch | None = None,
    ) -> list[Sequence[Trajectory]]:
        """Run `row`, by default the class's row, in each session, concurrently with one workflow object."""
        row = self.row if row is None else row

        async def play_all() -> list[Sequence[Trajectory]]:
            workflow: Workflow = under_test.make(worker="rollout-0")

            async def play(session: FakeSession) -> Sequence[Trajectory]:
                ids = session.tokenizer.encode_prompt(row["prompt"])
                return await workflow.run(Prompt(row, ids), session)

            with watch or nullcontext():
                return await together(play, sessions)

        return anyio.run(play_all)


def _user_code(config: Any) -> dict[str, Any]:
    code: dict[str, Any] = {}
    if isinstance(config, ENVIRONMENTS):
        code["environment"] = load_importable(config.environment)
    if isinstance(config, ToolsConfig):
        code["tools"] = [load_importable(tool) for tool in config.tools]
    return code


def _plain(trajectory: Trajectory) -> tuple[Any, ...]:
    columns = (trajectory.tokens, trajectory.loss_mask, trajectory.logprobs, trajectory.versions)
    return (*(column.tolist() for column in columns), trajectory.score, trajectory.finish, trajectory.part)
