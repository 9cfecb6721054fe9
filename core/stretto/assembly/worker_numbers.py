"""The numbers of a run's workers, and the place that set each number.

A number that `stretto scale` has changed replaces the run file's number, also after restarts and resumes. A
resume that changes the run file's number, such as `stretto resume RUN rollout.processes=4`, wins.
"""

from pathlib import Path

import msgspec

from stretto.assembly.compose import Composed
from stretto.errors import ConfigError
from stretto.launcher import Role
from stretto.machine.private_file import write_private

NUMBER_KEYS: dict[Role, str] = {
    "rollout": "rollout.processes",
    "inference": "inference.replicas",
    "verifier": "verifier.processes",
}


EVALUATOR = "inference-evaluation"
"""Id of the inference worker that serves evaluations alone."""


class _ChangedNumber(msgspec.Struct, frozen=True):
    file: int
    """The number in the run file at the time of the change."""
    now: int


class WorkerNumbers:
    """The numbers of one run's workers. `workers.json` in `folder` has the changed numbers. `folder` is
    None in a process that receives the numbers in force from the kernel."""

    def __init__(self, composed: Composed, folder: Path | None) -> None:
        self.composed = composed
        self._file = folder and folder / "workers.json"
        self._numbers = self._read()

    def in_force(self) -> dict[str, tuple[int, str]]:
        """Return dotted key -> (number, place that set it) for numbers that replace the run file's."""
        return {
            key: (number.now, f"{self._file}: {key}")
            for key, number in self._numbers.items()
            if number.file == self.composed.section(key)
        }

    def change(self, key: str, number: int) -> None:
        """Change the number at a key, also for later kernels of the run."""
        assert self._file is not None, "only the kernel changes numbers"
        self._numbers[key] = _ChangedNumber(self.composed.section(key), number)
        write_private(self._file, msgspec.json.format(msgspec.json.encode(self._numbers)) + b"\n")

    def _read(self) -> dict[str, _ChangedNumber]:
        if self._file is None or not self._file.exists():
            return {}
        try:
            numbers = msgspec.json.decode(self._file.read_bytes(), type=dict[str, _ChangedNumber])
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{self._file} is damaged: {error}; remove it, and the run file's numbers count again"
            ) from error
        return {key: number for key, number in numbers.items() if _has(self.composed, key)}


def _has(composed: Composed, key: str) -> bool:
    """Return whether a run still has a key: a resume may have removed a worker group."""
    node: object = composed.config
    for part in key.split("."):
        node = getattr(node, part, None)
    return isinstance(node, int)
