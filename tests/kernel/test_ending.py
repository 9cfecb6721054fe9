"""Signals that end a run, which may have several kernels in one process."""

import os
import signal

import anyio
import pytest

from stretto.kernel.ending import Ending, Interruptions


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def live(interruptions: Interruptions, ending: Ending, *, interrupted: bool) -> Ending:
    """Be a kernel, which may get a signal."""

    async def run() -> None:
        interruptions.hold()
        with interruptions.obeyed_by(ending):
            if interrupted:
                interrupt()
            await anyio.wait_all_tasks_blocked()

    anyio.run(run)
    return ending


def test_the_first_signal_drains_the_run_and_the_second_one_ends_it() -> None:
    with Interruptions() as interruptions:
        ending = live(interruptions, Ending(), interrupted=True)
        assert (ending.drain_status, ending.drain_reason) == ("interrupted", "SIGTERM")
        assert (ending.status, ending.forced) == ("running", False)
        live(interruptions, ending, interrupted=True)
        assert (ending.status, ending.reason, ending.forced) == ("interrupted", "SIGTERM, twice", True)


def test_a_signal_while_a_kernel_dismisses_its_workers_for_the_next_one_ends_the_run() -> None:
    ending = Ending()
    ending.end("repeated", "")
    with Interruptions() as interruptions:
        live(interruptions, ending, interrupted=True)
    assert (ending.status, ending.reason) == ("interrupted", "SIGTERM")


def test_a_signal_between_two_kernels_drains_the_second_one() -> None:
    with Interruptions() as interruptions:
        live(interruptions, Ending(), interrupted=False)
        interrupt()
        assert live(interruptions, Ending(), interrupted=False).drain_status == "interrupted"


def test_a_second_signal_between_two_kernels_does_what_it_did_before_the_run() -> None:
    def end(number: int, frame: object) -> None:
        raise SystemExit(130)

    former = signal.signal(signal.SIGTERM, end)
    try:
        with Interruptions() as interruptions:
            live(interruptions, Ending(), interrupted=False)
            interrupt()
            with pytest.raises(SystemExit, match="130"):
                interrupt()
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, former)
