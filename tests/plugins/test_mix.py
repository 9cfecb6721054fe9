"""The dataset `mix`: shares of its parts, schedules, pools and gates; what `check` refuses."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.assembly.assembly import Assembly
from stretto.assembly.compose import Composed, compose
from stretto.dataset import CurriculumDataset, TicketEnd
from stretto.errors import StrettoError
from stretto_mix import GateConfig, MixConfig, check
from stretto_mix.curriculum import MixCurriculum, Pool, Weight, weight_at

POOLS = [Pool("hard", 0.1, 0.1), Pool("fitting", 0.9, 1.0), Pool("easy", float("inf"), 0.1)]


def mix(
    parts: Mapping[str, tuple[range, Weight]], pools: list[Pool] | None = None, **options: Any
) -> MixCurriculum:
    settings: dict[str, Any] = {"unseen": 1.0, "gates": {}, "shuffle": True, "seed": 5, **options}
    return MixCurriculum(parts, pools or [], **settings)


def draw(curriculum: MixCurriculum, ticket: int, version: int = 0) -> int:
    row = curriculum.choose(ticket, version)
    curriculum.drawn(ticket, row, version)
    return row


def end(curriculum: MixCurriculum, ticket: int, row: int, *rewards: float) -> None:
    curriculum.ended(TicketEnd(ticket, row, "trained", rewards))


# ------------------------------------------------------------------------------- parts and weights


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), st.integers(0, 99))
def test_no_part_is_a_whole_ticket_ahead_of_its_share(weights: list[int], seed: int) -> None:
    names = [f"part{index}" for index in range(len(weights))]
    parts = {name: (range(9 * i, 9 * i + 9), float(weights[i])) for i, name in enumerate(names)}
    curriculum, drawn = mix(parts, seed=seed), Counter[int]()
    for ticket in range(60):
        drawn[draw(curriculum, ticket) // 9] += 1
        for index, weight in enumerate(weights):
            share = (ticket + 1) * weight / sum(weights)
            assert share - len(weights) < drawn[index] < share + 1
            assert weight or not drawn[index]


@settings(max_examples=50)
@given(rows=st.integers(1, 9), in_flight=st.integers(0, 4), seed=st.integers(0, 99))
def test_every_row_has_its_turn_before_any_has_another(rows: int, in_flight: int, seed: int) -> None:
    curriculum, open_rows = mix({"": (range(rows), 1.0)}, seed=seed), list[tuple[int, int]]()
    drawn = Counter[int]()
    for ticket in range(5 * rows):
        row = draw(curriculum, ticket)
        drawn[row] += 1
        open_rows.append((ticket, row))
        if len(open_rows) > min(in_flight, rows - 1):
            end(curriculum, *open_rows.pop(0), 1.0)
        free = rows - len(open_rows)
        assert max(drawn.values()) - min(drawn[row] for row in range(rows)) <= 1 + (free < rows)


def test_rows_come_in_their_order_without_shuffle() -> None:
    curriculum = mix({"": (range(4), 1.0)}, shuffle=False)
    for ticket, expected in enumerate([0, 1, 2, 3, 0, 1, 2, 3]):
        assert draw(curriculum, ticket) == expected
        end(curriculum, ticket, expected, 1.0)


def test_the_order_follows_from_the_seed() -> None:
    def rows(seed: int) -> list[int]:
        curriculum = mix({"": (range(50), 1.0)}, seed=seed)
        return [draw(curriculum, ticket) for ticket in range(50)]

    assert rows(1) == rows(1) != rows(2)
    assert sorted(rows(1)) == list(range(50))


def test_a_schedule_changes_evenly_between_its_steps() -> None:
    weight = {10: 0.0, 20: 1.0, 40: 3.0}
    assert [weight_at(weight, step) for step in (0, 10, 15, 20, 30, 40, 99)] == [0, 0, 0.5, 1, 2, 3, 3]
    curriculum = mix({"easy": (range(50), 1.0), "hard": (range(50, 100), {0: 0.0, 4: 3.0})})
    hard = [
        sum(draw(curriculum, 12 * version + ticket, version) >= 50 for ticket in range(12))
        for version in range(6)
    ]
    assert hard == pytest.approx([0, 12 * 0.75 / 1.75, 12 * 1.5 / 2.5, 12 * 2.25 / 3.25, 9, 9], abs=1)


# ------------------------------------------------------------------------------------------- pools


def after_first_rewards(rewards: list[float], **options: Any) -> MixCurriculum:
    """A curriculum whose rows 0, 1, … had these rewards in their first groups."""
    curriculum = mix({"": (range(len(rewards)), 1.0)}, POOLS, **options)
    for row, reward in enumerate(rewards):
        curriculum.drawn(row, row, 0)
        end(curriculum, row, row, reward, reward)
    return curriculum


def test_bounds_of_pools_are_inclusive_and_the_newest_group_decides() -> None:
    curriculum = after_first_rewards([0.0, 0.1, 0.11, 0.9, 0.91, 1.0])
    figures = curriculum.figures()
    assert {key: value for key, value in figures.items() if key.endswith("/rows")} == {
        "pool/hard/rows": 2, "pool/fitting/rows": 2, "pool/easy/rows": 2, "pool/unseen/rows": 0,
    }  # fmt: skip
    assert figures["pool/hard/share"] == pytest.approx(1 / 3)
    end(curriculum, 100, 0, 0.5, 0.5)
    end(curriculum, 99, 0, 1.0, 1.0)  # an older ticket's group, which comes later
    assert curriculum.figures()["pool/fitting/rows"] == 3


def test_rows_are_drawn_by_the_weights_of_their_pools() -> None:
    curriculum = after_first_rewards([0.0] * 40 + [0.5] * 40 + [1.0] * 40)
    drawn = Counter[int]()
    for ticket in range(1000, 3400):
        row = draw(curriculum, ticket)
        drawn[row // 40] += 1
        end(curriculum, ticket, row, (0.0, 0.5, 1.0)[row // 40])
    assert drawn[1] / 2400 == pytest.approx(1 / 1.2, abs=0.03)
    assert drawn[0] / 2400 == pytest.approx(0.1 / 1.2, abs=0.03)


def test_rows_without_a_result_have_the_weight_of_unseen() -> None:
    curriculum = mix({"": (range(8), 1.0)}, POOLS, unseen=0.0)
    end(curriculum, 0, draw(curriculum, 0), 0.5)
    seen = curriculum.choose(1, 0)
    assert all(curriculum.choose(ticket, 0) == seen for ticket in range(20))
    curriculum.drawn(20, seen, 0)
    assert curriculum.choose(21, 0) != seen  # no row with a weight can be drawn


def test_a_row_that_is_not_fit_is_left_out_while_there_are_others() -> None:
    curriculum = mix({"": (range(3), 1.0)}, POOLS)
    unfit = draw(curriculum, 0)
    curriculum.ended(TicketEnd(0, unfit, "filtered", ()))
    for ticket in range(1, 30):
        row = draw(curriculum, ticket)
        assert row != unfit
        end(curriculum, ticket, row, 0.5)


def test_a_restored_curriculum_draws_what_the_former_one_would_have_drawn() -> None:
    curriculum = after_first_rewards([0.0, 0.4, 0.6, 1.0] * 5)
    draw(curriculum, 50)
    state = json.loads(json.dumps(curriculum.state()))
    again = mix({"": (range(20), 1.0)}, POOLS)
    again.restore(state)
    assert [draw(again, ticket) for ticket in range(51, 65)] == [
        draw(curriculum, ticket) for ticket in range(51, 65)
    ]
    assert again.state() == curriculum.state()
    fewer = mix({"": (range(7), 1.0)}, POOLS)
    fewer.restore(state)
    assert all(draw(fewer, ticket) < 7 for ticket in range(51, 65))


def test_gates_reject_ranges_of_the_mean_and_of_the_range() -> None:
    gates = {"flat": GateConfig(), "solved": GateConfig(of="mean", reject_min=0.9, reject_max=1.0)}
    curriculum = mix({"": (range(3), 1.0)}, gates=gates)
    assert curriculum.refusal(0, (0.5, 0.5)) == "by the gate flat"
    assert curriculum.refusal(0, (0.8, 1.0)) == "by the gate solved"
    assert curriculum.refusal(0, (0.0, 1.0)) == ""


# ---------------------------------------------------------------------------------- the run file


BOTH = "parts: {a: {use: jsonl, path: a.jsonl}, b: {use: jsonl, path: b.jsonl}}"


@pytest.fixture
def composed(tmp_path: Path) -> Callable[..., Composed]:
    """`composed("weights: {a: 2}")`: a run with a mix of the parts a (3 rows) and b (2 rows)."""
    for name, count in (("a", 3), ("b", 2), ("empty", 0)):
        rows = "".join(f'{{"prompt": "{name}{i}"}}\n' for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text(rows)

    def compose_run(*lines: str) -> Composed:
        parts = [] if any(line.startswith("parts: ") for line in lines) else [BOTH]
        section = "\n".join(f"  {line}" for line in ("use: mix", *parts, *lines))
        run = f"name: test\nalgorithm: grpo\nreward: exact\nsteps: 9\ndataset:\n{section}\n"
        (tmp_path / "run.yaml").write_text(run)
        return compose(tmp_path / "run.yaml")

    return compose_run


def made(composed: Composed) -> Any:
    return Assembly(composed, folder="").make("dataset")


def test_rows_of_the_parts_are_one_after_the_other(composed: Callable[..., Composed]) -> None:
    dataset = made(composed())
    assert isinstance(dataset, CurriculumDataset)
    assert [dataset[index]["prompt"] for index in range(len(dataset))] == ["a0", "a1", "a2", "b0", "b1"]
    assert [dataset.source_of(index) for index in range(5)] == ["a", "a", "a", "b", "b"]
    assert dataset.fingerprint == made(composed("weights: {a: 2}")).fingerprint  # the rows are the same
    renamed = "parts: {a: {use: jsonl, path: b.jsonl}, b: {use: jsonl, path: a.jsonl}}"
    assert dataset.fingerprint != made(composed(renamed)).fingerprint


def test_without_weights_all_rows_have_the_same_chance(composed: Callable[..., Composed]) -> None:
    curriculum = made(composed()).curriculum(1)
    assert sorted(draw(curriculum, ticket) for ticket in range(5)) == [0, 1, 2, 3, 4]
    weighed = made(composed("weights: {b: 0}")).curriculum(1)
    assert all(draw(weighed, ticket) < 3 for ticket in range(9))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["weights: {c: 1}"], r"no part 'c'"),
        (["weights: {a: -1}"], r"dataset.weights: expected float >= 0"),
        (["weights: {a: {soon: 1}}"], r"dataset.weights: a key: expected int, got str"),
        (["weights: {a: {}}"], r"weights.a: expected a weight at one step at least"),
        (["weights: {a: 0, b: {0: 1, 50: 0}}"], r"all parts have the weight 0 at step 50"),
        (["pools: {hard: {max: 0.1}}"], r"pools: 0 of them have no max; expected exactly one"),
        (["pools: {a: {max: 1}, b: {max: 1}, c: {}}"], r"two of them have the same max"),
        (["pools: {unseen: {}}"], r"no pool can be called 'unseen'"),
        (["pools: {a: {weigth: 1}}"], r"unknown key 'weigth'; did you mean 'weight'"),
        (["gates: {flat: {reject_min: 1, reject_max: 0}}"], r"reject_max is 0, below reject_min, 1"),
        (["parts: {}"], r"parts: expected at least one"),
        (["parts: {a: {use: jsonl, path: a.jsonl, shuffle: false}}"],
         r"parts.a: write max_prompt_tokens and shuffle"),
        (["parts: {a: {use: mix, parts: {b: {use: jsonl, path: b.jsonl}}}}"],
         r"parts.a has a curriculum of its own"),
        (["parts: {a: {use: jsonl, path: empty.jsonl}}"], r"parts.a is empty"),
    ],
)  # fmt: skip
def test_section_faults_are_named(composed: Callable[..., Composed], lines: list[str], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        made(composed(*lines))


def test_a_part_that_is_never_drawn_is_a_warning(composed: Callable[..., Composed]) -> None:
    def problems(weights: str) -> list[tuple[str, str]]:
        config = composed(weights).config
        assert isinstance(config.dataset, MixConfig)
        return [(each.path, each.severity) for each in check(config.dataset, config)]

    assert problems("weights: {a: {9: 0, 20: 5}}") == [("dataset.weights.a", "warning")]
    assert problems("weights: {a: {8: 0, 9: 1}}") == []
