"""The inference engine `my_name`: the models of transformers, one forward for all running samples.

It is short, and slower than `torch`: a place to begin. `engine.py` keeps the contract, `stretto.engine`'s
`InferenceEngine`; `decoder.py` runs the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stretto import Component, Context, InferenceConfig, hookimpl
from stretto.component import PositiveInt

if TYPE_CHECKING:
    from stretto import InferenceEngine


class MyNameConfig(InferenceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the inference engine `my_name`."""

    slots: PositiveInt = 32
    """Number of samples decoded at once."""
    context_length: PositiveInt = 1024
    """Tokens that a sample may have, prompt and answer together."""


def make(config: MyNameConfig, context: Context) -> InferenceEngine:
    """Return the engine. This imports torch."""
    from stretto_my_name.engine import MyNameInference

    return MyNameInference(config, context)


@hookimpl
def stretto_inference() -> Iterator[Component[MyNameConfig]]:
    """The component of this package."""
    yield Component(
        "my_name",
        make,
        MyNameConfig,
        "the models of transformers, one forward for all running samples",
        requires={"torch": "stretto[torch]"},
        imports=lambda config, run: ("torch", "transformers"),
    )
