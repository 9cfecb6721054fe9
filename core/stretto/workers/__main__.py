"""`python -m stretto.workers BOOTSTRAP`: run one worker process. Launchers start this command.

It is not a command of `stretto`, whose command line takes a tenth of a second to import.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stretto.workers.worker import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m stretto.workers", description="Run one worker process.")
    parser.add_argument("bootstrap", type=Path, help="file with the bus address, credentials and id")
    sys.exit(main(parser.parse_args().bootstrap))
