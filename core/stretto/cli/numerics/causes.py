"""The likely cause of unhealthy rows."""

from collections.abc import Sequence

from stretto.cli.numerics.measures import NumericsRow

_OF_PACKING = {
    "contents": "sequences of a packed row see each other's tokens: a mask or a state goes across them",
    "place": "a sequence's figures depend on its place in a packed row: position ids do not begin again",
    "gradients": "the gradients of a packed row are not those of its sequences, though the outputs are",
}
_OF_ONE = {
    "bfloat16": "bfloat16 loses too much for this model: train in float32",
    "temperature": "one side ignores the sampling temperature, or applies it twice",
    "greedy": "the two sides disagree on the most likely token, although their logprobs agree",
    "kept tokens": "the trainer renormalises over other tokens than the engine drew from",
    "adapter": "the engine serves the model without its adapter, or merges it differently from the trainer",
    "swap": "a swap leaves something of the old version in the engine: a tensor, or a cache",
    "determinism": "the same request has two answers, although the run asks for determinism",
    "weights": "the engine does not hold the tensors that the trainer published",
}


def cause_of(rows: Sequence[NumericsRow]) -> str:
    """Return the likely cause of the unhealthy rows; empty if all are healthy."""
    failed = {row.name: row for row in rows if row.ok is False}
    if not failed:
        return ""
    if "engine" in failed:
        return f"the engine {failed['engine'].signs[0]}"
    if "weights" in failed:
        return _OF_ONE["weights"]
    if any("inf" in row.measured for row in failed.values()):
        return "a side returns logprobs that are not numbers: it overflows, or its weights are damaged"
    if "packing" in failed:
        return _OF_PACKING[failed["packing"].signs[0]]
    depths = [row for row in rows if row.name.startswith("depth ")]
    bad = [row for row in depths if row.ok is False]
    if bad and len(bad) < len(depths) and bad == depths[-len(bad) :]:
        begin = depths[-len(bad) - 1].name.removeprefix("depth ")
        return f"beyond a depth of about {begin}, the two sides have other positions, another window or cache"
    if bad and all(row.signs == ["sampled"] for row in bad):
        return "answers have fewer or other tokens than the engine computed with"
    if bad:
        return "engine and trainer compute with other weights, or another function of the same tokens"
    return _OF_ONE[next(iter(failed))]
