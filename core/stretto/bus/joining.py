"""The tokens with which worker processes join a run, and the bootstrap file of each worker.

The credentials of a role are the same for all its workers. So a worker also proves its id: its token is an
HMAC-SHA256 of the id under a key that only the run's user can read. The commands of the operator carry such a
token too, because on a server of the user's own all parties may have the same credentials.
"""

import hmac
import secrets
from functools import cache
from importlib.metadata import version
from itertools import count
from pathlib import Path

import msgspec

from stretto.bus.lock import KernelLock
from stretto.bus.messages.subjects import is_worker_id
from stretto.bus.server import OPERATOR, Bootstrap
from stretto.errors import ConfigError
from stretto.launcher import Role
from stretto.machine.private_file import write_private

_KEY_BYTES = 32


def write_bootstrap(folder: Path, worker: str) -> Path:
    """Write the bootstrap file of one worker into the run's bus folder, and return its path."""
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


def reserve_worker(folder: Path, role: str) -> Path:
    """Write the bootstrap file of a worker started by hand. It reserves the next id, such as `rollout-h0`."""
    Bootstrap.read(folder / f"{role}.json")  # raises before the first file is created
    for number in count():
        path = folder / f"{role}-h{number}.json"
        try:
            path.touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            continue
        return write_bootstrap(folder, path.stem)
    raise AssertionError


def operator_bootstrap(folder: Path) -> Bootstrap:
    """Return the bootstrap with which the operator sends commands to a run."""
    bootstrap = Bootstrap.read(folder / f"{OPERATOR}.json")
    return msgspec.structs.replace(bootstrap, token=_token(folder, OPERATOR))


@cache
def own_version() -> str:
    """Return the version of stretto in this process. Worker and kernel must have the same one."""
    return version("stretto")


def check_operator(folder: Path, token: str) -> None:
    """Raise ConfigError if a command does not come from the run's user."""
    if not _is_token(folder, OPERATOR, token):
        raise ConfigError(
            "this command needs the token of the run's operator, which is in bus/join.key of the run's folder"
        )


def is_token_of(folder: Path, role: Role, worker: str, token: str) -> bool:
    """Return whether the worker's id has this role, and the token proves this id."""
    return worker.startswith(f"{role}-") and _is_token(folder, worker, token)


def _is_token(folder: Path, worker: str, token: str) -> bool:
    # Compare bytes: compare_digest raises for a text that is not ASCII.
    return hmac.compare_digest(_token(folder, worker).encode(), token.encode())


def _token(folder: Path, worker: str) -> str:
    key = folder / "join.key"
    if not key.exists():  # the first call creates the key; a resumed run uses the same key
        write_private(key, secrets.token_bytes(_KEY_BYTES))
    return hmac.digest(key.read_bytes(), worker.encode(), "sha256").hex()
