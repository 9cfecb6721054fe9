"""Weight transport `collective`: torch.distributed carries versions from trainer to inference workers.

For every transfer a group of two is made, apart from the training's own world: trainer and worker meet over
the run's bus and then speak gloo over one network interface. Engines come and go, and a transfer that breaks
off leaves nothing behind. The trainer sends from a snapshot while it trains on; the engine decodes on until a
version is complete and checked. Faster than `bus`. A worker whose engine is a server of its own has to import
torch for this, which it does without otherwise.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from stretto import Component, Context, Problem, WeightsConfig, hookimpl
from stretto.component import PositiveFloat, PositiveInt
from stretto.errors import offer
from stretto.models.version_files import RunFolders, VersionFolders

if TYPE_CHECKING:
    from stretto.config import RunConfig
    from stretto.weights import Wire

__all__ = ["CollectiveConfig", "CollectiveTransport"]


class CollectiveConfig(WeightsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the weight transport `collective`."""

    interface: str = "lo"
    """Network interface over which trainer and engines reach each other, of the same name on all machines.
    What travels there is not encrypted. The default is for one machine."""
    folder: str | None = None
    """Folder for versions, on every machine its own. Default: shared memory where there is some, else the one
    for temporary files."""
    keep: PositiveInt = 3
    """Newest versions that the trainer keeps; a slower transfer begins anew with the newest."""
    bucket_mb: PositiveInt = 64
    """Bytes that are sent at once, in MiB."""
    deadline_s: PositiveFloat = 60.0
    """For both ends to meet, and for each bucket. After that the transfer has failed."""
    shard_gb: PositiveFloat = 2.0
    """Largest file in GiB; no more than this is held in memory besides the model."""


class CollectiveTransport:
    """Both ends, for the processes of one run."""

    def __init__(self, config: CollectiveConfig, context: Context) -> None:
        self._config = config
        self._folders = RunFolders(context, config.folder)

    def publisher(self, wire: Wire) -> Any:
        """The end beside the trainer."""
        from stretto_collective.sending import CollectivePublisher

        config = self._config
        versions = VersionFolders(self._folders.own(), config.keep, config.shard_gb)
        return CollectivePublisher(versions, wire, config)

    def subscriber(self, wire: Wire) -> Any:
        """The end beside an engine."""
        from stretto_collective.receiving import CollectiveSubscriber

        return CollectiveSubscriber(self._folders.own(), wire, self._config)

    def clean(self) -> None:
        """Remove the run's folders on this machine; those elsewhere go with their workers."""
        self._folders.clean()


def check(config: CollectiveConfig, run: RunConfig) -> Iterable[Problem]:
    """Whether this machine has the interface."""
    del run
    interfaces = [interface for _, interface in socket.if_nameindex()]
    if config.interface not in interfaces:
        hint = offer(config.interface, interfaces, "it has")
        message = f"this machine has no network interface {config.interface!r}{hint}"
        yield Problem("weights.interface", message, "environment")


@hookimpl
def stretto_weights() -> Iterator[Component[CollectiveConfig]]:
    """The component of this package."""
    yield Component(
        "collective",
        CollectiveTransport,
        CollectiveConfig,
        "by torch.distributed, from the trainer to each engine's worker",
        check=check,
        requires={"torch": "stretto[torch]"},
    )
