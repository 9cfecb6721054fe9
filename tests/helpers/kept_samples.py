"""Kept samples in a folder, as a run's sample writer leaves them."""

from pathlib import Path
from typing import Any

import msgspec

from sample_messages import done, record, trained, trajectories
from stretto.bus.messages.tickets import KeptText
from stretto.records.samples.join import Joiner
from stretto.records.samples.segments import SegmentWriter


class Kept:
    """Messages that a joiner takes in and writes as segments below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.segments = SegmentWriter(folder / "samples")
        self.joiner = Joiner(1, staleness=1)
        self.sequence = 0

    def add(self, *messages: Any) -> None:
        for message in messages:
            self.sequence += 1
            self.joiner.add(self.sequence, message)

    def group(
        self,
        ticket: int,
        attempt: int = 1,
        purpose: Any = "train",
        text: str | None = None,
        row: int = 5,
        **facts: Any,
    ) -> None:
        bundle, kept = trajectories(ticket, attempt, purpose, **facts), record(ticket, attempt, purpose, row)
        if text is not None:
            kept = msgspec.structs.replace(kept, texts=(KeptText(None, text),) * 2)
        self.add(bundle, kept, done(bundle, kept))

    def trained_group(self, step: int, text: str | None = None, **facts: Any) -> None:
        """A group whose ticket has the number of the step that trained it."""
        self.group(step, text=text, version=step - 1, **facts)
        self.add(trained([f"{step}/1/0", f"{step}/1/1"], version=step - 1))

    def flush(self) -> None:
        for purpose, table in self.joiner.pop_rows().items():
            self.segments.write(purpose, table)
