"""Tokens per second of conversations with a slow tool: a fixed number of them, and one that follows the
prefix cache of the engine.

    python benchmarks/conversations.py [--rounds 1] [--rows 128] [--kinds KIND ...] [KEY=VALUE ...]

Evaluates a random model of 10 M parameters through the command line. A conversation has a prompt of 192
tokens and 8 turns: an answer of 24 tokens, and 72 that a tool gives after 0.3 s. With `small` the torch
engine's cache holds a quarter of 64 such conversations, with `full` all. `single` has one answer of 192
tokens to each prompt, and the small cache. Each is run with `rollout.concurrency: 64` and with
`{min: 4, max: 64}`, in turn. The figures are the sampled tokens divided by the wall time of the evaluation;
medians over the rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from stretto.records.run_folder import RunFolder
from whole_runs import QUICKSTART

TURNS, PROMPT, ANSWER, TOOL = 8, 192, 24, 72
CONVERSATIONS = 64
LENGTH = PROMPT + TURNS * (ANSWER + TOOL)
LAYERS = 6
SIZES = {"hidden_size": 320, "intermediate_size": 1280, "num_hidden_layers": LAYERS}
HEADS = {"num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 1024}
FULL_GB = CONVERSATIONS * LENGTH * 2 * LAYERS * 320 * 4 / 2**30
ENVIRONMENT = f"""\
import random, time

def tool(turn):
    time.sleep(0.3)
    return {{"feedback": "".join(random.choices("0123456789", k={TOOL})), "reward": 0.0}}
"""
KINDS = {
    "small": (f"inference.cache_gb={FULL_GB / 4}", f"sampling.max_tokens={ANSWER}"),
    "full": (f"inference.cache_gb={FULL_GB}", f"sampling.max_tokens={ANSWER}"),
    "single": (
        *(f"inference.cache_gb={FULL_GB / 4}", f"sampling.max_tokens={TURNS * ANSWER}"),
        "workflow.max_turns=1",
    ),
}
FORMS = {"fixed": "64", "follows": "{min: 4, max: 64}"}


def prepare(folder: Path, rows: int) -> None:
    """Write the model, the rows and the environment."""
    shutil.copytree(QUICKSTART.parent / "model", folder / "model")
    config = AutoConfig.from_pretrained(
        folder / "model", **SIZES, **HEADS, layer_types=["full_attention"] * LAYERS
    )
    set_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    lines = ({"prompt": "".join(draw.choices("0123456789", k=PROMPT))} for _ in range(rows))
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "environment.py").write_text(ENVIRONMENT)


def tokens_per_s(folder: Path, out: Path, *overrides: str) -> float:
    """Evaluate all rows, and return the sampled tokens per second of wall time."""
    command = [sys.executable, "-m", "stretto", "evaluate", str(folder / "model"), "--n", "1"]
    command += ["--dataset", str(folder / "rows.jsonl"), "--temperature", "1", "--out", str(out)]
    command += ["workflow.use=multi_turn", f"workflow.environment={folder}/environment.py:tool"]
    command += [f"workflow.max_turns={TURNS}", "sampling.ignore_eos=true", "verifier.children=8"]
    command += [f"inference.slots={CONVERSATIONS}", f"inference.context_length={LENGTH}", *overrides]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    (span,) = RunFolder(out).history.evaluations
    answers = [json.loads(line) for line in next(out.glob("answers/*.jsonl")).read_bytes().splitlines()]
    return sum(answer["tokens"] for answer in answers) / (span.ended - span.began)


def main() -> None:
    """Measure, and print a table and the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS])
    parser.add_argument("overrides", nargs="*")
    chosen = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {kind: {form: [] for form in FORMS} for kind in chosen.kinds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, chosen.rows)
        for number in range(chosen.rounds):
            for kind in chosen.kinds:
                for form, concurrency in FORMS.items():
                    out = folder / f"{kind}-{form}-{number}"
                    given = (f"rollout.concurrency={concurrency}", *KINDS[kind], *chosen.overrides)
                    found[kind][form].append(tokens_per_s(folder, out, *given))
                    print(f"{kind}, {form}: {found[kind][form][-1]:.1f} tokens/s", file=sys.stderr)
    result: dict[str, Any] = {}
    print(f"{'':8}  fixed  follows  ratio   (tokens per second)")
    for kind, forms in found.items():
        fixed, follows = (statistics.median(forms[form]) for form in FORMS)
        result[kind] = {"fixed": fixed, "follows": follows, "ratio": follows / fixed}
        print(f"{kind:8} {fixed:6.0f} {follows:8.0f} {follows / fixed:6.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
