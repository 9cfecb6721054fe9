"""Variants of an A/B test in the kernel: the draw of a ticket's variant, and the accounts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_events import issued_by, stored
from stretto.bus.messages.tickets import GroupDone, Member
from stretto.kernel.schedule.commands import SchedulerSettings
from stretto.kernel.schedule.scheduler import Scheduler
from stretto.kernel.schedule.variants import VariantAccounts, variant_of

WEIGHTS = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.floats(0.1, 10), min_size=2, max_size=4)


@given(seed=st.integers(0, 2**31), weights=WEIGHTS)
def test_shares_approach_the_weights(seed: int, weights: dict[str, float]) -> None:
    tickets = 2000
    drawn = [variant_of(seed, ticket, weights) for ticket in range(tickets)]
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        within = 6 * math.sqrt(share * (1 - share) / tickets)  # six standard deviations
        assert drawn.count(name) / tickets == pytest.approx(share, abs=within)


def test_another_seed_draws_other_variants() -> None:
    weights = {"a": 1.0, "b": 1.0}
    first, second = ([variant_of(seed, ticket, weights) for ticket in range(200)] for seed in (1, 2))
    assert first != second


def group(ticket: int, reward: float, **metrics: float) -> GroupDone:
    """A finished group of two samples with rewards around `reward`."""
    members = tuple(
        Member(f"{ticket}/1/{index}", 1, index, 9, 4 + 2 * index, 0, 0, reward + offset, metrics, "stop")
        for index, offset in enumerate((-0.5, 0.5))
    )
    return GroupDone("train", ticket, 1, "w", members, 2.0)


def test_figures_are_means_over_groups() -> None:
    accounts = VariantAccounts(1, {"a": 1.0, "b": 1.0})
    of_a = [ticket for ticket in range(50) if accounts.of(ticket) == "a"][:2]
    [of_b] = [ticket for ticket in range(50) if accounts.of(ticket) == "b"][:1]
    for ticket, reward in zip([*of_a, of_b], (1.0, 3.0, 5.0), strict=True):
        accounts.observe(group(ticket, reward, accuracy=reward / 10))
    figures = accounts.estimates()
    assert figures["a"]["reward"].mean == 2.0
    assert figures["a"]["reward"].ci95 == pytest.approx(12.7062)  # t(1) · s / √n = 12.7062 · √2 / √2
    assert figures["a"]["reward/accuracy"].mean == pytest.approx(0.2)
    assert (figures["b"]["length"].mean, figures["b"]["seconds"].mean) == (5.0, 2.0)
    differences = accounts.differences()
    assert list(differences) == ["b"]  # each against the first
    assert differences["b"]["reward"].mean == 3.0
    assert differences["b"]["reward"].ci95 is None  # b has a single group


def test_a_reward_that_names_ever_new_metrics_does_not_fill_the_memory() -> None:
    accounts = VariantAccounts(1, {"a": 1.0, "b": 1.0})
    for ticket in range(1000):
        accounts.observe(group(ticket, 1.0, **{f"metric{ticket}": 1.0}))
    assert all(len(account.figures) <= 64 for account in accounts.accounts.values())
    assert sum(account.figures["reward"].count for account in accounts.accounts.values()) == 1000


def scheduler() -> Scheduler:
    return Scheduler(SchedulerSettings(4, 4, 1, 100, seed=7, variants={"a": 1.0, "b": 1.0}))


def test_a_resumed_run_gives_tickets_the_same_variants_and_goes_on_counting() -> None:
    first = scheduler()
    first.start()
    tickets = issued_by(first.commands())
    for ticket in tickets[:3]:
        first.group_done(group(ticket.id, 1.0))
    snapshot = stored(first)
    first.group_done(group(tickets[3].id, 1.0))  # after the snapshot; the resumed kernel reads it in the log

    second = scheduler()
    second.restore(snapshot)
    second.owned(1000)
    second.group_done(group(tickets[3].id, 1.0))
    second.start()
    second.step_finished()
    again = issued_by(second.commands())
    drawn = {ticket.id: ticket.variant for ticket in tickets}
    assert all(drawn.get(ticket.id, ticket.variant) == ticket.variant for ticket in again)
    assert {ticket.id for ticket in again} & drawn.keys()
    for name, account in second.variants.accounts.items():
        assert account.trained == [drawn[ticket.id] for ticket in tickets[:4]].count(name)
        assert account.figures["reward"].count == account.trained  # each group once
