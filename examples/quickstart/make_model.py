"""python make_model.py [--out DIR] [--slip P] [--seed N]: remake the quickstart's rows and its model.

The task is running sums: `3+5+9=` is answered by `8 17`, each partial sum from the second term on, then the
end token. Two to ten terms of one digit, long sums ever rarer, so answers take 2 to 27 tokens, 13 on average.

The model is a Qwen2 of 0.2 M parameters, one token a character. Its teacher is right about the rule but
careless: at each step it forgets, with probability `slip`, to add the term, writes the sum it had before, and
goes on from there. So the model knows every sum (its most likely answer is nearly always right), but samples
a slip as often as its teacher made one: about half its answers are right at temperature 1. Reinforcement
learning can repair exactly this: nothing is to be discovered, one habit is to be unlearned.

Held-out rows are in neither train.jsonl nor the demonstrations. One thread and a fixed seed: the same
versions of torch and transformers write the same bytes on the same kind of machine. Takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TERMS = range(2, 11)
TERM_WEIGHTS = [0.75**n for n in TERMS]
NUM_TRAIN, NUM_HELDOUT = 6144, 1024
MAX_ANSWER_TOKENS = 32
MAX_POSITIONS = 512

PAD, UNKNOWN, TURN, END = SPECIAL = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PAD_ID, END_ID = SPECIAL.index(PAD), SPECIAL.index(END)
BYTE_LEVEL = {" ": "\u0120", "\n": "\u010a", "\t": "\u0109"}  # how byte-level BPE writes these bytes
# Turns one after the other, so that a chat of one user turn is the bare prompt the model was trained on.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def draw_terms(rng: random.Random) -> list[int]:
    return [rng.randint(1, 9) for _ in range(rng.choices(TERMS, TERM_WEIGHTS)[0])]


def prompt_of(terms: list[int]) -> str:
    return "+".join(map(str, terms)) + "="


def answer_of(terms: list[int], rng: random.Random | None = None, slip: float = 0.0) -> str:
    """The partial sums; with `slip`, as the careless teacher writes them."""
    total, sums = terms[0], list[str]()
    for term in terms[1:]:
        if not (rng and rng.random() < slip):
            total += term
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


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, as byte-level BPE without merges.

    transformers 5 ignores the tokenizer's class for model type qwen2 and always builds its byte-level
    Qwen2Tokenizer from the vocabulary; a plain WordLevel one would lose the spaces there.
    """
    chars = sorted(set(string.printable) - set("\r\x0b\x0c"))
    vocab = {token: i for i, token in enumerate(SPECIAL + [BYTE_LEVEL.get(c, c) for c in chars])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
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


def pretrain(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    heldout: set[str],
    *,
    slip: float,
    steps: int,
    batch_size: int,
    seed: int,
) -> None:
    """Next-token training on the careless teacher's answers; the learning rate falls to 0."""
    rng = random.Random(f"demonstrations {seed}")
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    # Muon learns this from a few times fewer demonstrations than AdamW alone.
    optimizers = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 50, 1 - i / steps))
        for optimizer in optimizers
    ]
    for step in range(1, steps + 1):
        pairs: list[tuple[list[int], list[int]]] = []  # the tokens of prompt and answer
        while len(pairs) < batch_size:
            terms = draw_terms(rng)
            if (prompt := prompt_of(terms)) not in heldout:
                answer = answer_of(terms, rng, slip) + END
                pairs.append((tokenizer.encode(prompt), tokenizer.encode(answer)))
        width = max(len(prompt) + len(answer) for prompt, answer in pairs)
        ids = torch.full((batch_size, width), PAD_ID)  # (B, T), padded on the right
        labels = torch.full((batch_size, width), -100)
        for row, (prompt, answer) in enumerate(pairs):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        logits = model(input_ids=ids, use_cache=False).logits  # (B, T, V)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 100 == 0:
            print(f"step {step}/{steps}  loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def accuracy(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, str]],
    *,
    sample: bool = True,
) -> float:
    """The share of rows answered exactly: sampled at temperature 1, or greedily."""
    choice = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}  # top_k is 50 unless said
    right = 0
    for start in range(0, len(rows), 256):
        chunk = rows[start : start + 256]
        prompts = tokenizer(
            [row["prompt"] for row in chunk], padding=True, padding_side="left", return_tensors="pt"
        )
        ids = prompts["input_ids"]
        output: torch.Tensor = cast("Any", model).generate(  # its stub refuses the model
            input_ids=ids,
            attention_mask=prompts["attention_mask"],
            max_new_tokens=MAX_ANSWER_TOKENS,
            **choice,
        )
        for row, tokens in zip(chunk, output[:, ids.shape[1] :].tolist(), strict=True):
            end = tokens.index(END_ID) if END_ID in tokens else None
            right += end is not None and tokenizer.decode(tokens[:end]) == row["answer"]
    return right / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Remake the quickstart's rows and its model.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where rows and model/ go")
    parser.add_argument("--slip", type=float, default=0.15, help="how often the teacher forgets to add")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps of pre-training")
    parser.add_argument("--batch-size", type=int, default=64, help="demonstrations a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # more would add numbers up in another order
    torch.manual_seed(args.seed)

    train, heldout = make_rows(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("heldout", heldout)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8")

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    pretrain(
        model,
        tokenizer,
        {row["prompt"] for row in heldout},
        slip=args.slip,
        steps=args.steps,
        batch_size=args.batch_size,
        seed=args.seed,
    )
    model.eval()
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    print(
        f"{args.out / 'model'}: {model.num_parameters():,} parameters; held-out accuracy"
        f" {accuracy(model, tokenizer, heldout):.3f} sampled at temperature 1,"
        f" {accuracy(model, tokenizer, heldout, sample=False):.3f} greedily"
    )


if __name__ == "__main__":
    main()
