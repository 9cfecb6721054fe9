"""`python -m stretto.workers BOOTSTRAP [--bus URL]`: run one worker process. Launchers start this command.

With `-`, the text of the bootstrap file comes on standard input: a launcher that starts processes on other
machines sends it this way, so that the secrets are in no file and no environment there.

It is not a command of `stretto`, whose command line takes a tenth of a second to import.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from stretto.bus.server import Bootstrap
from stretto.workers.worker import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m stretto.workers", description="Run one worker process.")
    parser.add_argument(
        "bootstrap", help="file with the bus address, credentials and id; - to read its text from stdin"
    )
    parser.add_argument("--bus", default="", metavar="URL", help="address of nats-server as seen from here")
    given = parser.parse_args()
    if given.bootstrap == "-":
        bootstrap = Bootstrap.decode(sys.stdin.buffer.read(), "the text on standard input")
    else:
        bootstrap = Bootstrap.read(Path(given.bootstrap))
    sys.exit(main(msgspec.structs.replace(bootstrap, url=given.bus or bootstrap.url)))
