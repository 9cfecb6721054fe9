"""Run a command on a slow machine: `python .ci/slowly.py COMMAND...`, as `make test-slowly` does.

Beside the command run as many busy loops as make the piece of work of `patience` take three times as long as
on a good machine; none, if it takes so long without them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from patience import GOOD_MACHINE_S, measured_s

SLOWER = 3.0
MOST = 32


def main() -> int:
    """Run the command; its exit status."""
    loops: list[subprocess.Popen[bytes]] = []
    try:
        while (slower := measured_s() / GOOD_MACHINE_S) < SLOWER and len(loops) < MOST:
            loops.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        print(
            f"{len(loops)} busy loops; work takes {slower:.1f} times as long as on a good machine", flush=True
        )
        return subprocess.run(sys.argv[1:]).returncode
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main())
