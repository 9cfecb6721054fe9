r"""python make_model.py [--out DIR] [--forget P] [--seed N]: write the quickstart's rows and untrained model.

The script writes the rows, a tokenizer with an untrained model, and demonstrations. Supervised training by
stretto then makes the model from them, first at a high learning rate, then at one that falls nearly to 0:

    python examples/quickstart/make_model.py
    stretto run examples/quickstart/sft.yaml out=runs/sft steps=2761 training.decay_steps=5000
    stretto run examples/quickstart/sft.yaml out=runs/end model=runs/sft/checkpoints/step-002761/model \
        steps=500 training.lr=1e-3 training.warmup_steps=20 'training.betas=[0.9,0.999]'
    cp runs/end/checkpoints/step-000500/model/{config.json,model.safetensors} examples/quickstart/model/

The task is running sums: `3+5+9=` is answered by `8 17`, each partial sum from the second term on, then the
end token. A sum has two to ten terms of one digit, and long sums are rarer, so answers take 2 to 27 tokens,
13 on average.

The model is a Qwen2 of 0.2 M parameters, with one token per character. The demonstrations that it imitates
have a systematic error: where a sum passes a ten, the teacher forgets the carry with probability `forget`
(0.6), writes `8 7`, and continues from there. So the model's most likely answer forgets carries: decoded
greedily it is right on one held-out row in twenty-five, those with few carries. Sampled at temperature 1 it
is right on one in five, which is enough for a reward to teach it to carry.

Held-out rows are in neither train.jsonl nor the demonstrations nor pairs.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TERMS = range(2, 11)
TERM_WEIGHTS = [0.75**n for n in TERMS]
NUM_TRAIN, NUM_HELDOUT, NUM_PAIRS = 6144, 1024, 4096
MAX_POSITIONS = 512

PAD, UNKNOWN, TURN, END = SPECIAL = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PAD_ID, END_ID = SPECIAL.index(PAD), SPECIAL.index(END)
PRINTABLE = "".join(sorted(set(string.printable) - set("\r\x0b\x0c")))
# Turns one after the other, so that a chat of one user turn is the bare prompt the model was trained on.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def draw_terms(rng: random.Random) -> list[int]:
    return [rng.randint(1, 9) for _ in range(rng.choices(TERMS, TERM_WEIGHTS)[0])]


def prompt_of(terms: list[int]) -> str:
    return "+".join(map(str, terms)) + "="


def answer_of(terms: list[int], rng: random.Random | None = None, forget: float = 0.0) -> str:
    """The partial sums; each carry is forgotten with probability `forget`."""
    total, sums = terms[0], list[str]()
    for term in terms[1:]:
        carry = total % 10 + term >= 10
        total += term
        if carry and rng and rng.random() < forget:
            total -= 10
        sums.append(str(total))
    return " ".join(sums)


def make_rows(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows, all of them different."""
    rng = random.Random(f"rows {seed}")
    answers: dict[str, str] = {}
    while len(answers) < NUM_TRAIN + NUM_HELDOUT:
        terms = draw_terms(rng)
        answers[prompt_of(terms)] = answer_of(terms)
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in answers.items()]
    rng.shuffle(rows)  # short sums run out early, so the order of drawing is not random
    train, heldout = rows[:NUM_TRAIN], rows[NUM_TRAIN:]
    return (
        [{"id": f"train-{i:04d}", **row} for i, row in enumerate(train)],
        [{"id": f"heldout-{i:04d}", **row} for i, row in enumerate(heldout)],
    )


def make_tokenizer(characters: str = PRINTABLE) -> PreTrainedTokenizerFast:
    """One token for each of the characters (for each byte, outside ASCII), as byte-level BPE without merges.

    transformers 5 ignores the tokenizer's class for model type qwen2 and always builds its byte-level
    Qwen2Tokenizer from the vocabulary; a plain WordLevel one would lose the spaces there.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = dict.fromkeys(byte_level.pre_tokenize_str("".join(sorted(set(characters))))[0][0])
    vocab = {token: i for i, token in enumerate([*SPECIAL, *symbols])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[TURN],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,  # of dimension 32: vLLM on CPU refuses 16
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.04,  # learns this sooner than from the usual 0.02
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    return model


def write_model(folder: Path, characters: str) -> Qwen2ForCausalLM:
    """Write an untrained model and its tokenizer into a folder. `stretto new model` calls it too."""
    tokenizer = make_tokenizer(characters)
    model = make_model(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def make_demonstrations(heldout: set[str], *, forget: float, count: int, seed: int) -> list[dict[str, str]]:
    """Make rows with answers of the teacher that forgets carries; a prompt may repeat with another answer."""
    rng = random.Random(f"demonstrations {seed}")
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        terms = draw_terms(rng)
        if (prompt := prompt_of(terms)) not in heldout:
            rows.append({"prompt": prompt, "completion": answer_of(terms, rng, forget)})
    return rows


def make_pairs(heldout: set[str], *, forget: float, count: int, seed: int) -> list[dict[str, str]]:
    """Make preference pairs: the right answer over one in which the teacher forgot a carry."""
    rng = random.Random(f"pairs {seed}")
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        terms = draw_terms(rng)
        prompt, chosen, rejected = prompt_of(terms), answer_of(terms), answer_of(terms, rng, forget)
        if prompt not in heldout and rejected != chosen:
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make what the quickstart's model is trained from.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where everything goes")
    parser.add_argument("--forget", type=float, default=0.6, help="how often the teacher forgets a carry")
    parser.add_argument("--demonstrations", type=int, default=128_000, help="rows of demonstrations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    train, heldout = make_rows(args.seed)
    unseen = {row["prompt"] for row in heldout}
    demonstrations = make_demonstrations(
        unseen, forget=args.forget, count=args.demonstrations, seed=args.seed
    )
    pairs = make_pairs(unseen, forget=args.forget, count=NUM_PAIRS, seed=args.seed)
    write_rows(args.out / "pairs.jsonl", pairs)
    write_rows(args.out / "train.jsonl", train)
    write_rows(args.out / "heldout.jsonl", heldout)
    write_rows(args.out / "demonstrations.jsonl", demonstrations)
    model = write_model(args.out / "untrained", PRINTABLE)
    print(
        f"{args.out / 'untrained'}: {model.num_parameters():,} parameters; "
        f"{len(demonstrations):,} demonstrations"
    )


if __name__ == "__main__":
    main()
