"""Figures as every view shows them: one table has the label, the unit, the digits and the meaning of each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from stretto.bus.messages.events import CAUSES
from stretto.errors import printable
from stretto.records.metrics import ACCURACY, HELD_OUT_LOSS, HELD_OUT_REWARD, is_figure

if TYPE_CHECKING:
    from rich.table import Table

RECENT_STEPS = 10
"""Number of newest steps whose mean is a run's figure: a single step is too noisy."""


class Figure(msgspec.Struct, frozen=True):
    """How views show a figure."""

    label: str
    meaning: str = ""
    """One phrase; empty for a figure that is not in the table."""
    unit: str = ""
    """Of all units, `text` writes only `s` and, as percent, `share` (of 1)."""
    form: str = ".4g"
    """A format specification: `.3f`, `.1%` or `.4g`. Durations choose their own digits."""

    @property
    def name(self) -> str:
        """The label beside a value from `text`; it has the unit if the value's text lacks it."""
        return self.label if self.unit in ("", "s", "share") else f"{self.label}, {self.unit}"

    @property
    def title(self) -> str:
        """The heading of a chart with plain numbers: label and unit, capitalised. Unknown keys stay as is."""
        text = f"{self.label}, {self.unit}" if self.unit else self.label
        return text[:1].upper() + text[1:] if self.meaning else text

    def text(self, value: Any) -> str:
        """Return a value as text; a dash if it is no finite number. The page's `figureText` does the same."""
        if not is_figure(value):
            return "-"
        if self.unit == "s":
            return duration_text(value)
        if self.form == ".4g" and 1e3 <= abs(value) < 1e9:
            return f"{value:,.0f}"
        return f"{value:,{self.form}}".replace("%", " %")


def figure(key: str) -> Figure:
    """Return how views show a key of `metrics.jsonl`; an unknown key is its own label."""
    return FIGURES.get(key) or Figure(key)


VERDICT_STEPS = 60
"""Number of newest steps from which the verdict and the step times are computed."""


def recent(values: Sequence[float]) -> float | None:
    """Return the mean of the newest `RECENT_STEPS` values; None without a value."""
    newest = values[-RECENT_STEPS:]
    return sum(newest) / len(newest) if newest else None


def change(values: Sequence[float]) -> float | None:
    """Return the mean of the newest `RECENT_STEPS` values − that of the first; None for too few values."""
    first, newest = recent(values[:RECENT_STEPS]), recent(values)
    return None if first is None or newest is None or len(values) <= RECENT_STEPS else newest - first


def duration_text(seconds: float | None) -> str:
    """Return a duration as text: `350 ms`, `4.5 s`, `45 s`, `4 min 58 s`, `12 min`, `3 h 5 min`, `2 d 3 h`; a
    dash if it is not known. The page's `duration` follows the same rule."""
    if seconds is None:
        return "-"
    if not 0 <= seconds < 1e9:  # a wrong value from another process
        return "?"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole_s = int(seconds + 0.5)
    minutes = int(whole_s / 60 + 0.5)
    if whole_s < 60:
        return f"{whole_s} s"
    if whole_s < 600:
        return f"{whole_s // 60} min {whole_s % 60} s"
    if minutes < 60:
        return f"{minutes} min"
    days, hours = divmod(minutes // 60, 24)
    return f"{days} d {hours} h" if days > 1 else f"{minutes // 60} h {minutes % 60} min"


def figure_table(*columns: str, justify: Literal["left", "right"] = "right") -> Table:
    """Return a table without rows: the first column has names, and the others have figures, or other texts
    with `justify="left"`."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(printable(column), overflow="fold", justify=justify if number else "left")
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row, with control characters as escapes."""
    table.add_row(*map(printable, cells))


def print_table(table: Table) -> None:
    """Print a table. Its cells are plain text, not markup: a model or a plugin may have written them."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    Console(width=width, markup=False, emoji=False, highlight=False).print(table)


def describe_waits(line: Mapping[str, Any]) -> str:
    """Return waits of at least a twentieth of the step, longest first: `evaluation 25 s, groups 1.2 s`."""
    seconds = {kind: line.get(f"wait/{kind}_s") or 0.0 for kind in CAUSES}
    kinds = [kind for kind in CAUSES if seconds[kind] >= 0.05 * (line.get("step_s") or 0.0) and seconds[kind]]
    kinds.sort(key=lambda kind: -seconds[kind])
    return ", ".join(f"{kind.replace('_', ' ')} {duration_text(seconds[kind])}" for kind in kinds)


def _nats(label: str, meaning: str) -> Figure:
    return Figure(label, meaning, "nats per token")


def _share(label: str, whose: str) -> Figure:
    return Figure(label, f"Share of the {whose}", "share", ".1%")


def _seconds(label: str, meaning: str) -> Figure:
    return Figure(label, meaning, "s")


_ALONE = "in answers that this step's version sampled alone"
_AFTER_SWAP = "where this step's version continued an older version's answer"
FIGURES: Mapping[str, Figure] = {
    "reward": Figure("reward", "Mean reward of the batch", form=".3f"),
    ACCURACY: Figure("held-out accuracy", "Mean accuracy of the answers to held-out rows", form=".3f"),
    HELD_OUT_REWARD: Figure("held-out reward", "Mean reward of the answers to held-out rows", form=".3f"),
    "evaluation/reward_std": Figure(
        "spread, held out", "Standard deviation of the rewards of these answers", form=".3f"
    ),
    "evaluation/some_accuracy": Figure(
        "accuracy of some",
        "Mean accuracy of the held-out answers that have one; others have none",
        form=".3f",
    ),
    "evaluation/some_accuracy_answers": Figure(
        "answers with accuracy", "Held-out answers that have an accuracy, where others have none", form=".0f"
    ),
    "evaluation/samples": Figure("held-out answers", "Answers of the evaluation", form=".0f"),
    "evaluation/failed": Figure("failed rows", "Rows of the evaluation without a result", form=".0f"),
    "reward_std": Figure("reward spread", "Standard deviation of the rewards of single answers", form=".3f"),
    "reward_max": Figure("largest reward", "Largest reward of an answer", form=".3f"),
    "zero_variance_groups": _share(
        "no signal", "groups whose answers all have the same reward; they teach nothing"
    ),
    "kept_tokens": Figure(
        "kept tokens", "Mean number of ids from which a token was drawn, under top_p, top_k or min_p"
    ),
    "kept_bytes": Figure("bytes of kept tokens", "Bytes in the log of these ids, for each sampled token"),
    "failed_members": Figure(
        "failed samples",
        "Samples of the batch's groups that failed, in all and by what was at fault",
        form=".0f",
    ),
    "retried_members": Figure(
        "retried samples", "Samples of the batch's groups that succeeded after a failure", form=".0f"
    ),
    "answer_bias": Figure(
        "bias of answers", "Mean length of the answers so far that did not fail, less that of all", "tokens"
    ),
    "answer_bias_error": Figure("error, answers", "Standard error of the bias of answers", "tokens"),
    "prompt_bias": Figure(
        "bias of prompts", "Mean prompt of the samples so far that did not fail, less that of all", "tokens"
    ),
    "prompt_bias_error": Figure("error, prompts", "Standard error of the bias of prompts", "tokens"),
    "loss": Figure("loss", "Loss of the step"),
    HELD_OUT_LOSS: Figure("held-out loss", "Loss of held-out rows after the step; they are not trained"),
    "grad_norm": Figure("gradient norm", "Norm of the gradient before it is clipped"),
    "lr": Figure("learning rate", "Learning rate of the step, after the schedule and the KL target"),
    "lr_scale": Figure("learning rate factor", "Factor by which the KL target scales the learning rate"),
    "entropy": Figure("entropy", "Entropy of the policy", "nats per token", ".4f"),
    "behaviour_kl": _nats("off-policy KL", "Distance of the policy from the one that sampled the batch"),
    "ess": Figure(
        "effective samples",
        "Effective sample size of the batch's sequences, by their ratios to the policy that sampled",
        "share",
        ".1%",
    ),
    "ess_token": Figure(
        "effective tokens", "Effective sample size of the batch's tokens, by their ratios", "share", ".1%"
    ),
    "reference_kl": _nats("reference KL", "Distance of the policy from the reference"),
    "ratio": Figure("ratio", "Mean ratio of the policy's probability to the anchor's"),
    "clipped": _share(
        "clipped tokens",
        "tokens whose gradient the clip removes: ratio above 1 + ε with a positive advantage, or below 1 − ε "
        "with a negative one",
    ),
    "dual_clipped": _share("dual-clipped tokens", "tokens that the dual clip bounds"),
    "advantage": Figure("advantage", "Mean advantage of the trained tokens"),
    "importance_weight": Figure("importance weight", "Mean weight of the off-policy correction"),
    "masked_fraction": _share("masked tokens", "tokens that the off-policy correction leaves out"),
    "skipped": Figure("skipped", "1 if the gradient was not finite and the step was left out"),
    "micro_batches": Figure("micro-batches", "Forward and backward passes of a rank", form=".0f"),
    "length": Figure("length", "Mean number of sampled tokens of an answer", "tokens", ".1f"),
    "length_max": Figure("largest length", "Largest number of sampled tokens of an answer", "tokens", ".0f"),
    "truncated": _share("truncated", "answers that ended at the limit of tokens"),
    "staleness": Figure("staleness", "Mean age of the trained samples", "steps", ".2f"),
    "staleness_max": Figure("largest staleness", "Age of the oldest trained sample", "steps", ".0f"),
    "divergence": _nats(
        "divergence", "Distance of the policy from the one that sampled the batch, less the engine's error"
    ),
    "engine_kl": _nats("engine KL", "Distance of the engine from the trainer at equal weights"),
    "staleness_limit": Figure(
        "staleness limit", "Steps that generation may run ahead after this step", "steps", ".0f"
    ),
    "mismatch_mean": Figure(
        "mismatch", f"Mean difference between the logprobs of engine and trainer {_ALONE}", "nats"
    ),
    "mismatch_max": Figure(
        "largest mismatch", f"Largest difference between the logprobs of engine and trainer {_ALONE}", "nats"
    ),
    "mismatch_kl": _nats("mismatch KL", f"Distance of the engine from the trainer {_ALONE}"),
    "mismatch_share": _share("mismatch coverage", f"trained tokens {_ALONE}"),
    "drift_mean": Figure(
        "drift", f"Mean difference between the logprobs of engine and trainer {_AFTER_SWAP}", "nats"
    ),
    "drift_max": Figure(
        "largest drift",
        f"Largest difference between the logprobs of engine and trainer {_AFTER_SWAP}",
        "nats",
    ),
    "drift_kl": _nats("drift KL", f"Distance of the engine from the trainer {_AFTER_SWAP}"),
    "drift_share": _share("drift coverage", f"trained tokens {_AFTER_SWAP}"),
    "canary_mean": Figure(
        "canary difference", "Mean difference between engine and trainer on fixed texts, at a swap", "nats"
    ),
    "canary_max": Figure(
        "largest canary difference",
        "Largest difference between engine and trainer on fixed texts, at a swap",
        "nats",
    ),
    "step_s": _seconds("step time", "Time since the previous step"),
    "train_s": _seconds("training time", "Time in which a call of this step ran"),
    "wait/evaluation_s": _seconds(
        "wait for evaluations",
        "No engine samples for training while an evaluation has them; or the batch is ready, but its step "
        "would make a third evaluation due",
    ),
    "wait/swap_s": _seconds("wait for swaps", "All engines pause for a swap of weights"),
    "wait/engines_s": _seconds("wait for absent engines", "No engine can be called: they are lost, or start"),
    "wait/late_ticket_s": _seconds(
        "wait for late tickets", "Enough groups are finished, but a ticket that is due is not"
    ),
    "wait/groups_s": _seconds("wait for groups", "Fewer groups are finished than a batch has"),
    "wait/checkpoint_s": _seconds("wait for checkpoints", "The run writes a checkpoint"),
    "wait/publication_s": _seconds(
        "wait for publication", "With `queue.max_staleness: 0`, the trainer publishes the step's weights"
    ),
    "wait/overhead_s": _seconds(
        "wait for stretto itself",
        "Its kernel works: messages, the journal, the end of the step; in a step that a resume repeats, "
        "everything",
    ),
    "tokens": Figure("trained tokens", "Trained tokens of the batch", form=".0f"),
    "step_tokens_per_s": Figure("throughput", "Trained tokens per second of the step", "tokens/s", ".0f"),
    "train_tokens_per_s": Figure(
        "training throughput", "Trained tokens per second of training", "tokens/s", ".0f"
    ),
    "cores_used": _share("cores used", "cores of the kernel's machine that the run uses"),
    "cores_idle": _share("idle cores", "cores of the kernel's machine that no program uses"),
    "memory_used": _share(
        "memory used", "memory of the kernel's machine, not of its container, that programs use"
    ),
    "generate_busy_s": _seconds("engine work", "Work of an engine since the previous step"),
    "verify_busy_s": _seconds("scoring work", "Work of all scoring processes since the previous step"),
    "ticket_s": _seconds("a ticket", "Time of a ticket: sampling and scoring a group"),
    "ticket_generate_s": _seconds(
        "generation of a ticket", "Time of a ticket in which one of its requests is at an engine"
    ),
    "ticket_score_s": _seconds(
        "scoring of a ticket", "Time of a ticket in which one of its calls is at a verifier"
    ),
    "ticket_tool_s": _seconds("tools of a ticket", "Part of the time at a verifier: tools"),
    "ticket_environment_s": _seconds(
        "environment of a ticket", "Part of the time at a verifier: the environment"
    ),
    "ticket_own_s": _seconds(
        "workflow of a ticket",
        "Time of a ticket's workflow in which nothing is at an engine or a verifier: its own work, such as "
        "an agent's program",
    ),
    "verifiers_used": _share(
        "verifiers used",
        "processes of verifiers that have work; of rewards, tools and environments, the fullest",
    ),
    "slots_used": _share("slots used", "slots of an engine that are in use"),
    "kv_used": _share("KV cache used", "memory of an engine for keys and values that is in use"),
    "lost_per_token": Figure(
        "tokens computed again",
        "Tokens that engines computed again because their prefix cache had no room for them, for each "
        "sampled token",
        form=".2f",
    ),
    "samples_waiting": Figure(
        "waiting samples", "Samples that wait for a slot or for newer weights, for each engine", form=".1f"
    ),
    "swap_pause_s": _seconds("swap pause", "Pause of an engine for swaps since the previous step"),
    "version_bytes": Figure(
        "bytes of a version",
        "Bytes of the newest version that an engine fetches if it has the one before",
        form=".0f",
    ),
    "publish_s": _seconds("publishing", "Time in which the trainer's transport took in the newest version"),
    "receive_s": _seconds("fetching", "Time in which the slowest engine fetched the newest version"),
    "recovery_s": _seconds(
        "recovery", "Time from the loss of a trainer or the kernel to the end of this step"
    ),
}
SCORE = FIGURES[ACCURACY]
"""How views show held-out scores, both accuracies and rewards."""
