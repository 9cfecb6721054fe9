"""The dataset `my_name`: sums of digits, as many as wanted, without a file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate

from stretto import Component, Context, DatasetConfig, hookimpl
from stretto.component import PositiveInt
from stretto.dataset import Row


class MyNameConfig(DatasetConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the dataset `my_name`."""

    rows: PositiveInt = 512
    """Number of rows."""
    digits: PositiveInt = 5
    """Number of digits in each prompt."""
    seed: int = 0
    """Seed of the rows. Another seed gives other rows, for example for an evaluation."""


class MyName:
    """Row i is drawn from the seed and i alone, so every process has the same rows."""

    def __init__(self, config: MyNameConfig, context: Context) -> None:
        del context
        self._config = config
        self.fingerprint = f"my_name 1: {config.rows} {config.digits} {config.seed}"
        """Raise the number when the code below makes other rows."""

    def __len__(self) -> int:
        return self._config.rows

    def __getitem__(self, index: int) -> Row:
        """Return the row at `index`: the digits as prompt, their running sums as `answer`."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        draw = random.Random(f"{self._config.seed} {index}")
        digits = [draw.randint(1, 9) for _ in range(self._config.digits)]
        sums = list(accumulate(digits))[1:] or digits
        return {
            "id": f"row-{index}",
            "prompt": "+".join(map(str, digits)) + "=",
            "answer": " ".join(map(str, sums)),
        }


@hookimpl
def stretto_dataset() -> Iterator[Component[MyNameConfig]]:
    """The component of this package."""
    yield Component("my_name", MyName, MyNameConfig, "sums of digits, drawn from a seed")
