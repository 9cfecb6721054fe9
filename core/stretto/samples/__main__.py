"""`python -m stretto.samples RUN LAST STALENESS`: the command of a run's sample writer."""

from __future__ import annotations

import sys
from pathlib import Path

from stretto.samples.writer import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), last=int(sys.argv[2]), staleness=int(sys.argv[3])))
