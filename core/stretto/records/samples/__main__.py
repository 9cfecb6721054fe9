"""`python -m stretto.records.samples RUN LAST STALENESS ANSWERS`: the command of a run's sample writer."""

import sys
from pathlib import Path

from stretto.records.samples.writer import Keeping, main

if __name__ == "__main__":
    last, staleness, answers = map(int, sys.argv[2:])
    sys.exit(main(Path(sys.argv[1]), Keeping(last, staleness, bool(answers))))
