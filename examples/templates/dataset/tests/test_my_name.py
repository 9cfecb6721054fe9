"""The promises of datasets, and one row."""

from __future__ import annotations

from stretto import Context
from stretto.testing import DatasetConformance
from stretto_my_name import MyName, MyNameConfig


class TestMyName(DatasetConformance):
    """stretto's own tests of a dataset."""

    use = "my_name"
    options = {"rows": 20}


def test_the_answer_has_the_running_sums() -> None:
    """The last sum is that of all digits."""
    dataset = MyName(MyNameConfig(use="my_name"), Context(run="test", name="test", seed=0))
    row = dataset[3]
    digits = [int(digit) for digit in row["prompt"].rstrip("=").split("+")]
    assert row["answer"].split()[-1] == str(sum(digits))
