"""The reward `judge`, against a server of our own that answers as told."""

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from patience import SOON_S, patience
from stretto import Context
from stretto.errors import RewardError
from stretto.machine.proxies import spare_this_machine
from stretto.user_code.scoring import score_group
from stretto_judge import JudgeConfig, check, judge, make

Answer = tuple[int, Any, dict[str, str]]
"""Status, body (text of a reply, or raw JSON) and headers."""


class JudgeServer:
    """An OpenAI-compatible server in a thread of its own. `replies` answers request after request."""

    def __init__(self) -> None:
        self.replies: Callable[[str, int], Answer] = lambda text, number: (200, "Score: 5", {})
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.hosts: list[str] = []
        self.busiest = 0
        self._busy = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._started.wait(patience())

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(patience())

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._started.set()
        await self._over.wait()
        await runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        self.hosts.append(request.host)
        self._busy += 1
        self.busiest = max(self.busiest, self._busy)
        await asyncio.sleep(SOON_S)
        self._busy -= 1
        status, reply, headers = self.replies(body["messages"][-1]["content"], len(self.requests))
        if status == 200 and isinstance(reply, str):
            reply = {"choices": [{"message": {"role": "assistant", "content": reply}}]}
        return web.Response(status=status, text=json.dumps(reply), headers=headers)


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_FIRST_PAUSE_S", 0.01)


def scores(
    server: JudgeServer, folder: Path, *completions: str, row: dict[str, Any] | None = None, **options: Any
) -> list[tuple[float, dict[str, float]]]:
    config = msgspec.convert({"use": "judge", "url": server.url, "model": "m", **options}, JudgeConfig)
    reward = make(config, Context(run="r", name="n", seed=0, folder=str(folder)))
    return score_group(reward, {"prompt": "2+2?", "answer": "4", **(row or {})}, completions, {})


def test_each_answer_gets_the_score_of_its_own_reply(server: JudgeServer, tmp_path: Path) -> None:
    server.replies = lambda text, number: (200, f"Score: 3? **Score: {8 if 'four' in text else 2}**", {})
    (right, right_metrics), (wrong, _) = scores(server, tmp_path, "four", "five")
    assert (right, wrong) == (0.8, 0.2)
    assert right_metrics == {"score": 8.0, "cached": 0.0}
    for request in server.requests:
        assert "<question>\n2+2?\n</question>" in request.pop("messages")[0]["content"]
        assert request == {"model": "m", "temperature": 0.0, "max_tokens": 512}


def test_a_judge_outside_is_reached_by_the_proxy_and_one_on_this_machine_without(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
    outside = "http://judge.invalid/v1"
    spare_this_machine()
    assert scores(server, tmp_path, "one", url=outside)[0][0] == 0.5
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert scores(server, tmp_path, "two")[0][0] == 0.5
    assert server.hosts == ["judge.invalid", server.url.split("/")[2]]
    monkeypatch.setenv("no_proxy", "judge.invalid")
    with pytest.raises(RewardError, match=r"judge\.invalid/v1/chat/completions: "):
        scores(server, tmp_path, "three", url=outside, attempts=1)


def test_a_rubric_sees_columns_and_chats_and_does_not_run_what_answers_contain(
    server: JudgeServer, tmp_path: Path
) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    rubric = "{{ prompt }}|{{ completion }}|{{ answer }}"
    scores(server, tmp_path, "{{ 7 * 7 }}", row={"prompt": chat}, rubric=rubric, system="You judge.")
    [request] = server.requests
    assert request["messages"] == [
        {"role": "system", "content": "You judge."},
        {"role": "user", "content": "system: Be brief.\n\nuser: 2+2?|{{ 7 * 7 }}|4"},
    ]


def test_the_same_request_is_made_once_also_by_a_later_process(server: JudgeServer, tmp_path: Path) -> None:
    scores(server, tmp_path, "four")
    [(reward, metrics)] = scores(server, tmp_path, "four")
    assert (reward, metrics["cached"], len(server.requests)) == (0.5, 1.0, 1)
    [file] = (tmp_path / "judge").iterdir()
    kept = json.loads(file.read_text())
    assert (kept["text"], kept["request"]["model"]) == ("Score: 5", "m")
    file.write_text("{")  # a damaged file is no reply
    scores(server, tmp_path, "four")
    assert len(server.requests) == 2
    scores(server, tmp_path, "four", temperature=0.5)
    assert len(server.requests) == 3
    file.write_text(json.dumps({"request": {}, "text": "Score: 1"}))  # as kept before, perhaps of a cut reply
    assert scores(server, tmp_path, "four")[0][0] == 0.5


def test_passing_errors_and_replies_without_a_score_are_tried_again(
    server: JudgeServer, tmp_path: Path
) -> None:
    answers: list[Answer] = [
        (429, {"error": "slow down"}, {"Retry-After": "0"}),
        (503, {}, {}),
        (200, {"no": "choices"}, {}),
        (200, "I cannot say.", {}),
        (200, "Score: 10", {}),
    ]
    server.replies = lambda text, number: answers[number - 1]
    assert scores(server, tmp_path, "four")[0][0] == 1.0
    assert len(server.requests) == 5


def completion(content: Any, finish_reason: str | None = "stop", **message: Any) -> Answer:
    reply = {"message": {"content": content, **message}, "finish_reason": finish_reason}
    return 200, {"choices": [reply]}, {}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((200, "Score: 11", {}), "no score in 2 attempts; the last: no valid score in the reply 'Score: 11'"),
        ((200, "Score: -3", {}), "no valid score in the reply 'Score: -3'"),
        ((200, "Score: 7,5", {}), "no valid score in the reply 'Score: 7,5'"),
        ((200, "Score: 3-4", {}), "no valid score in the reply 'Score: 3-4'"),
        ((200, "Score: 10/100", {}), "no valid score in the reply 'Score: 10/100'"),
        ((200, "Score: **5** / 5", {}), "no valid score"),
        ((200, "Score: 4 out of 5.", {}), "no valid score"),
        ((200, "Score: 7%", {}), "no valid score"),
        ((200, {"error": {"message": "upstream down"}}, {}), "no chat completion: .*upstream down"),
        (completion("Score: 3", refusal="I cannot"), "the judge refused: 'I cannot'"),
        ((500, {"error": "out of memory"}, {}), "status 500: .*out of memory"),
    ],
)
def test_without_a_score_the_ticket_fails_unless_the_user_gives_one(
    reply: Answer, reason: str, server: JudgeServer, tmp_path: Path
) -> None:
    server.replies = lambda text, number: reply
    with pytest.raises(RewardError, match=reason):
        scores(server, tmp_path, "four", attempts=2)
    [(reward, metrics)] = scores(server, tmp_path, "four", attempts=2, unscored=-0.5)
    assert (reward, metrics["unscored"]) == (-0.5, 1.0)


@pytest.mark.parametrize(
    "reply",
    [
        completion("It is good. A score: 2 would be too harsh; the steps", "length"),
        completion("Score: 2 would be", "MAX_TOKENS"),
        completion("Score: 2", "model_length"),
        completion("Score: 2 for style, but", "abort"),
        completion("<think>A draft. Score: 2", None),
        completion("<think>Score: 2</think> So <think>Score: 3"),
        completion("<think>Score: 2</think>"),
        completion("<thinking>maybe Score: 2</thinking>"),
        completion("[THINK]maybe Score: 2"),
        completion("◁think▷maybe Score: 2"),
        completion("<|channel|>analysis<|message|>maybe Score: 2"),
        completion("<|channel>thought\nmaybe Score: 2"),
        completion("<reasoning>Score: 2</reasoning>\n"),
        completion(None, reasoning_content="Score: 2"),
        completion([{"type": "thinking", "thinking": "Score: 2"}]),
    ],
)
def test_a_reply_that_is_not_complete_has_no_score(
    reply: Answer, server: JudgeServer, tmp_path: Path
) -> None:
    server.replies = lambda text, number: reply
    with pytest.raises(RewardError, match=r"in 2 attempts; .* reward\.max_tokens 512"):
        scores(server, tmp_path, "four", attempts=2)
    assert (len(server.requests), (tmp_path / "judge").exists()) == (2, False)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("<think>Score: 2</think> Good. Score: 8. A perfect score 10 needs units.", 8),
        ("Score: 7 (A perfect score 10 needs units)", 7),
        ("score (0-10): 7", 7),
        ("<thinking>Score: 2</thinking>[Reasoning] Good. Score: 7 of **10**", 7),
        ("**Score (of 10)** = **6.5**", 6.5),
        ("So:\n**Score** 4/10.\n", 4),
        ([{"type": "text", "text": "Score: 3"}], 3),
    ],
)
def test_the_score_is_read(reply: Any, score: float, server: JudgeServer, tmp_path: Path) -> None:
    server.replies = lambda text, number: completion(reply)
    assert [scores(server, tmp_path, "four")[0][1]["score"] for _ in range(2)] == [score] * 2
    assert len(server.requests) == 1


def test_a_judge_that_is_late_names_its_limit(server: JudgeServer, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"did not answer within reward\.request_s=0\.001"):
        scores(server, tmp_path, "four", attempts=1, request_s=0.001)


def test_a_refusal_is_not_tried_again_and_does_not_show_the_key(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret-1")
    server.replies = lambda text, number: (401, {"error": "no such key: sk-secret-1"}, {})
    with pytest.raises(RewardError, match=r"status 401 \(key_env\): .*no such key: \*\*\*") as raised:
        scores(server, tmp_path, "four", key_env="JUDGE_KEY")
    assert "sk-secret" not in str(raised.value)
    assert server.keys == ["Bearer sk-secret-1"]
    assert not (tmp_path / "judge").exists()


def test_requests_keep_the_limits(server: JudgeServer, tmp_path: Path) -> None:
    answers = [f"answer {n}" for n in range(8)]
    assert len(scores(server, tmp_path, *answers, concurrency=3)) == 8
    assert server.busiest <= 3
    begun = time.monotonic()
    scores(server, tmp_path, *(f"other {n}" for n in range(6)), requests_per_minute=600)
    assert time.monotonic() - begun >= 0.5  # 5 intervals of 0.1 s


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"pattern": "score"}, "has 0 groups; expected one"),
        ({"pattern": "("}, "is no regular expression"),
        ({"scale": [1, 1]}, "is not a lower and a higher number"),
        ({"url": "localhost"}, "Expected `str` matching regex"),
        ({"answer_cpu_s": 1}, "do not apply to `judge`"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], fault: str) -> None:
    section = {"use": "judge", "url": "http://x/v1", "model": "m", **options}
    with pytest.raises(msgspec.ValidationError, match=fault):
        msgspec.convert(section, JudgeConfig)


def test_check_names_a_missing_key_and_a_wrong_rubric() -> None:
    config = JudgeConfig(use="judge", url="http://x/v1", model="m", key_env="NO_SUCH_KEY", rubric="{% if %}")
    problems = {problem.path: problem.message for problem in check(config, None)}  # type: ignore[arg-type]
    assert "is no Jinja template" in problems["reward.rubric"]
    assert "no variable 'NO_SUCH_KEY'" in problems["reward.key_env"]


@pytest.mark.slow
def test_a_run_is_scored_by_a_judge(
    server: JudgeServer, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret-2")
    server.replies = lambda text, number: (200, f"Score: {len(text) % 2 * 10}", {})
    run = start(f"reward={{use: judge, url: '{server.url}', model: m, key_env: JUDGE_KEY}}", "steps=2")
    run.assert_completed(2)
    assert 0 < run.metrics()[0]["reward"] < 1
    assert run.metrics()[0]["reward/score"] == pytest.approx(10 * run.metrics()[0]["reward"])
    assert set(server.keys) == {"Bearer sk-secret-2"}
    found = subprocess.run(["grep", "-rl", "sk-secret-2", str(run.folder)], capture_output=True, check=False)
    assert found.stdout == b"", f"the key is in {found.stdout.decode()}"
