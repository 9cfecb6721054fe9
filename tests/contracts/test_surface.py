"""What users can type is what `surface.txt` lists, so that nothing goes unnoticed."""

from pathlib import Path

from surface import surface

GOLDEN = Path(__file__).with_name("surface.txt")


def test_commands_options_and_keys_are_the_listed_ones() -> None:
    assert surface() == GOLDEN.read_text(), (
        "options, keys of run files or commands in the docs have changed. If that is meant: "
        "python tests/helpers/surface.py > tests/contracts/surface.txt"
    )
