"""`python -m stretto.workers BOOTSTRAP [--bus URL]`: run one worker process. Launchers start this command.

With `-`, the text of the bootstrap file comes on standard input: a launcher that starts processes on other
machines sends it this way, so that the secrets are in no file and no environment there.

It is not a command of `stretto`, whose command line takes a tenth of a second to import. `stretto worker`
starts it for a worker that a user adds by hand, with options of its own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stretto.bus.server import Bootstrap
from stretto.workers.worker import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m stretto.workers", description="Run one worker process.")
    parser.add_argument(
        "bootstrap", help="file with the bus address, credentials and id; - to read its text from stdin"
    )
    parser.add_argument("--by-hand", action="store_true", help="a user has started it, perhaps elsewhere")
    parser.add_argument("--bus", help="address of nats-server as it is reached from here")
    parser.add_argument("--credentials", help="file with a login for a server of the user's own")
    options = parser.parse_args()
    if options.bootstrap == "-":
        bootstrap = Bootstrap.decode(sys.stdin.buffer.read(), "the text on standard input")
    else:
        bootstrap = Bootstrap.read(Path(options.bootstrap))
    sys.exit(main(bootstrap.reached(options.bus, options.credentials), by_hand=options.by_hand))
