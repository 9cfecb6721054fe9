"""The variants of an A/B test: the variant of each ticket, and the accounts of each variant. No I/O."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from stretto.bus.messages.tickets import GroupDone, Member
from stretto.records.intervals import Estimate, Moments, difference_of, mean_of

Account = Literal["issued", "trained", "filtered", "expired", "failed"]

_MOST_FIGURES = 64
"""Maximum number of figures of a variant. A reward may return metrics of new names at any time."""


class VariantAccount(msgspec.Struct):
    """Accounts of one variant's tickets. Tickets in `issued` and in no other account are in flight."""

    issued: int = 0
    trained: int = 0
    filtered: int = 0
    expired: int = 0
    failed: int = 0
    figures: dict[str, Moments] = {}
    """Figures of the finished groups, trained or not: one value for each group."""


class VariantAccounts:
    """The variants of a run and their accounts. In a run without variants, every ticket's variant is `""`."""

    def __init__(self, seed: int, weights: Mapping[str, float]) -> None:
        self._seed = seed
        self.weights = weights
        self.accounts = {name: VariantAccount() for name in weights}

    def restore(self, accounts: Mapping[str, VariantAccount]) -> None:
        """Replace the accounts by those of a previous kernel."""
        self.accounts |= {name: _copy(account) for name, account in accounts.items() if name in self.accounts}

    def snapshot(self) -> dict[str, VariantAccount]:
        return {name: _copy(account) for name, account in self.accounts.items()}

    def of(self, ticket: int) -> str:
        return variant_of(self._seed, ticket, self.weights) if self.weights else ""

    def count(self, ticket: int, account: Account) -> None:
        """Count a training ticket that is issued, or that has ended in an account."""
        if self.weights:
            counts = self.accounts[self.of(ticket)]
            setattr(counts, account, getattr(counts, account) + 1)

    def observe(self, group: GroupDone) -> None:
        """Add the figures of a training ticket's group. Called once for each ticket."""
        if not self.weights:
            return
        figures = self.accounts[self.of(group.ticket)].figures
        for name, value in {**figures_of(group.members), "seconds": group.seconds}.items():
            if name in figures or len(figures) < _MOST_FIGURES:
                figures.setdefault(name, Moments()).add(value)

    def estimates(self) -> dict[str, dict[str, Estimate]]:
        """Return the mean of every figure over the groups of each variant."""
        return {
            name: {figure: mean_of(moments) for figure, moments in sorted(account.figures.items())}
            for name, account in self.accounts.items()
        }

    def differences(self) -> dict[str, dict[str, Estimate]]:
        """Return the differences between the means of each other variant and the means of the first."""
        if not self.accounts:
            return {}
        first, *later = self.accounts
        base = self.accounts[first].figures
        return {
            name: {
                figure: difference_of(moments, base[figure])
                for figure, moments in sorted(self.accounts[name].figures.items())
                if figure in base
            }
            for name in later
        }


def variant_of(seed: int, ticket: int, weights: Mapping[str, float]) -> str:
    """Draw a ticket's variant by weight: the same in each attempt and each repetition of the run."""
    digest = hashlib.sha256(f"{seed}/variant/{ticket}".encode()).digest()
    place = int.from_bytes(digest[:8], "little") / 2**64 * sum(weights.values())
    for name, weight in weights.items():
        place -= weight
        if place < 0:
            return name
    return list(weights)[-1]  # only after rounding errors of the subtractions


def figures_of(members: tuple[Member, ...]) -> dict[str, float]:
    """Return the figures of one group: its mean reward, mean metrics, and mean length of its trajectories."""
    samples = [member for member in members if not member.part]
    names = sorted({name for member in samples for name in member.metrics})
    return {
        "reward": _mean([member.reward for member in samples]),
        **metric_figures(samples, "reward", names),
        "length": _mean([member.sampled for member in members]),
        "truncated": _mean([float(member.finish == "length") for member in members]),
    }


def metric_figures(samples: Sequence[Member], beginning: str, names: Iterable[str]) -> dict[str, float]:
    """Return means such as `reward/accuracy`; `reward/accuracy/answers` if some samples lack the metric."""
    figures: dict[str, float] = {}
    for name in names:
        values = [each.metrics[name] for each in samples if name in each.metrics]
        if values:
            figures[f"{beginning}/{name}"] = _mean(values)
        if values and len(values) < len(samples):
            figures[f"{beginning}/{name}/answers"] = len(values)
    return figures


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _copy(account: VariantAccount) -> VariantAccount:
    figures = {name: msgspec.structs.replace(moments) for name, moments in account.figures.items()}
    return msgspec.structs.replace(account, figures=figures)
