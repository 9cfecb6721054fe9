"""The kept samples: written to segments, merged, joined, found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from kept_samples import Kept
from sample_messages import failed, record, retired, trained, trajectories
from stretto.errors import ConfigError
from stretto.records.kept.answers import read_answers
from stretto.records.kept.kept_sample import digest_of, kept_samples
from stretto.records.kept.sample_files import segments_in
from stretto.records.kept.samples import SampleFilter, SampleStore
from stretto.samples.segments import SegmentWriter


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


def test_a_row_has_all_that_was_kept_of_a_trajectory(kept: Kept) -> None:
    kept.group(7, version=3, reward=0.5)
    kept.flush()
    kept.add(trained(["7/1/0"], version=4, advantages=[0.25], weights=[1.0, 0.5]))
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
    assert (second["id"], second["outcome"], second["advantages"]) == ("7/1/1", "expired", None)


def test_reading_does_not_import_pandas_which_takes_half_a_second(kept: Kept) -> None:
    kept.group(7, version=3, reward=0.5)
    kept.flush()
    conditions = (
        "ticket=7, purpose='train', finish='stop', outcome='pending', worker='rollout-0', text='answer'"
    )
    script = (
        "import importlib.util, sys; from pathlib import Path\n"
        "from stretto.records.kept.samples import SampleFilter, SampleStore\n"
        f"rows = SampleStore(Path({str(kept.folder)!r})).find(SampleFilter({conditions}), tokens=True)\n"
        "print(len(rows), bool(importlib.util.find_spec('pandas')), 'pandas' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert said.split() == ["2", "True", "False"]


def test_filters(kept: Kept) -> None:
    for ticket in range(6):
        kept.group(ticket, version=ticket, reward=ticket / 10)
        if ticket % 2:
            kept.flush()
    kept.add(*[trained([f"{ticket}/1/0", f"{ticket}/1/1"], version=ticket + 2) for ticket in range(4)])
    kept.add(retired(4, "filtered", "by the algorithm"))
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
    assert found(outcome="pending") == ["5/1/0"]
    assert found(outcome="failed") == ["6/1"]
    assert found(text="ANSWER 0 OF 2") == ["2/1/0"]
    assert found(text="1+1") == [f"{ticket}/1/0" for ticket in range(6)] + ["6/1"]
    assert found(worker="inference-0", length=(None, 4), finish="stop", ticket=1) == ["1/1/0"]
    assert found(finish="length") == []
    assert store.find(SampleFilter(ticket=4))[0]["reason"] == "by the algorithm"
    assert store.find(SampleFilter(ticket=6))[0]["reason"] == "RewardError: no"
    assert ids(store.find(order="-reward", limit=2, offset=1)) == ["5/1/1", "4/1/0"]
    assert ids(store.find(SampleFilter(text="answer"), limit=2, offset=3)) == ["1/1/1", "2/1/0"]
    assert store.tickets() == [("train", ticket) for ticket in (6, 5, 4, 3, 2, 1, 0)]
    assert store.tickets(SampleFilter(text="answer 1"), limit=2, offset=1) == [("train", 4), ("train", 3)]
    with pytest.raises(ConfigError, match="cannot be ordered by 'colour'"):
        store.find(order="colour")


def test_a_reader_sees_what_is_added_and_merged_meanwhile(kept: Kept) -> None:
    store = SampleStore(kept.folder)
    assert store.find() == []
    assert store.ticket(0) == []
    for ticket in range(20):
        kept.group(ticket)
        kept.flush()
        assert store.count() == 2 * (ticket + 1)
        assert store.find(SampleFilter(ticket=ticket), tokens=True)[1]["id"] == f"{ticket}/1/1"
        while kept.segments.merge():
            assert store.count() == 2 * (ticket + 1)
    assert len(segments_in(kept.folder / "samples", "samples")) < 10
    kept.segments.tidy()
    assert ids(store.find(limit=None)) == [f"{ticket}/1/{index}" for ticket in range(20) for index in (0, 1)]
    [only] = segments_in(kept.folder / "samples", "samples")
    assert (only.first, only.last) == (1, 20)


def test_a_merge_that_was_interrupted_doubles_no_row(kept: Kept) -> None:
    for ticket in range(8):
        kept.group(ticket)
        kept.flush()
    folder = kept.folder / "samples"
    parts = {path: path.read_bytes() for path in folder.iterdir()}
    assert kept.segments.merge()
    for path, content in parts.items():  # as if it had been killed before it removed them
        path.write_bytes(content)
    (folder / ".samples-00000009-00000009.parquet.parquet").write_bytes(b"half")
    assert SampleStore(kept.folder).count() == 16
    SegmentWriter(folder)
    assert [path.name for path in folder.iterdir()] == ["samples-00000001-00000008.parquet"]


def test_pruning_can_leave_the_answers_of_evaluations(kept: Kept) -> None:
    for step in range(1, 12):
        kept.trained_group(step)
        kept.group(step, purpose="eval", version=step - 1, row=step)
        kept.flush()
    assert kept.segments.prune(9, "samples", "newest", but_answers=True)
    assert not kept.segments.prune(9, "samples", "newest", but_answers=True)
    assert kept.segments.merge(last=4), "old answers keep no segments apart"
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
    assert [(each.row, each.sample, each.score("accuracy")) for each in answers] == [
        *((0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.25), (1, 1, 0.25))
    ]
    assert (answers[1].columns, answers[1].completion) == ({"answer": "2"}, "answer 1 of 2")


def test_segments_of_an_older_version_lack_a_column(kept: Kept) -> None:
    """They are read, merged and checked as if no workflow had added an image."""
    image = "0a" * 32
    for ticket in range(8):
        kept.group(ticket, images=(0, image) if ticket else None)
        kept.flush()
    [old, *_] = sorted((kept.folder / "samples").iterdir())
    parquet.write_table(parquet.read_table(old).drop_columns(["images"]), old)
    expected = [None, None, *[[0, image]] * 14]
    assert [row["images"] for row in SampleStore(kept.folder).find(tokens=True)] == expected
    assert kept.segments.images() == {image}
    assert kept.segments.merge()
    store = SampleStore(kept.folder)
    assert [row["images"] for row in store.find()] == expected
    digests = [next(iter(store.digests(ticket).values())) for ticket in range(8)]
    assert all(stored == found for stored, found in digests)


def test_digests_of_groups_without_added_images_are_those_of_older_versions() -> None:
    bundle, images = trajectories(3), trajectories(3, images=(0, "0a" * 32))
    digest, other = (digest_of(kept_samples(record(3), each.trajectories)) for each in (bundle, images))
    assert digest == "c7e5e3bd7fade1275022441e6869f5f699ef2050b6cb6f7ea1a368eaa81285fa"
    assert other != digest


def test_the_digest_is_that_of_the_rows(kept: Kept) -> None:
    kept.group(0, reward=1 / 3)
    kept.flush()
    [(stored, found)] = SampleStore(kept.folder).digests(0).values()
    assert stored == found
    [path] = (kept.folder / "samples").iterdir()
    table = parquet.read_table(path)
    place = table.schema.get_field_index("text")
    parquet.write_table(table.set_column(place, "text", pa.array(["answer 0 of 7", "answer 1 of 0"])), path)
    [(stored, found)] = SampleStore(kept.folder).digests(0).values()
    assert stored != found
