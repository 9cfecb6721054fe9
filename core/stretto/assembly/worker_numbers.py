"""Numbers of processes that were changed while the run lived: by `stretto scale`, or by the run itself.

They are in force until the run ends, through restarts of its kernel and through `stretto resume`. A number of
the run file that a resume changes replaces them: `stretto resume RUN rollout.processes=4` starts 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from stretto.assembly.compose import Composed
from stretto.base.private_file import write_private
from stretto.errors import ConfigError
from stretto.launcher import Role

__all__ = ["NUMBER_KEYS", "WorkerNumbers"]

NUMBER_KEYS: dict[Role, str] = {
    "rollout": "rollout.processes",
    "inference": "inference.replicas",
    "verifier": "verifier.processes",
}
"""Role -> key of the run file that has its number of workers."""


class _ChangedNumber(msgspec.Struct, frozen=True):
    """A changed number."""

    file: int
    """The number of the run file when it was changed."""
    now: int


class WorkerNumbers:
    """The changed numbers of one run, in `workers.json`.

    Raises:
        ConfigError: if the file is damaged.
    """

    def __init__(self, composed: Composed, folder: Path) -> None:
        self._composed = composed
        self._file = folder / "workers.json"
        self._numbers = self._read()

    def in_force(self) -> dict[str, int]:
        """Return the numbers that differ from the run file's, by dotted key: those that were changed, and
        those that `elastic` does not allow at the start."""
        changed: dict[str, int] = {
            key: number.now
            for key, number in self._numbers.items()
            if number.file == self._composed.section(key)
        }
        for role, (fewest, most) in self._composed.config.elastic.ranges().items():
            key = NUMBER_KEYS[role]
            present: int = changed[key] if key in changed else self._composed.section(key)
            changed[key] = min(max(present, fewest), most)
        return changed

    def change(self, key: str, number: int) -> None:
        """Change the number at a key, also for later kernels of the run."""
        self._numbers[key] = _ChangedNumber(self._composed.section(key), number)
        write_private(self._file, msgspec.json.format(msgspec.json.encode(self._numbers)) + b"\n")

    def _read(self) -> dict[str, _ChangedNumber]:
        if not self._file.exists():
            return {}
        try:
            numbers = msgspec.json.decode(self._file.read_bytes(), type=dict[str, _ChangedNumber])
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{self._file} is damaged: {error}; remove it, and the run file's numbers count again"
            ) from error
        return {key: number for key, number in numbers.items() if _has(self._composed, key)}


def _has(composed: Composed, key: str) -> bool:
    """Whether a run still has a key: a resume may have removed a worker group."""
    parts: Iterable[str] = key.split(".")
    node: object = composed.config
    for part in parts:
        node = getattr(node, part, None)
    return isinstance(node, int)
