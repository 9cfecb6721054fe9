"""The kept samples: written to segments and found."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from kept_samples import Kept
from sample_messages import done, failed, record, retired, trained, trajectories
from stretto.bus.messages.tickets import KeptText
from stretto.cli.audit.audit_records import read_samples
from stretto.records.samples.answers import read_answers
from stretto.records.samples.files import segments_in
from stretto.records.samples.kept_sample import digest_of, kept_samples
from stretto.records.samples.segments import SegmentWriter
from stretto.records.samples.store import SampleFilter, SampleStore


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


def test_a_row_has_all_that_was_kept_of_a_trajectory(kept: Kept) -> None:
    kept.group(7, version=3, reward=0.5)
    kept.add(trained(["7/1/0", "7/1/1"], version=4, advantages=[0.25], weights=[1.0, 0.5]))
    kept.flush()
    first, second = SampleStore(kept.folder).find(tokens=True)
    assert first["id"] == "7/1/0"
    assert (first["outcome"], first["step"], first["staleness"]) == ("trained", 5, 1)
    assert (first["prompt_text"], first["text"]) == ("1+1=", "answer 0 of 7")
    assert first["dataset_row"] == {"prompt": "1+1=", "answer": "2"}
    assert first["messages"] == [{"role": "user", "content": "1+1="}]
    assert first["metrics"] == {"accuracy": 0.5}
    assert first["tokens"] == [1, 2, 3, 4]
    assert first["loss_mask"] == [False, False, True, True]
    assert first["versions"] == [-1, -1, 3, 3]
    assert first["logprobs"] == [0.0, 0.0, -0.5, -0.25]
    assert first["advantages"] == [None, None, 0.25, 0.25]
    assert first["importance_weights"] == [None, None, 1.0, 0.5]
    assert (second["id"], second["text"]) == ("7/1/1", "answer 1 of 7")


def test_reading_does_not_import_pandas_which_takes_half_a_second(kept: Kept) -> None:
    kept.trained_group(7, reward=0.5)
    kept.flush()
    conditions = (
        "ticket=7, purpose='train', finish='stop', outcome='trained', worker='rollout-0', text='answer'"
    )
    script = (
        "import importlib.util, sys; from pathlib import Path\n"
        "from stretto.records.samples.store import SampleFilter, SampleStore\n"
        f"rows = SampleStore(Path({str(kept.folder)!r})).find(SampleFilter({conditions}), tokens=True)\n"
        "print(len(rows), bool(importlib.util.find_spec('pandas')), 'pandas' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert said.split() == ["2", "True", "False"]


def test_filters(kept: Kept) -> None:
    for ticket in range(6):
        kept.group(ticket, version=ticket, reward=ticket / 10)
    kept.add(retired(4, "filtered", "by the algorithm"))
    kept.flush()
    for ticket in (1, 0, 2, 3):
        kept.add(trained([f"{ticket}/1/0", f"{ticket}/1/1"], version=ticket + 2))
        kept.flush()
    kept.add(retired(5, "expired", "late"))
    failure = failed(6, "RewardError: no")
    kept.add(record(6), failure)
    kept.flush()
    store = SampleStore(kept.folder)

    def found(**conditions: Any) -> list[str]:
        rows = store.find(SampleFilter(**conditions))
        assert store.count(SampleFilter(**conditions)) == len(rows)
        return [row["id"] for row in rows if not row["index"]]

    assert found(ticket=3) == ["3/1/0"]
    assert found(step=(4, 5)) == ["1/1/0", "2/1/0"]
    assert found(reward=(0.3, None)) == ["3/1/0", "4/1/0", "5/1/0"]
    assert found(staleness=(2, 2)) == ["0/1/0", "1/1/0", "2/1/0", "3/1/0"]
    assert store.staleness() == {2: 8}
    assert found(outcome="filtered") == ["4/1/0"]
    assert found(outcome="expired") == ["5/1/0"]
    assert found(outcome="failed") == ["6/1"]
    assert found(text="ANSWER 0 OF 2") == ["2/1/0"]
    assert found(text="1+1") == [f"{ticket}/1/0" for ticket in range(6)] + ["6/1"]
    assert found(worker="inference-0", length=(None, 4), finish="stop", ticket=1) == ["1/1/0"]
    assert found(finish="length") == []
    assert found(source="odd") == ["1/1/0", "3/1/0", "5/1/0"]
    assert found(source="even", variant="short") == ["0/1/0", "6/1"]
    assert store.find(SampleFilter(ticket=4))[0]["reason"] == "by the algorithm"
    assert store.find(SampleFilter(ticket=6))[0]["reason"] == "RewardError: no"
    assert ids(store.find(order="-reward", limit=2, offset=1)) == ["5/1/1", "4/1/0"]
    assert ids(store.find(SampleFilter(text="answer"), limit=2, offset=3)) == ["1/1/1", "2/1/0"]
    assert store.tickets() == [("train", ticket) for ticket in (6, 5, 4, 3, 2, 1, 0)]
    assert store.tickets(SampleFilter(text="answer 1"), limit=2, offset=1) == [("train", 4), ("train", 3)]


def test_segments_of_an_older_stretto_without_some_columns_are_read_and_joined(kept: Kept) -> None:
    kept.trained_group(7)
    kept.flush()
    [old] = (kept.folder / "samples").glob("*.parquet")
    columns = {"source", "variant"}
    parquet.write_table(parquet.read_table(old).drop_columns([*columns]), old)
    assert columns.isdisjoint(SampleStore(kept.folder).find()[0])
    kept.trained_group(9)
    kept.flush()
    writer = SegmentWriter(kept.folder / "samples")
    for _ in range(2):
        store = SampleStore(kept.folder)
        assert ids(store.find(SampleFilter(source="odd"))) == ["9/1/0", "9/1/1"]
        assert len(store.find(tokens=True)) == 4
        writer.close("train", 2)  # joins the two files


def test_a_reader_sees_what_is_added_meanwhile(kept: Kept) -> None:
    store = SampleStore(kept.folder)
    assert store.find() == []
    assert store.ticket(0) == []
    for ticket in range(20):
        kept.trained_group(ticket)
        kept.flush()
        assert store.count() == 2 * (ticket + 1)
        assert store.find(SampleFilter(ticket=ticket), tokens=True)[1]["id"] == f"{ticket}/1/1"
        kept.segments.close("train", flushes=8)
        assert store.count() == 2 * (ticket + 1)
    spans = [(name.first, name.last) for name in segments_in(kept.folder / "samples")]
    assert spans == [(1, 8), (9, 16), (17, 17), (18, 18), (19, 19), (20, 20)]
    assert ids(store.find(limit=None)) == [f"{ticket}/1/{index}" for ticket in range(20) for index in (0, 1)]


def test_a_segment_that_was_just_made_doubles_no_row(kept: Kept) -> None:
    for ticket in range(8):
        kept.trained_group(ticket)
        kept.flush()
    folder = kept.folder / "samples"
    parts = {path: path.read_bytes() for path in folder.iterdir()}
    kept.segments.close("train", flushes=8)
    for path, content in parts.items():  # as if it had been killed before it removed them
        path.write_bytes(content)
    (folder / ".train-00000009-00000009.parquet.parquet").write_bytes(b"half")
    assert SampleStore(kept.folder).count() == 16
    SegmentWriter(folder)
    assert [path.name for path in folder.iterdir()] == ["train-00000001-00000008.parquet"]


def test_pruning_leaves_the_answers_of_evaluations(kept: Kept) -> None:
    for step in range(1, 12):
        kept.trained_group(step)
        kept.group(step, purpose="eval", version=step - 1, row=step)
        kept.flush()
    assert kept.segments.prune("train", below=9)
    assert not kept.segments.prune("train", below=9)
    store = SampleStore(kept.folder)
    assert ids(store.find(SampleFilter(purpose="train"))) == ["10/1/0", "10/1/1", "11/1/0", "11/1/1"]
    assert store.count(SampleFilter(purpose="eval")) == 22


def test_of_several_attempts_at_a_held_out_row_the_last_one_counts(kept: Kept) -> None:
    kept.group(3, purpose="eval", version=4, row=1, reward=0.25)
    kept.group(2, purpose="eval", version=4, row=0, reward=0.0)
    kept.group(2, attempt=2, purpose="eval", version=4, row=0, reward=1.0)
    kept.group(4, purpose="eval", version=6, row=0)
    kept.flush()
    answers = read_answers(SampleStore(kept.folder), 4, texts=True)
    scores = [(each.row, each.sample, each.score("accuracy")) for each in answers]
    assert scores == [(0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.25), (1, 1, 0.25)]
    assert (answers[1].columns, answers[1].completion) == ({"answer": "2"}, "answer 1 of 2")


@pytest.mark.parametrize("turns", [["draft", "is 2\u2028\n\nok"], ["<tool_call>…"], []])
def test_the_answer_of_a_conversation_is_its_last(kept: Kept, turns: list[str]) -> None:
    chat = [{"role": "user", "content": "1+1?"}]
    for turn in turns:
        chat += [{"role": "assistant", "content": turn}, {"role": "tool", "content": "2"}]
    bundle, note = trajectories(2, 1, "eval", version=4), record(2, 1, "eval", 0)
    texts = tuple(KeptText(None, each.text, msgspec.json.encode(chat).decode()) for each in note.texts)
    note = msgspec.structs.replace(note, texts=texts)
    kept.add(bundle, note, done(bundle, note))
    kept.flush()
    answer = read_answers(SampleStore(kept.folder), 4, texts=True)[1]
    assert (answer.completion, answer.messages) == ([*turns, "answer 1 of 2"][len(turns) - 1], chat)


def test_the_names_of_added_images_are_those_of_all_rows(kept: Kept) -> None:
    image = "0a" * 32
    for ticket in range(3):
        kept.trained_group(ticket, images=(0, image) if ticket else None)
        kept.flush()
    assert [row["images"] for row in SampleStore(kept.folder).find()] == [None, None, *[[0, image]] * 4]
    assert kept.segments.images() == {image}


def test_digests_of_groups_without_added_images_are_those_of_older_versions() -> None:
    bundle, images = trajectories(3), trajectories(3, images=(0, "0a" * 32))
    digest, other = (digest_of(kept_samples(record(3), each.trajectories)) for each in (bundle, images))
    assert digest == "c7e5e3bd7fade1275022441e6869f5f699ef2050b6cb6f7ea1a368eaa81285fa"
    assert other != digest


def test_the_digest_is_that_of_the_rows(kept: Kept) -> None:
    kept.trained_group(0, reward=1 / 3)
    kept.flush()
    assert read_samples(kept.folder).faults == []
    [path] = (kept.folder / "samples").iterdir()
    table = parquet.read_table(path)
    place = table.schema.get_field_index("text")
    parquet.write_table(table.set_column(place, "text", pa.array(["answer 0 of 7", "answer 1 of 0"])), path)
    assert read_samples(kept.folder).faults == ["group 0/1: its samples differ from their digest"]
