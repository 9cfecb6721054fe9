"""Text of models, rewards and agents is shown in the terminal as plain text."""

import os
import pty
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import msgspec
import pytest
import structlog

from bus_testing import until
from kernel_setup import make_setup
from stretto.assembly.logs import log_to
from stretto.bus.messages.tickets import GroupFailed
from stretto.errors import printable
from stretto.kernel.ending import Ending
from stretto.kernel.schedule.commands import Issue
from stretto.kernel.schedule.outcomes import admit
from stretto.kernel.setup import RunSetup
from stretto.observe.observers import Observers
from stretto.observe.view import View, final_lines
from stretto.user_code.reward import Task, try_to_score

SAID = "no [/INST] \x1b]0;x\x07 \x9b2J [link=file:///etc] :smile: \ud800"
SHOWN = "no [/INST] \\x1b]0;x\\x07 \\x9b2J [link=file:///etc] :smile: \\ud800"


def set_up(tmp_path: Path) -> RunSetup:
    """A run whose reward always raises."""
    (tmp_path / "mine.py").write_text(f"def score(prompt, completion):\n    raise ValueError({SAID!r})\n")
    reward = {"use": "function", "function": f"{tmp_path}/mine.py:score"}
    queue = {"batch_size": 2, "max_failures": 3, "max_attempts": 1}
    return make_setup(tmp_path, reward=reward, queue=queue, steps=2)


@contextmanager
def terminal_as_stderr(monkeypatch: pytest.MonkeyPatch) -> Generator[int]:
    """Make standard error a terminal in the block, and yield the file descriptor that reads what it shows.
    Not a fixture: pytest sets standard error again after the fixtures."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    parent, child = pty.openpty()
    os.set_blocking(parent, False)
    with os.fdopen(child, "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        yield parent
    os.close(parent)


def reason_of_reward(setup: RunSetup) -> str:
    """What a scoring process answers when the reward raises."""
    task = Task(msgspec.msgpack.encode({"prompt": "1+1="}), ("2",), msgspec.msgpack.encode({}))
    document = msgspec.to_builtins(setup.config)
    _, [scored] = try_to_score(document, setup.assembly.context, [task], 60)
    assert scored.fault is not None
    return scored.fault.error


async def test_what_a_reward_raises_is_plain_text_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with terminal_as_stderr(monkeypatch) as terminal:
        shown = await show_failures(set_up(tmp_path), terminal)
    for text in (
        f"2 x failed: reward raised ValueError: {SHOWN} (",
        f"now  {SHOWN}",
        f"s: {SHOWN}",  # after the duration, in s or ms
        SHOWN.replace("\\", "\\\\"),  # in the log, in quotes
        "\\x1b[2J",
    ):
        assert text in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)  # without colours
    for control in ("\x1b]0;x", "\x07", "\x9b", "\x1b[2J", "\U0001f604"):
        assert control not in shown


async def show_failures(setup: RunSetup, terminal: int) -> str:
    """Let tickets fail by the reward; return what the view, the log and the final lines show."""
    scheduler, observers = setup.scheduler, Observers(setup)
    view = View(observers.status.status)
    scheduler.start()
    reason = reason_of_reward(setup)
    assert reason.startswith(f"reward raised ValueError: {SHOWN} (")
    tickets = [command.ticket for command in scheduler.commands() if isinstance(command, Issue)]
    for ticket in tickets[:2]:
        outcome = admit(GroupFailed("train", ticket.id, 1, "rollout-0", reason), 1, samples=True)
        assert isinstance(outcome, GroupFailed)
        scheduler.group_failed(outcome)
    setup.facts.note = SAID
    shown = ""

    def shows(*words: str) -> bool:
        nonlocal shown
        with suppress(BlockingIOError):
            shown += os.read(terminal, 1 << 16).decode(errors="replace")
        return all(word in shown for word in words)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(view.run)
        await until(lambda: shows("main cause", "now"))
        view.stop()
        tasks.cancel_scope.cancel()
    log_to(None, console=True, run="test", role="kernel")
    structlog.get_logger().warning("ticket failed", reason=SAID, agent="\x1b[2J")
    ending = Ending()
    ending.end("failed", SAID)
    summary = observers.report.finish(ending.status, ending.reason)
    print(final_lines(summary, setup.folder), file=sys.stderr)
    await until(lambda: shows("see "))
    return shown


def test_printable_text_keeps_lines_and_every_script() -> None:
    text = "Zeile 1\n\tתשובה 答案 ✓ é 👩‍🔬"
    assert printable(text) == text
    assert printable("\r\x00\x7f\x85\u2028\u202e\udfff") == "\\r\\x00\\x7f\\x85\\u2028\\u202e\\udfff"
