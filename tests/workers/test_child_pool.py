"""Children of a verifier worker: real processes that are killed, that lie, and that leave others behind."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import pytest

from bus_testing import until
from patience import SOON_S, patience
from processes import sleepers
from stretto.user_code import environment
from stretto.user_code.environment import Question, Reaction
from stretto.user_code.guard import guarded
from stretto.user_code.protocol import Started
from stretto.user_code.sandbox import kill
from stretto.workers.scoring import child_pool
from stretto.workers.scoring.child_pool import ChildEnded, ChildPool, Program


@asynccontextmanager
async def open_pool(folder: Path, body: str, **options: Any) -> AsyncGenerator[ChildPool]:
    """Children that run the function `environment` of a file with this body."""
    (folder / "mine.py").write_text(body)
    setup = environment.setup_frame(f"{folder}/mine.py:environment")
    pool = ChildPool(Program("the process", guarded(environment.COMMAND), setup, **options), 1)
    try:
        async with anyio.create_task_group() as tasks:
            await pool.open(tasks)
            yield pool
            tasks.cancel_scope.cancel()
    finally:
        await pool.close()


async def ask(pool: ChildPool, completion: str, timeout_s: float | None = None) -> str:
    question = Question(msgspec.msgpack.encode({"completion": completion, "state": {}}))
    reaction = await pool.ask(question, Reaction, timeout_s or patience())
    return reaction.fault.error if reaction.fault else str(reaction.feedback.messages[0])


@pytest.mark.parametrize("state", ["{'seen': [(1, 2)]}", "{'seen': {1}}", "{'seen': Counter('a')}"])
async def test_a_state_that_would_come_back_changed_is_refused(state: str, tmp_path: Path) -> None:
    body = f"""from collections import Counter
def environment(completion, state):
    state.update({state} if completion == "changed" else dict(x=float("nan"), y=[1, None, b"z"]))
    return "kept"
"""
    async with open_pool(tmp_path, body) as pool:
        assert await ask(pool, "plain") == "kept"
        assert "must be plain data: the next call would receive {'seen': " in await ask(pool, "changed")


# ------------------------------------------------------------------------------------------ frames

LIAR = """
import os, stat, struct
import msgspec
from stretto.user_code.environment import Reaction
from stretto.environment import Feedback

def write(frame):
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISFIFO(os.fstat(fd).st_mode):
            try:
                os.write(fd, frame)
            except OSError:
                pass  # the end for reading

def environment(completion):
    forged = msgspec.msgpack.encode(Reaction(Feedback(messages=("forged",))))
    if completion == "extra":
        with open(__file__ + ".asked", "a") as file:
            file.write("x")
        write(b"".join(struct.pack(">IQ", len(forged), n) + forged for n in range(3)))
    return f"own {completion}"
"""


async def test_an_extra_frame_answers_no_question(tmp_path: Path) -> None:
    """An earlier question may have left it behind, so this one gets a second attempt."""
    async with open_pool(tmp_path, LIAR) as pool:
        assert await ask(pool, "first") == "own first"
        with pytest.raises(ChildEnded, match="it wrote an answer to another question"):
            await ask(pool, "extra")
        assert (tmp_path / "mine.py.asked").read_text() == "xx"
        for word in ("second", "third"):
            assert await ask(pool, word) == f"own {word}"


async def test_a_frame_that_announces_too_much_is_refused_at_its_head(tmp_path: Path) -> None:
    async with open_pool(tmp_path, LIAR, max_answer=1000) as pool:
        assert await ask(pool, "fine") == "own fine"
        long = "y" * 2000
        with pytest.raises(
            ChildEnded, match=r"announced an answer of 20\d\d bytes; at most 1000 are allowed"
        ):
            await ask(pool, long)
        assert await ask(pool, "fine again") == "own fine again"


# ------------------------------------------------------------------------------------------- losses

MORTAL = """
import os, signal, sys
from pathlib import Path

def environment(completion):
    asked = Path(__file__).with_name(completion)
    with asked.open("a") as file:
        file.write("x")
    if completion == "kills" or completion == "killed once" and asked.stat().st_size == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "leaves":
        os._exit(3)
    return str(os.getpid())
"""


async def test_a_question_of_a_killed_child_is_asked_once_more(tmp_path: Path) -> None:
    async with open_pool(tmp_path, MORTAL) as pool:
        await ask(pool, "killed once")
        assert (tmp_path / "killed once").read_text() == "xx"
        with pytest.raises(ChildEnded, match="killed by signal 9"):
            await ask(pool, "kills")
        assert (tmp_path / "kills").read_text() == "xx"
        with pytest.raises(ChildEnded, match="exit status 3"):
            await ask(pool, "leaves")
        assert (tmp_path / "leaves").read_text() == "x"  # its own doing: not tried again
        await ask(pool, "lives")


async def test_a_question_with_effects_is_never_asked_again(tmp_path: Path) -> None:
    later = "import threading\n" + MORTAL.replace(
        "    return",
        "    threading.Timer(0.1, os._exit, (0,)).start() if completion == 'later' else None\n    return",
    )
    async with open_pool(tmp_path, later, repeats=False) as pool:
        with pytest.raises(ChildEnded, match="killed by signal 9"):
            await ask(pool, "killed once")
        assert (tmp_path / "killed once").read_text() == "x"
        first = psutil.Process(int(await ask(pool, "later")))
        await until(lambda: not first.is_running())
        await anyio.sleep(SOON_S)  # its guard ends with it
        await ask(pool, "lives")
        assert (tmp_path / "lives").read_text() == "x"


async def test_after_a_loss_a_spare_waits_and_takes_the_next_place(tmp_path: Path) -> None:
    def children() -> set[int]:
        """Processes that run the program, below their guards."""
        mine = psutil.Process().children(recursive=True)
        return {each.pid for each in mine if each.parent() != psutil.Process() and each.is_running()}

    async with open_pool(tmp_path, MORTAL) as pool:
        first = int(await ask(pool, "lives"))
        assert children() == {first}
        os.kill(first, signal.SIGKILL)
        second = int(await ask(pool, "lives"))
        both = await until(lambda: found if len(found := children() - {first}) == 2 else set[int]())
        [spare] = both - {second}
        os.kill(second, signal.SIGKILL)
        assert int(await ask(pool, "lives")) == spare
        # A spare that is killed is passed over.
        both = await until(lambda: found if len(found := children() - {first, second}) == 2 else set[int]())
        for pid in both:
            os.kill(pid, signal.SIGKILL)
        assert int(await ask(pool, "lives")) not in both


async def test_a_reason_that_utf_8_cannot_encode_is_not_lost(tmp_path: Path) -> None:
    body = "def environment(completion):\n    raise ValueError('oh \\ud800')"
    async with open_pool(tmp_path, body) as pool:
        assert "environment raised ValueError: oh \\ud800 (" in await ask(pool, "x")


async def test_killing_a_process_that_has_just_ended_does_not_take_its_status(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_collect = threading.Event()
    # asyncio of Python 3.11 collects the status in a thread; later versions collect it in the event loop.
    if sys.version_info < (3, 12):
        collect = asyncio.ThreadedChildWatcher._do_waitpid  # pyright: ignore

        def collect_late(*arguments: Any) -> None:
            may_collect.wait()
            collect(*arguments)

        monkeypatch.setattr(asyncio.ThreadedChildWatcher, "_do_waitpid", collect_late)
    its_stdin, ours = os.pipe()
    process = await anyio.open_process(["sh", "-c", "read line; exit 3"], stdin=its_stdin)
    os.close(its_stdin)
    os.close(ours)  # it ends now
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(SOON_S)  # not in the event loop, which must not collect the status
    kill(process)
    may_collect.set()
    assert await process.wait() == 3
    await process.aclose()
    assert "Unknown child process" not in caplog.text


# ------------------------------------------------------------------------- what children leave behind

PARENT = """
import subprocess, time

def environment(completion):
    mark = completion.partition(" ")[2]
    subprocess.Popen(["sleep", mark], start_new_session=True)  # a child of a session of its own
    subprocess.Popen(["sh", "-c", f"setsid sh -c 'sleep {mark} & sleep {mark}' &"])  # an orphan too
    if completion.startswith("hang"):
        time.sleep(1000)
    return "left"
"""


@pytest.mark.parametrize("end", ["killed", "out of time", "closed"])
async def test_nothing_that_a_child_started_outlives_it(tmp_path: Path, end: str) -> None:
    mark = f"1000.{os.getpid()}3"
    before = set(psutil.Process().children())  # such as processes of tests that ran here earlier
    async with open_pool(tmp_path, PARENT) as pool:
        if end == "out of time":
            async with anyio.create_task_group() as tasks:

                async def hang() -> None:
                    with pytest.raises(TimeoutError):
                        await ask(pool, f"hang {mark}", timeout_s=patience(3))

                tasks.start_soon(hang)
                await until(lambda: len(sleepers(mark)) == 3)
        else:
            await ask(pool, f"leave {mark}")
            await until(lambda: len(sleepers(mark)) == 3)
        if end == "killed":
            [guard] = set(psutil.Process().children()) - before
            guard.children()[0].kill()
        if end != "closed":
            await until(lambda: not sleepers(mark))
    await until(lambda: not sleepers(mark))


WORKER = """
import subprocess, sys, time
from stretto.user_code.guard import guarded
subprocess.Popen(guarded(["sh", "-c", "setsid sleep {mark} & sleep {mark}"]))
time.sleep(1000)
"""


async def test_nothing_outlives_a_worker_that_is_killed() -> None:
    mark = f"1000.{os.getpid()}4"
    worker = subprocess.Popen([sys.executable, "-c", WORKER.format(mark=mark)])
    await until(lambda: len(sleepers(mark)) == 2)
    worker.kill()
    worker.wait()
    await until(lambda: not sleepers(mark))


async def test_what_outlives_its_child_ends_with_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_pool, "_END_S", patience(20))
    # As in bubblewrap that is killed while it starts. `cat` answers with the question: it is ready at once.
    mark = f"0.2{os.getpid()}"
    argv = ["sh", "-c", f"exec 3<&0; (sleep {mark}; cat <&3; sleep {mark}) & exec cat"]
    pool = ChildPool(Program("the process", argv, msgspec.msgpack.encode(Started())), 1)
    async with anyio.create_task_group() as tasks:
        await pool.open(tasks)
    await until(lambda: sleepers(mark))
    began = time.monotonic()
    await pool.close()
    assert time.monotonic() - began < patience(15)  # its pipes are closed: it did not wait to the end
    await until(lambda: not sleepers(mark))
