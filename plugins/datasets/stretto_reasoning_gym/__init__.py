"""`reasoning_gym`, dataset and reward: tasks of Reasoning Gym (Stojanovski et al. 2025, arXiv 2505.24760).

A separate process (`generator.py`) generates rows. A row has all data that the task's `score_answer` needs.
"""

import hashlib
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import msgspec

from stretto import Component, Context, DatasetConfig, RewardConfig, hookimpl
from stretto.component import NonNegativeInt, PositiveFloat, PositiveInt
from stretto.dataset import Row
from stretto_reasoning_gym.generator import Generator, Order, TaskOrder, restore

__all__ = ["ReasoningGym", "ReasoningGymConfig", "ReasoningGymReward", "WeightedTask"]


class WeightedTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the tasks that the rows are drawn from."""

    task: str
    """Name of the task, such as `leg_counting`."""
    weight: PositiveFloat = 1.0
    """Sampling weight, relative to the other tasks."""
    options: dict[str, Any] = {}
    """Options of the task."""


class ReasoningGymConfig(DatasetConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the dataset `reasoning_gym`."""

    task: str | None = None
    """Name of a single task, such as `leg_counting`; set either this or `tasks`."""
    options: dict[str, Any] = {}  # noqa: RUF012 - a struct copies it
    """Options of `task`, such as `{max_animals: 5}`; see its config class in the library."""
    tasks: tuple[WeightedTask, ...] = ()
    """Several tasks, sampled by weight."""
    size: PositiveInt = 1000
    """Number of rows."""
    seed: NonNegativeInt = 1
    """Random seed of the rows. Use different seeds for training rows and held-out rows."""
    system: str | None = "default"
    """Instruction before every question: the library's `default`, `DeepSeekZero`, `simple`, `direct` or
    `chain_of_draft`, which ask for `<answer>` tags, or a text of your own; null for none."""
    chat: bool = True
    """Write instruction and question as chat messages, for the model's template; false: as plain text."""

    def __post_init__(self) -> None:
        if (self.task is None) == (not self.tasks):
            raise ValueError("give either task or tasks")
        if self.options and self.task is None:
            raise ValueError("options belong to task; each of tasks has its own")


class ReasoningGym:
    """Rows with the columns id, prompt, question, answer, task, options and metadata."""

    def __init__(self, config: ReasoningGymConfig, context: Context) -> None:
        del context
        self._config = config
        orders = [TaskOrder(section.task, section.weight, section.options) for section in config.tasks]
        if config.task is not None:
            orders = [TaskOrder(config.task, 1.0, config.options)]
        order = Order(tuple(orders), config.size, config.seed, config.system)
        self._generator = Generator(order)
        sources = (order, config.chat, version("reasoning-gym"), platform.python_version_tuple()[:2])
        self.fingerprint = hashlib.sha256(msgspec.json.encode(sources)).hexdigest()
        """SHA-256 of everything that determines the rows."""

    def __len__(self) -> int:
        return self._config.size

    def __getitem__(self, index: int) -> Row:
        entry = self._generator.entry(index)
        instruction, question = entry.instruction, entry.question
        prompt: Any = f"{instruction}\n\n{question}\n" if instruction else f"{question}\n"
        if self._config.chat:
            system = [{"role": "system", "content": instruction}] if instruction else []
            prompt = [*system, {"role": "user", "content": question}]
        return {
            "id": f"{entry.task}-{index}",
            "prompt": prompt,
            "question": question,
            "answer": entry.answer,
            "task": entry.task,
            "options": entry.options,
            "metadata": entry.metadata,
        }


class ReasoningGymReward(RewardConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the reward `reasoning_gym`."""

    tag: str = "answer"
    """Name of the tag around the answer: the last text between `<tag>` and `</tag>` is scored. Without a tag
    there is no answer."""


def make_reward(config: ReasoningGymReward, context: Context) -> Callable[..., dict[str, float]]:
    del context
    from reasoning_gym.factory import create_dataset
    from reasoning_gym.utils import extract_answer

    tasks: dict[bytes, Any] = {}

    def task_of(name: str, options: dict[str, Any]) -> Any:
        key = msgspec.json.encode((name, options))
        if key not in tasks:
            tasks[key] = create_dataset(name, seed=0, **options)
        return tasks[key]

    def reasoning_gym(prompt: Any, completion: str, **columns: Any) -> dict[str, float]:
        """Return a reward between 0 and 1 and three metrics of 0 or 1: `accuracy` is 1 for the full reward,
        `answered` for an answer in its tags, `unreadable` for an answer that the task's code cannot read."""
        if "task" not in columns:
            raise ValueError("the row has no column 'task'; this reward is for rows of dataset reasoning_gym")
        entry = {name: restore(columns[name]) for name in ("question", "answer", "metadata")}
        task = task_of(columns["task"], columns["options"])
        answer = extract_answer(completion, tag_name=config.tag)
        try:
            score, unreadable = float(task.score_answer(answer, entry)), 0.0
        except Exception:  # noqa: BLE001 - some tasks let any error of parsing a wrong answer through
            score, unreadable = 0.0, 1.0
        return {
            "reward": score,
            "accuracy": float(score >= 1),
            "answered": float(answer is not None),
            "unreadable": unreadable,
        }

    return reasoning_gym


@hookimpl
def stretto_dataset() -> Iterator[Component[ReasoningGymConfig]]:
    yield Component(
        "reasoning_gym",
        ReasoningGym,
        ReasoningGymConfig,
        "generated reasoning tasks by name (Reasoning Gym): arithmetic, logic, puzzles, games",
        requires={"reasoning_gym": "stretto[reasoning-gym]"},
    )


@hookimpl
def stretto_reward() -> Iterator[Component[ReasoningGymReward]]:
    yield Component(
        "reasoning_gym",
        make_reward,
        ReasoningGymReward,
        "the score that the row's Reasoning Gym task gives to the tagged answer",
        requires={"reasoning_gym": "stretto[reasoning-gym]"},
    )
