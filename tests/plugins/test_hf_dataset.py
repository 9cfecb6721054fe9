"""The dataset `hf` on what the `datasets` library writes itself."""

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from stretto import Context
from stretto.errors import ConfigError
from stretto_hf import HFConfig, HFDataset

ROWS = [{"question": f"{n}+1=", "answer": str(n + 1), "n": n} for n in range(20)]


def opened(path: Path, **options: Any) -> HFDataset:
    config = HFConfig(use="hf", path=str(path), prompt_column="question", **options)
    return HFDataset(config, Context(run="r", name="n", seed=1))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder of `save_to_disk`, one of parquet files, and one with splits."""
    table = datasets.Dataset.from_list(ROWS)
    table.with_format("numpy", columns=["question"]).save_to_disk(tmp_path / "disk")
    datasets.DatasetDict({"train": table, "test": table.select([3, 4])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    table.to_parquet(tmp_path / "files" / "train-00000.parquet")
    datasets.Dataset.from_list(ROWS, split=datasets.NamedSplit("train[:50%]")).save_to_disk(tmp_path / "part")
    datasets.Dataset.from_list(ROWS, split=datasets.NamedSplit("test")).save_to_disk(tmp_path / "test")
    table.to_parquet(tmp_path / "d.parquet")
    table.to_csv(tmp_path / "D.CSV")
    table.to_json(tmp_path / "d [1]*.jsonl")
    table.to_json(tmp_path / "d.json", lines=False)
    (tmp_path / "d.arrow").write_bytes(next((tmp_path / "disk").glob("*.arrow")).read_bytes())
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress((tmp_path / "D.CSV").read_bytes()))
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "D.CSV").read_bytes())
    (tmp_path / "cut.jsonl").write_text('{"question": 1}\n{"question": ')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "d.txt").write_text("x")
    return tmp_path


FILES = ["d.parquet", "D.CSV", "d [1]*.jsonl", "d.json", "d.arrow", "d.csv.gz", "bom.csv"]
SPLITS = {
    "train": range(20),
    "all": range(20),
    "train[:10]": range(10),
    "train[90%:]": range(18, 20),
    "train[-3:]": range(17, 20),
    "train[:50%]+train[60%:]": [*range(10), *range(12, 20)],
    "train[:90%](closest)": range(18),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_part_of_a_split_is_the_same_part_of_everything(saved: Path, split: str) -> None:
    for place in ("disk", "part", "files", *FILES, *(() if split == "all" else ("splits",))):
        dataset = opened(saved / place, split=split)
        assert [dataset[index]["n"] for index in range(len(dataset))] == [*SPLITS[split]], place
        assert [index for _, rows in dataset.sources for index in rows] == [*SPLITS[split]]
    first = opened(saved / "disk", split=split, limit=9)
    assert [index for _, rows in first.sources for index in rows] == [*SPLITS[split]][:9]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("disk", {"split": "validation"}, "no split 'validation'; it has train, and parts such as"),
    ("test", {"split": "train"}, "no split 'train'; it has test"),
    ("splits", {"split": "dev[:5]"}, "no split 'dev.:5.'; it has train, test"),
    ("disk", {"split": "train[:1.5%]"}, "no split 'train"),
    ("d.parquet", {"split": "test"}, "no split 'test'; it has train"),
    ("disk", {"name": "main"}, "has no name; leave it out"),
    ("d.parquet", {"revision": "v1"}, "has no revision; leave it out"),
    ("d.txt", {}, r"ends in '.txt'; expected one of .csv, .json"),
    ("none.csv", {}, "none.csv' does not exist"),
    ("empty.jsonl", {}, "is empty"),
    ("cut.jsonl", {}, "cut.jsonl': .*JSON parse error"),
]


def test_what_a_source_does_not_have_is_refused(saved: Path) -> None:
    for place, options, fault in REFUSED:
        with pytest.raises(ConfigError, match=fault) as error:
            opened(saved / place, **options)
        assert error.value.path == next(iter(options), "path")


CUT = gzip.compress(b'{"question": "1+1="}' * 999)[:-9]
JSON, CSV = b'{"question": "1+1="}\n', b"question\n1+1=\n"
TABLE = b"question,a,b,c,d,e\n1,1,007,1.10,True,NA\n2,-2,12,2.5,False,\n3,,1,3,True,x\n"
PLACES: list[tuple[dict[str, bytes], str, str]] = [
    ({"a.jsonl": JSON, "b.csv": CSV}, "", "b.csv is not read beside .*a.jsonl; give the path of one file"),
    ({"train.jsonl": JSON, "more.jsonl": JSON}, "", "more.jsonl is not read beside .*train.jsonl"),
    ({"train.jsonl": JSON, "test.jsonl": JSON}, "", ""),
    (
        {
            "README.md": b"---\nconfigs:\n- config_name: x\n  data_files: a.csv\n---",
            "a.csv": CSV,
            "b.csv": CSV,
        },
        "",
        "",
    ),
    ({"train-00001-of-00003.csv": CSV}, "", "lacks the shard .*train-00000-of-00003, .*train-00002-of-00003"),
    ({"train-00001-of-00003.csv": CSV}, "train-00001-of-00003.csv", ""),
    ({"a.csv": CSV, "b.csv": TABLE}, "", "files with different columns: .*'question'. and .*'e'"),
    (
        {"d.jsonl": JSON + b'{"question": {"a": 1, "a": 2}}'},
        "d.jsonl",
        "d.jsonl:2: an object has the key 'a' twice",
    ),
    ({"d.json": b'[{"question": "a", "question": "b"}]'}, "d.json", "d.json:1: .* the key 'question' twice"),
    ({"d.json": JSON + b'{"question": "\xe9"}'}, "d.json", "d.json:2: 'utf-8' codec can't decode byte 0xe9"),
    ({"d.csv": CSV.decode().encode("utf-16")}, "d.csv", "d.csv' is UTF-16; save it as UTF-8"),
    ({"d.jsonl.gz": CUT}, "d.jsonl.gz", "d.jsonl.gz': Compressed file ended before"),
    ({"d.csv": b"question,answer\n1+1=,2,\n2+1=,3,\n"}, "d.csv", "Expected 2 fields in line 2, saw 3"),
    (
        {"d.csv": b'question,n\n"say \\"1\\" now",2\n'},
        "d.csv",
        "d.csv:2: ',' expected after '\"'; close each",
    ),
    ({"d.csv": b'question,n\n1,2\n"1""2"x,3\n'}, "d.csv", "d.csv:3: ',' expected after"),
    ({"d.csv": b'question,answer\n"1+1=,2\n2+1=,3\n'}, "d.csv", "d.csv:3: unexpected end of data"),
    ({"d.csv": b"question,answer,answer\n1+1=,2,9\n"}, "d.csv", "d.csv has a column twice"),
]


@pytest.mark.parametrize(("files", "place", "fault"), PLACES)
def test_files_are_read_whole_or_not_at_all(
    files: dict[str, bytes], place: str, fault: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    if not fault:
        assert [row["prompt"] for row in opened(tmp_path / place)] == ["1+1="]  # type: ignore[attr-defined]
        return
    with pytest.raises(ConfigError, match=fault) as error:
        opened(tmp_path / place)
    assert error.value.path == "path"


@pytest.mark.parametrize("options", [{}, {"streaming": True, "limit": 9}])
def test_a_column_of_a_csv_is_numbers_only_if_they_are_written_like_that(
    options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_bytes(TABLE)
    rows = opened(tmp_path / "t.csv", **options)
    assert [[*row.values()] for row in rows] == [  # type: ignore[attr-defined]
        [1, "007", "1.10", True, "NA", 1],
        [-2, "12", "2.5", False, None, 2],
        [None, "1", "3", True, "x", 3],
    ]
    datasets.Dataset.from_dict(
        {"question": ["a", "b"], "n": [0.1, None]},
        datasets.Features({"question": datasets.Value("string"), "n": datasets.Value("float32")}),
    ).to_parquet(tmp_path / "t.parquet")
    assert [row["n"] for row in opened(tmp_path / "t.parquet")] == [0.1, None]  # type: ignore[attr-defined]
    (tmp_path / "t.csv").write_text("question,n\n1,12345678901234567890123\n2,0.5\n")
    assert [row["n"] for row in opened(tmp_path / "t.csv")] == ["12345678901234567890123", "0.5"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("folder", ["disk", "files", "splits", "d.parquet"])
def test_rows_come_from_whatever_the_library_reads(saved: Path, folder: str) -> None:
    dataset = opened(saved / folder)
    assert len(dataset) == 20
    assert dataset[7] == {"prompt": "7+1=", "answer": "8", "n": 7}
    assert dataset.fingerprint == opened(saved / "disk").fingerprint


def test_paths_of_images_begin_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"question": "?", "images": ["a.png"]}\n')
    for path in (tmp_path, tmp_path / "d.jsonl"):
        assert opened(path)[0]["images"] == [str(tmp_path / "a.png")]


def test_splits_limits_and_streams(saved: Path) -> None:
    assert [row["n"] for row in opened(saved / "splits", split="test")] == [3, 4]  # type: ignore[attr-defined]
    assert len(opened(saved / "disk", limit=5)) == 5
    streamed = opened(saved / "files", streaming=True, limit=5)
    assert (len(streamed), streamed[4]["prompt"]) == (5, "4+1=")
    assert streamed.fingerprint == opened(saved / "files", limit=5).fingerprint
    with pytest.raises(ConfigError, match="no split 'dev'; it has train, test"):
        opened(saved / "splits", split="dev")


def test_what_cannot_be_loaded_is_one_clear_error(saved: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load the dataset"):
        opened(saved / "nowhere")
    config = HFConfig(use="hf", path=str(saved / "disk"))
    with pytest.raises(ConfigError, match="no column 'prompt'; its columns: question, answer, n"):
        HFDataset(config, Context(run="r", name="n", seed=1))


def test_it_imports_no_torch(saved: Path) -> None:
    code = (
        "import sys; from stretto import Context; from stretto_hf import HFConfig, HFDataset;"
        f"HFDataset(HFConfig(use='hf', path={str(saved / 'disk')!r}, prompt_column='question'),"
        "Context(run='r', name='n', seed=1))[0]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
