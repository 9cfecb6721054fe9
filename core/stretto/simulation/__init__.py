"""A simulated world: the kernel and the workers of a run in one process, on virtual time, with faults.

A universe is a `Tape`: a seed, a run file, and faults. It gives the same `Outcome` whenever it runs, because
time, network, threads, processes and randomness are simulated. Kernel, workers, bus and nats-py are those of
production; engines are `mock`.

```
for tape, outcome in search(tapes_of(Path("run.yaml"), range(1000)), jobs=2):
    if outcome.failed:
        fewest, outcome = shrink(tape)
        print("\\n".join(describe(fewest, outcome)))
```

`stretto simulate` does that. Files:

```
run_file.py   the run file of a universe
universe.py   one universe: its kernels in turn, and its outcome
faults.py     what goes wrong, as data
oracles.py    what must hold whatever goes wrong
folds.py      the state of each scheduler is the fold of the events in the store
search.py     many universes, and the fewest faults with which one fails
loop.py       the event loop: virtual time, processes, and the order that a seed draws
processes.py  workers as processes of the loop, and what they use of their machine
patches.py    what takes the place of time, threads, randomness and signals
files.py      what goes wrong with files
transport.py  what takes the place of nats-py's connection
server.py     a nats-server in memory, and its faults
streams.py    its JetStream
host.py       the processor cores that processes share
forecast.py   how fast a run will be: a universe without faults, with measured service times
plugin.py     the launcher `simulated`
```
"""

from __future__ import annotations

from stretto.simulation.faults import KINDS, POINTS, Fault, Tape
from stretto.simulation.forecast import Forecast, ServiceTimes, composed, forecast
from stretto.simulation.search import CalmRunFails, describe, run_tape, search, shrink, tapes_of
from stretto.simulation.universe import Outcome

__all__ = [
    "KINDS",
    "POINTS",
    "CalmRunFails",
    "Fault",
    "Forecast",
    "Outcome",
    "ServiceTimes",
    "Tape",
    "composed",
    "describe",
    "forecast",
    "run_tape",
    "search",
    "shrink",
    "tapes_of",
]
