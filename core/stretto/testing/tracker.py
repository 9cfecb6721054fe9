"""The contract of trackers as tests."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from stretto.component import Kind
from stretto.machine.child_process import run_child
from stretto.testing.component import ComponentConformance, ComponentUnderTest
from stretto.tracker import Sent

__all__ = ["TrackerConformance"]

_Call = tuple[str, Any]
"""Name of a method, and its argument."""


def _step(number: int, **more: Any) -> _Call:
    figures = {"reward": number / 8, "loss": None, "ledger": {"trained": 4 * number}, "advice": [], **more}
    return "step", {"step": number, "time": 1.7e9 + number, "time_s": 1.5 * number, **figures}


def _evaluation(version: int) -> _Call:
    figures = {"evaluation/accuracy": version / 8, "evaluation/samples": 10, "evaluation/failed": 0}
    return "evaluation", {"step": version, "time": 1.7e9 + version, "time_s": 1.0, **figures}


def _samples(purpose: str, step: int) -> _Call:
    text = "=1+1 <script>alert(1)</script> [x](javascript:alert(1))\n</code>\n½ 🙂"
    facts = {"purpose": purpose, "step": step, "staleness": 1, "finish": "stop", "length": 7}
    texts = {"prompt_text": "1+1=", "text": text}
    rewards = ((0.0, {}), (1.0, {"accuracy": 1.0, "turns": 2.0}))
    rows = [
        {"id": f"{step}/1/{index}", "reward": reward, "metrics": metrics, **facts, **texts}
        for index, (reward, metrics) in enumerate(rewards)
    ]
    return "samples", rows


def _advice(until: int | None) -> _Call:
    facts = {"rule": "collapse", "since": 2, "said": 3, "until": until, "message": "the reward fell"}
    return "advice", {**facts, "key": "training.lr", "evidence": {}}


_SUMMARY: _Call = ("finish", {"status": "completed", "reason": "", "version": 4, "wall_s": 9.0})
_BEGIN = [_evaluation(0), _step(1), _step(2, entropy=0.5), _advice(None), _evaluation(2)]
_END = [_step(3), _advice(3), _samples("train", 2), _samples("eval", 2), _step(4), _evaluation(4)]


class TrackerConformance(ComponentConformance):
    """The contract of `stretto.tracker.Tracker`: it accepts a whole run, continues in another process, and
    accepts again what it got before a kill. The tests run real processes."""

    kind: ClassVar[Kind] = "tracker"
    start_s: ClassVar[float] = 60.0
    """Maximum duration of one process of the tracker, in seconds."""

    def test_it_takes_a_whole_run_and_writes_in_its_own_folder_only(
        self, under_test: ComponentUnderTest, tmp_path: Path
    ) -> None:
        """The run has steps with new figures and None, evaluations, advice, samples, and an end."""
        sent = self._live(under_test, tmp_path, None, [*_BEGIN, *_END, _SUMMARY])
        assert sent in (None, Sent()), f"`start` returned {sent} before anything was sent"
        own_folder = tmp_path / "run" / "trackers" / under_test.config.folder_name
        foreign = [
            str(file.relative_to(tmp_path))
            for file in tmp_path.rglob("*")
            if not own_folder.is_relative_to(file) and not file.is_relative_to(own_folder)
        ]
        assert not foreign, f"it wrote {foreign[0]}, outside of its folder in `trackers`"

    def test_what_comes_again_after_a_kill_is_harmless(
        self, under_test: ComponentUnderTest, tmp_path: Path
    ) -> None:
        """The process was killed after it got calls and before they were noted."""
        self._live(under_test, tmp_path, None, [*_BEGIN, _samples("train", 2)], killed=True)
        noted = Sent(step=1, evaluation=0)
        sent = self._live(under_test, tmp_path, noted, [*_BEGIN[2:], *_END, _SUMMARY])
        assert sent is None or (sent.step <= 2 and sent.evaluation <= 2), (
            f"`start` returned {sent}, but it has got steps up to 2 and evaluations up to 2 only"
        )

    def test_a_resumed_run_goes_on_after_its_end(
        self, under_test: ComponentUnderTest, tmp_path: Path
    ) -> None:
        """Another process gets the later steps and another end of the run."""
        self._live(under_test, tmp_path, None, [*_BEGIN, *_END, _SUMMARY])
        noted = Sent(step=4, evaluation=4, samples=2, evaluation_samples=2)
        more = [_step(5), _step(6), _evaluation(6), _samples("train", 6), _SUMMARY]
        sent = self._live(under_test, tmp_path, noted, more)
        assert sent is None or sent.step <= 4, f"`start` returned {sent}, but it has got steps up to 4 only"

    def _live(
        self,
        under_test: ComponentUnderTest,
        folder: Path,
        resumed_at: Sent | None,
        calls: Sequence[_Call],
        *,
        killed: bool = False,
    ) -> Sent | None:
        """Run one process of the tracker, `killed` after the last call. Return the result of its `start`."""
        context = under_test.context(folder=str(folder / "run"))
        own_folder = context.path("trackers", under_test.config.folder_name)
        own_folder.mkdir(parents=True, exist_ok=True)
        facts = (under_test.composed.document, context, resumed_at, list(calls), killed)
        command = [sys.executable, "-c", _PROCESS]
        process = run_child(command, msgspec.msgpack.encode(facts), self.start_s, folder=folder)
        expected = -9 if killed else 0
        assert process.returncode == expected, (
            f"its process ended with status {process.returncode}:\n{process.stderr.decode()[-2000:]}"
        )
        return msgspec.msgpack.decode(process.stdout, type=Sent | None)


_PROCESS = """
import os, signal, sys
import msgspec
from stretto.assembly.compose import compose_mapping
from stretto.component import Context
from stretto.tracker import Sent

answer, sys.stdout = sys.stdout, sys.stderr
facts = tuple[dict, Context, Sent | None, list[tuple[str, object]], bool]
document, context, resumed_at, calls, killed = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=facts)
tracker = compose_mapping(document).make("trackers.0", context)
has = tracker.start(document, resumed_at)
assert has is None or isinstance(has, Sent), f"`start` returned {has!r}; expected None or a Sent"
answer.buffer.write(msgspec.msgpack.encode(has))
answer.flush()
newest = has or resumed_at or Sent()
last = {"step": newest.step, "evaluation": newest.evaluation}
for name, argument in calls:
    if name not in last or argument["step"] > last[name]:
        getattr(tracker, name)(argument)
if killed:
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""Program that makes the tracker of a run, starts it, and sends it the calls that it has not got yet."""
