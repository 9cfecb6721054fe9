"""The promises of inference engines. Every logprob is compared with the forward pass of transformers."""

from __future__ import annotations

from stretto.testing import InferenceConformance


class TestMyName(InferenceConformance):
    """stretto's own tests of an inference engine, without a run."""

    use = "my_name"
    seeds = True
    refuses = frozenset({"top_p", "top_k", "min_p", "logit_bias"})
