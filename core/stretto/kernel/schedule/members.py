"""Accounts of samples: trained, filtered, expired, missing. How failed samples differ from the others."""

import math
from collections import Counter
from typing import Any, Literal

import msgspec

from stretto.bus.messages.events import Account
from stretto.bus.messages.tickets import GroupDone
from stretto.kernel.schedule.open_tickets import samples_of
from stretto.records.intervals import Moments
from stretto.user_code.faults import FaultKind

_MOST_REASONS = 1000
OF_SAMPLES = ("missing: ", "penalized: ")
"""Prefixes of reasons whose counts are numbers of samples. Counts of other reasons are numbers of tickets."""


class MemberLedger(msgspec.Struct):
    """Accounts of the samples that training tickets have begun. `sampled` is the sum of the other accounts
    plus the number of samples in finished groups that wait for training."""

    sampled: int = 0
    trained: int = 0
    filtered: int = 0
    expired: int = 0
    missing: int = 0
    """Samples that failed, and all samples of a failed attempt."""

    def count_missing(self, samples: int) -> None:
        self.sampled += samples
        self.missing += samples

    def count(self, account: Account | Literal["trained"], group: GroupDone) -> None:
        """Count the samples of a finished group that has been trained or retired."""
        setattr(self, account, getattr(self, account) + samples_of(group))


class LengthBias(msgspec.Struct):
    """The difference in length between samples that can be trained and all samples."""

    done: Moments = msgspec.field(default_factory=Moments)
    failed: Moments = msgspec.field(default_factory=Moments)

    @property
    def shift(self) -> float:
        """Mean length of the samples that can be trained, minus the mean length of all samples."""
        return self._share * (self.done.mean - self.failed.mean)

    @property
    def error(self) -> float:
        """Standard error of `shift`. A single length has no spread."""
        with_spread = [moments for moments in (self.done, self.failed) if moments.count > 1]
        return self._share * math.sqrt(sum(moments.variance_of_mean for moments in with_spread))

    @property
    def _share(self) -> float:
        total = self.done.count + self.failed.count
        return self.failed.count / total if self.failed.count and self.done.count else 0.0

    def document(self) -> dict[str, float]:
        """Return the means, the shift and its standard error, in tokens."""
        means = {"done": self.done.mean, "failed": self.failed.mean}
        figures = {**means, "shift": self.shift, "error": self.error}
        return {name: round(value, 3) for name, value in figures.items()}


class Failures(msgspec.Struct):
    """Samples of training tickets that failed."""

    missing: dict[FaultKind, int] = {}
    """Number of samples missing in finished groups, by kind of fault."""
    penalized: int = 0
    """Number of samples that failed because of their own answer, and got the reward for such a failure."""
    retried: dict[FaultKind, int] = {}
    """Number of samples that succeeded after a failure, by kind of fault."""
    redrawn: int = 0
    """Number of samples in `retried` whose answer is not the one that failed."""
    answers: LengthBias = msgspec.field(default_factory=LengthBias)
    """Sampled tokens of each sample. Failed samples count if the policy had sampled a token."""
    prompts: LengthBias = msgspec.field(default_factory=LengthBias)
    """Tokens of each sample's prompt."""

    def finish(self, group: GroupDone, members: MemberLedger, reasons: Counter[str]) -> None:
        """Count the samples of a finished group, and the reasons why samples are missing or penalized."""
        members.count_missing(len(group.missing))
        samples = samples_of(group)
        members.sampled += samples
        for failed in group.missing:
            _add_reason(reasons, f"missing: {failed.kind}", failed.reason)
        for failed in group.penalized:
            _add_reason(reasons, "penalized", failed.reason)
        self.missing = _sum(self.missing, Counter(failed.kind for failed in group.missing))
        self.retried = _sum(self.retried, group.retried)
        self.penalized += len(group.penalized)
        self.redrawn += group.redrawn
        for length in _lengths(group):
            self.answers.done.add(length)
        for failed in group.missing:
            if failed.sampled:
                self.answers.failed.add(failed.sampled)
        for _ in range(samples):
            self.prompts.done.add(group.prompt)
        self.give_up(group.prompt, len(group.missing))

    def give_up(self, prompt_tokens: int, samples: int) -> None:
        """Count the prompt's length for samples that are not trained."""
        for _ in range(samples):
            self.prompts.failed.add(prompt_tokens)

    def document(self) -> dict[str, Any]:
        """Return the figures for `summary.json`."""
        return {
            "missing": self.missing,
            "penalized": self.penalized,
            "retried": self.retried,
            "redrawn": self.redrawn,
            "answer_tokens": self.answers.document(),
            "prompt_tokens": self.prompts.document(),
        }

    def figures(self) -> dict[str, float]:
        """Return the shifts of lengths in tokens, with standard errors; empty if no sample has failed."""
        biases = {"answer_bias": self.answers, "prompt_bias": self.prompts}
        figures: dict[str, float] = {}
        for name, bias in biases.items():
            if bias.failed.count:
                figures |= {name: bias.shift, f"{name}_error": bias.error}
        return figures


def _lengths(group: GroupDone) -> list[int]:
    lengths: list[int] = []
    for member in group.members:
        if member.part and lengths:
            lengths[-1] += member.sampled
        else:
            lengths.append(member.sampled)
    return lengths


def _sum(counts: dict[FaultKind, int], more: dict[FaultKind, int]) -> dict[FaultKind, int]:
    return {kind: counts.get(kind, 0) + more.get(kind, 0) for kind in counts | more}


def _add_reason(reasons: Counter[str], account: str, reason: str) -> None:
    """Count a reason. The number of different reasons is limited, because each answer may have its own."""
    text = f"{account}: {reason}"
    reasons[text if text in reasons or len(reasons) < _MOST_REASONS else f"{account}: other reasons"] += 1
