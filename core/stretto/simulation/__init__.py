"""A simulated world: the kernel and the workers of a run in one process, on virtual time, with faults.

A universe is a `Tape`: a seed, a run file, and faults. The same tape always gives the same `Outcome`, because
time, network, threads, processes and randomness are simulated. Kernel, workers, bus and nats-py are those of
production; engines are `mock`.

```
for tape, outcome in search(tapes_of(Path("run.yaml"), range(1000)), jobs=2):
    if outcome.failed:
        fewest, outcome = shrink(tape)
        print("\\n".join(describe(fewest, outcome)))
```

`stretto simulate` does this. Read `universe.py`, `faults.py` and `loop.py` first.
"""

from stretto.simulation.faults import KINDS, POINTS, Fault, Tape
from stretto.simulation.forecast import Forecast, ServiceTimes, composed, forecast
from stretto.simulation.search import CalmRunFails, describe, run_tape, search, shrink, steps_within, tapes_of
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
    "steps_within",
    "tapes_of",
]
