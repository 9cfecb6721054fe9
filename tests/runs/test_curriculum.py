"""Runs whose dataset brings a curriculum: the draws are in the journal, and a resumed run keeps them."""

import json
from pathlib import Path
from typing import Any

from fixture_types import Start
from stretto.bus.messages.events import RowsDrawn
from worlds import in_simulation

REWARD = """
def score(prompt, completion, n, **columns):
    # Rows 0 to 13 are impossible, rows 14 to 26 easy; the others depend on the answer.
    right = float(n > 13) if n < 27 else float(len(completion) % 2)
    return {"reward": right, "accuracy": right}
"""


def mix_of(folder: Path) -> list[str]:
    """Options of a run whose rewards decide which rows it draws."""
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{n}+1=", "n": n} for n in range(40)]
    for name, part in {"first": rows[:20], "second": rows[20:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    parts = ", ".join(f"{name}: {{use: jsonl, path: {folder}/{name}.jsonl}}" for name in ("first", "second"))
    pools = "{hard: {max: 0.1, weight: 0.1}, fitting: {max: 0.9}, easy: {weight: 0.1}}"
    return [
        f"dataset={{use: mix, parts: {{{parts}}}, weights: {{second: {{0: 1, 8: 3}}}}, pools: {pools}}}",
        f"reward={{use: function, function: '{folder}/reward.py:score'}}",
    ]


def draws(run: Any) -> list[RowsDrawn]:
    return [event for event in run.journal() if isinstance(event, RowsDrawn)]


def rows_of(events: list[RowsDrawn]) -> dict[int, int]:
    """Ticket -> row. No ticket is drawn twice."""
    pairs = [pair for event in events for pair in event.draws]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@in_simulation
def test_a_killed_run_keeps_the_rows_that_it_has_drawn(start: Start, tmp_path: Path) -> None:
    options = mix_of(tmp_path)
    run = start(*options, "steps=14", "checkpoint.every=4", "checkpoint.keep=9")
    run.until_step(7)
    run.kill()
    before = draws(run)
    run = start(resume=run)
    run.assert_completed(14)
    after = draws(run)
    rows = rows_of(after)
    assert rows_of(before).items() <= rows.items()
    assert list(rows) == list(range(len(rows)))
    assert len(rows) == run.summary()["ledger"]["issued"]
    assert len(after) < len(rows)  # one event for all tickets that were admitted at once
    assert "draws in the journal" in [check.name for check in run.audit().checks]
    last = run.metrics()[-1]
    assert last["pool/hard/rows"] > 0
    assert sum(value for key, value in last.items() if key.startswith("pool/") and "rows" in key) == 40
    assert last["dataset/first/groups"] + last["dataset/second/groups"] == 4
    trained = [line["dataset/second/groups"] for line in run.metrics()]
    assert sum(trained[:4]) < sum(trained[-4:])  # its weight rises
    assert {"dataset/first/accuracy", "dataset/second/reward"} <= last.keys()
