"""The text of each token."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stretto_ui.token_text import pieces


def test_without_a_model_tokens_are_bytes() -> None:
    # The two bytes of é come with the second of them.
    assert pieces(None, list("aé<b>".encode())) == ["a", "", "é", "<", "b", ">"]


def test_the_pieces_are_the_text(tmp_path: Path) -> None:
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet = {character: number for number, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    found = pieces(str(tmp_path), tokenizer.encode("1 é 漢").ids)

    assert found == ["1", " ", "", "é", " ", "", "", "漢"]


def test_a_model_that_this_machine_does_not_have_has_no_text() -> None:
    assert pieces("nobody/no-model", [1, 2]) is None
