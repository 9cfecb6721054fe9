"""Write a file in Perfetto's trace format: tracks with spans and counters. Nothing here depends on runs.

The format is protobuf, from the package `perfetto` (extra `trace`). Spans of a track do not overlap. A flow
leads with arrows through the spans that name it in `flows`, by time, to the one that names it in `ends`.
"""

import heapq
from collections.abc import Iterable, Mapping
from typing import BinaryIO

from stretto.errors import ConfigError

try:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
        BUILTIN_CLOCK_BOOTTIME,
        BUILTIN_CLOCK_REALTIME,
        CounterDescriptor,
        TracePacket,
        TrackDescriptor,
        TrackEvent,
    )
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
except ImportError as error:
    raise ConfigError("a trace needs perfetto: pip install 'stretto[trace]'") from error

Facts = Mapping[str, str | int | float | bool | None]
"""Facts that the viewer shows about a span, by name. A fact of None is omitted."""

_VALUES = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
_SEQUENCE = 1  # id of the only packet sequence


class PerfettoFile:
    """Writes a trace into an open file, packet by packet. Times are Unix seconds. The viewer needs a `start`
    near the beginning to show the time of day."""

    def __init__(self, file: BinaryIO, start: float) -> None:
        self._builder = StreamingTraceProtoBuilder(file)
        self._tracks = 0
        packet = self._packet(start)
        for clock in (BUILTIN_CLOCK_BOOTTIME, BUILTIN_CLOCK_REALTIME):  # packets use the first clock
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=_ns(start))
        self._builder.write_packet(packet)

    def track(self, name: str, parent: int | None = None) -> int:
        """Add a track, below `parent` or at the top, and return its id. The viewer shows tracks in the order
        of these calls, and merges tracks of the same name below the same parent."""
        return self._write_track(TrackDescriptor(name=name), parent)

    def counter(self, name: str, unit: str, parent: int) -> int:
        """Add a track of a figure that changes with time, and return its id."""
        return self._write_track(
            TrackDescriptor(name=name, counter=CounterDescriptor(unit_name=unit)), parent
        )

    def span(
        self,
        track: int,
        start: float,
        end: float,
        name: str,
        category: str,
        facts: Facts,
        *,
        flows: Iterable[int] = (),
        ends: Iterable[int] = (),
    ) -> None:
        """Write a span. Call this in the order of time for each track."""
        packet = self._packet(start)
        event = packet.track_event
        event.type, event.track_uuid, event.name = TrackEvent.TYPE_SLICE_BEGIN, track, name
        event.categories.append(category)
        event.flow_ids.extend(flows)
        event.terminating_flow_ids.extend(ends)
        for key, value in facts.items():
            if value is not None:
                event.debug_annotations.add(name=key, **{_VALUES[type(value)]: value})
        self._builder.write_packet(packet)
        packet = self._packet(end)
        packet.track_event.type, packet.track_event.track_uuid = TrackEvent.TYPE_SLICE_END, track
        self._builder.write_packet(packet)

    def count(self, track: int, time: float, value: float) -> None:
        """Write the value of a counter from this time on."""
        packet = self._packet(time)
        packet.track_event.type, packet.track_event.track_uuid = TrackEvent.TYPE_COUNTER, track
        packet.track_event.double_counter_value = value
        self._builder.write_packet(packet)

    def _write_track(self, descriptor: TrackDescriptor, parent: int | None) -> int:
        self._tracks += 1
        descriptor.uuid = self._tracks
        descriptor.child_ordering = TrackDescriptor.EXPLICIT
        descriptor.sibling_order_rank = self._tracks
        if parent is not None:
            descriptor.parent_uuid = parent
        packet = TracePacket(track_descriptor=descriptor, trusted_packet_sequence_id=_SEQUENCE)
        self._builder.write_packet(packet)
        return self._tracks

    def _packet(self, time: float) -> TracePacket:
        return TracePacket(timestamp=_ns(time), trusted_packet_sequence_id=_SEQUENCE)


class SpanTracks:
    """Tracks of one name below a parent, for spans that may overlap: as many tracks as spans at one time."""

    def __init__(self, trace: PerfettoFile, name: str, parent: int) -> None:
        self._trace = trace
        self._name = name
        self._parent = parent
        self._free: list[tuple[float, int]] = []

    def free_track(self, start: float, end: float) -> int:
        """Return a track that is free during this time. Call this in the order of `start`."""
        if self._free and self._free[0][0] <= start:
            _, track = heapq.heappop(self._free)
        else:
            track = self._trace.track(self._name, self._parent)
        heapq.heappush(self._free, (end, track))
        return track


def _ns(time: float) -> int:
    """Convert a time to nanoseconds, rounded to 4 decimals of a second: the float is exact to about 7."""
    return round(time * 10_000) * 100_000
