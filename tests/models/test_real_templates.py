"""Chat templates of real models on real tokenizers: nothing goes wrong without a word."""

import pytest

from real_templates import FACTS, FAMILIES, record_of

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("name", FAMILIES)
def test_a_real_template_has_no_silent_fault(name: str) -> None:
    record = record_of(name)
    faults = {use: outcome for use, outcome in record.items() if outcome.startswith("FAULT")}
    excused = FACTS[name].get("excused", {})  # use -> why the template itself is at fault
    wrong = {use: faults.get(use, "is excused, and holds") for use in faults.keys() ^ excused.keys()}
    assert not wrong, "\n".join(f"{use}: {outcome}" for use, outcome in wrong.items())
