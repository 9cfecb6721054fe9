"""Search the universes of `universes.py` for failures: `python universe_search.py SIZE FIRST NUMBER`.

Each failing seed is shrunk, written to `build/universes`, and described. The search continues after it.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from stretto.simulation import describe, search, shrink
from universes import large, small

FOLDER = Path(__file__).parents[2] / "build" / "universes"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("size", choices=["small", "large"])
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("number", type=int, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=2, help="universes at the same time")
    parser.add_argument(
        "--record", type=Path, help="note the seeds that pass, and leave out those noted before"
    )
    chosen = parser.parse_args()
    make = {"small": small, "large": large}[chosen.size]
    FOLDER.mkdir(parents=True, exist_ok=True)
    seeds = range(chosen.first, chosen.first + chosen.number)
    number, failures, events, cpu_s = 0, 0, 0, 0.0
    for tape, outcome in search(map(make, seeds), chosen.jobs, chosen.record):
        number, events, cpu_s = number + 1, events + outcome.callbacks, cpu_s + outcome.cpu_s
        if outcome.failed:
            failures += 1
            fewest, outcome = shrink(tape)
            kept = FOLDER / f"{chosen.size}-{tape.seed}.json"
            kept.write_bytes(msgspec.json.format(msgspec.json.encode(fewest), indent=2))
            print(*describe(fewest, outcome, last=60), f"to repeat it: {kept}", sep="\n", flush=True)
    print(
        f"{number} {chosen.size} universes from seed {chosen.first} on: {failures} failed, "
        f"{events:,} events, {cpu_s / max(1, number):.2f} processor seconds each"
    )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
