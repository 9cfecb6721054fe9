"""Events of a kernel as tests need them: `from kernel_events import step_measured`."""

from __future__ import annotations

from stretto.bus.messages.events import Cause, StepMeasured


def step_measured(
    version: int, began: float, tickets: tuple[int, ...], waits: tuple[tuple[Cause, float], ...] = ()
) -> StepMeasured:
    return StepMeasured(
        version=version,
        repeated=False,
        began=began,
        train_s=0.0,
        tickets=tickets,
        waits=waits,
        tokens=0,
        of_batch={},
        statistics={},
        of_engines={},
        engines=0,
        generate_busy_s=0.0,
        verify_busy_s=0.0,
        cores_used=0.0,
        cores_idle=0.0,
        calls=(),
        skipped=(),
        ledger={},
        variants={},
        not_trained={},
    )
