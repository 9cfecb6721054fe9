"""Weight transport `bus`: versions travel over the run's bus, for machines that share no folder.

The publisher keeps the newest versions in a folder of its own machine and answers for pieces of them, while
its engine trains on. A subscriber fetches a version's files piece by piece, several at a time, into a folder
of its machine, while its engine decodes on; then every tensor is checked, and the engine swaps.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto import Component, Context, WeightsConfig, hookimpl
from stretto.component import PositiveFloat, PositiveInt
from stretto.models.version_files import RunFolders, VersionFolders
from stretto.weights import Wire
from stretto_bus.fetching import BusSubscriber
from stretto_bus.serving import BusPublisher

__all__ = ["BusPublisher", "BusSubscriber", "BusTransport", "BusTransportConfig"]


class BusTransportConfig(WeightsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the weight transport `bus`."""

    folder: str | None = None
    """Folder for versions, on every machine its own. Default: shared memory where there is some, else the one
    for temporary files."""
    keep: PositiveInt = 3
    """Newest versions that the trainer keeps; a fetch that is slower begins anew with the newest."""
    piece_kb: PositiveInt = 512
    """Bytes that one message carries, in KiB; no more than the bus lets through."""
    in_flight: PositiveInt = 8
    """Pieces that are asked for at once. Their bytes, times the engines, are what the bus holds."""
    deadline_s: PositiveFloat = 30.0
    """A piece that has not come after so long ends the fetch. What has come is kept for the next attempt."""
    shard_gb: PositiveFloat = 2.0
    """Largest file in GiB; no more than this is held in memory besides the model."""


class BusTransport:
    """Both ends, for the processes of one run."""

    def __init__(self, config: BusTransportConfig, context: Context) -> None:
        self._config = config
        self._folders = RunFolders(context, config.folder)

    def publisher(self, wire: Wire) -> BusPublisher:
        """The end beside the trainer."""
        config = self._config
        return BusPublisher(VersionFolders(self._folders.own(), config.keep, config.shard_gb), wire)

    def subscriber(self, wire: Wire) -> BusSubscriber:
        """The end beside an engine."""
        config = self._config
        return BusSubscriber(
            self._folders.own(),
            wire,
            piece=min(config.piece_kb * 2**10, wire.limit),
            in_flight=config.in_flight,
            deadline_s=config.deadline_s,
        )

    def clean(self) -> None:
        """Remove the run's folders on this machine; those elsewhere go with their workers."""
        self._folders.clean()


@hookimpl
def stretto_weights() -> Iterator[Component[BusTransportConfig]]:
    """The component of this package."""
    yield Component("bus", BusTransport, BusTransportConfig, "piece by piece over the bus, without a folder")
