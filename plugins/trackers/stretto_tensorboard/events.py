"""Event files of one run.

Each process writes new files. Their first event makes readers drop the events that a killed process wrote for
steps which are sent again. Samples may come after figures of later steps, so samples have separate files.
"""

# pyright: reportAttributeAccessIssue=false
# Protobuf makes the names of these modules when they are imported.

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from stretto import Context, TrackerConfig
from stretto.tracker import SAMPLE_FIELDS, Sent, figures, sample_cells, tracker_folder


class TensorBoardTracker:
    """Writes the event files."""

    def __init__(self, config: TrackerConfig, context: Context) -> None:
        self._folder = tracker_folder(config, context)

    def start(self, config: Mapping[str, Any], resumed_at: Sent | None) -> None:
        """Open new event files that continue after the figures and samples that were sent."""
        sent = resumed_at or Sent(step=-1, samples=-1)
        self._train = _Events(self._folder / "train", first_step=sent.step + 1)
        self._evaluation = _Events(self._folder / "evaluation", first_step=sent.evaluation + 1)
        self._samples = {
            "train": _Events(self._folder / "samples/train", first_step=sent.samples + 1),
            "eval": _Events(self._folder / "samples/evaluation", first_step=sent.evaluation_samples + 1),
        }
        if resumed_at is None:
            self._train.add_text("config", yaml.safe_dump(dict(config), sort_keys=False), 0, time.time())

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Write the figures of a step."""
        self._train.add_figures(metrics)

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Write the figures of an evaluation, at the version that was evaluated."""
        self._evaluation.add_figures(metrics)

    def advice(self, advice: Mapping[str, Any]) -> None:
        """Write the advice as text."""
        step = advice["said"] if advice["until"] is None else advice["until"]
        state = "given" if advice["until"] is None else "withdrawn"
        self._train.add_text(
            f"advice/{advice['rule']}",
            f"{state}, since step {advice['since']}: {advice['message']}",
            step,
            time.time(),
        )

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the samples as a text, at their step or version."""
        text = "\n\n".join(map(_sample_text, rows))
        self._samples[rows[0]["purpose"]].add_text("samples", text, rows[0]["step"], time.time())

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write how the run ended, as text."""
        text = " ".join(filter(None, [summary["status"], summary["reason"]]))
        self._train.add_text("end", text, summary["version"], time.time())
        for events in (self._train, self._evaluation, *self._samples.values()):
            events.close()


def _sample_text(row: Mapping[str, Any]) -> str:
    cells = dict(zip(SAMPLE_FIELDS, sample_cells(row), strict=True))
    prompt, answer = cells.pop("prompt_text"), cells.pop("text")
    facts = "  ".join(f"{name}: {cell}" for name, cell in cells.items() if cell is not None)
    return f"{facts}\n--- prompt\n{prompt}\n--- answer\n{answer}"


class _Events:
    def __init__(self, folder: Path, *, first_step: int) -> None:
        _wait_for_later_name(folder)
        self._writer = EventFileWriter(str(folder))
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))
        self._writer.flush()

    def add_figures(self, metrics: Mapping[str, Any]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures(metrics).items()]
        self._add(Summary(value=values), metrics["step"], metrics["time"])

    def add_text(self, tag: str, text: str, step: int, wall_time: float) -> None:
        """Write a text. TensorBoard renders Markdown, but shows indented lines unchanged."""
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        plugin = SummaryMetadata.PluginData(
            plugin_name="text", content=TextPluginData(version=0).SerializeToString()
        )
        value = Summary.Value(
            tag=f"{tag}/text_summary",
            metadata=SummaryMetadata(plugin_data=plugin),
            tensor=TensorProto(
                dtype=DT_STRING,
                string_val=[indented.encode()],
                tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
            ),
        )
        self._add(Summary(value=[value]), step, wall_time)

    def close(self) -> None:
        self._writer.close()

    def _add(self, summary: Any, step: int, wall_time: float) -> None:
        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=summary))
        self._writer.flush()


def _wait_for_later_name(folder: Path) -> None:
    """Wait until the name of a new file, which has the present second, sorts after the names in the folder:
    readers read files in that order."""
    newest = max((int(file.name.split(".")[3]) for file in folder.glob("events.out.tfevents.*")), default=0)
    while int(time.time()) <= newest:
        time.sleep(0.05)
