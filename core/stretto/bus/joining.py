"""The tokens with which worker processes join a run, and the bootstrap file of each worker.

The credentials of a role are the same for all its workers. So a worker also proves its id: its token is an
HMAC-SHA256 of the id under a key that only the run's user can read.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

import msgspec

from stretto.bus.lock import KernelLock
from stretto.bus.messages import is_worker_id
from stretto.bus.server import Bootstrap
from stretto.errors import ConfigError
from stretto.launcher import Role
from stretto.private_file import write_private

__all__ = ["is_token_of", "write_bootstrap"]

_KEY_BYTES = 32


def write_bootstrap(folder: Path, worker: str) -> Path:
    """Write the bootstrap file of one worker into the run's bus folder, mode 0600, and return its path.

    Raises:
        ConfigError: if `worker` is not a worker's id, or the folder has no credentials of its role.
    """
    if not is_worker_id(worker):
        raise ConfigError(f"{worker!r} is not the id of a worker; expected an id such as 'rollout-7'")
    role = worker.partition("-")[0]
    content = msgspec.structs.replace(
        Bootstrap.read(folder / f"{role}.json"),
        worker=worker,
        token=_token(folder, worker),
        lock=KernelLock.of(folder),
    )
    path = folder / f"{worker}.json"
    write_private(path, msgspec.json.encode(content))
    return path


def is_token_of(folder: Path, role: Role, worker: str, token: str) -> bool:
    """Whether a process with this token may join as this worker, and the worker has this role."""
    return worker.startswith(f"{role}-") and hmac.compare_digest(_token(folder, worker), token)


def _token(folder: Path, worker: str) -> str:
    return hmac.digest(_key(folder), worker.encode(), "sha256").hex()


def _key(folder: Path) -> bytes:
    """Return the run's key. The first call draws it; a resumed run has the same key."""
    path = folder / "join.key"
    if not path.exists():
        write_private(path, secrets.token_bytes(_KEY_BYTES))
    return path.read_bytes()
