"""Run an environment of `verifiers`, in the interpreter in which it is installed. Does not import stretto.

The process exchanges lines of JSON over its standard pipes, and ends with its input. It reads `{"config",
"path", "size"}`; it answers `{"tasks"}` or `{"error"}`. Then it reads for each episode `{"id", "task", "key",
"model", "base_url", "api_key"}`, or `{"cancel": id}`; it writes `{"id", "reward", "metrics", "error"}`.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

Send = Callable[[dict[str, Any]], None]


def config_of(settings: dict[str, Any]) -> Any:
    """Return the environment's config; agents without a `runtime` run on this machine, not in a cloud."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports] - it lives elsewhere

    kind = vf.env_config_type(settings["taskset"]["id"], settings.get("id", ""))
    names = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    agents = {name: {"runtime": {"type": "subprocess"}, **settings.get(name, {})} for name in names}
    return vf.resolve_env_config({**settings, **agents})


def tasks_of(config: Any, size: int | None) -> list[Any]:
    """Return the environment's tasks, or the first `size` of them."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports] - it lives elsewhere

    tasks = vf.load_environment(config).taskset
    if size is not None:
        tasks = tasks.take(size)
    elif not tasks.bounded:
        raise ValueError("the environment has infinitely many tasks: set `size`")
    return list(tasks)


def key_of(task: Any) -> str:
    """Return the identity of a task. Some libraries name files of their cache in a task's data; the cache is
    below the home folder, and the sandbox has another one."""
    text = movable = json.dumps(task.data.model_dump(mode="json"), ensure_ascii=False)
    for home in (Path.home(), Path("/tmp")):  # noqa: S108 - the home folder in the sandbox
        movable = movable.replace(str(home / ".cache"), "~/.cache")
    return task.key if movable == text else sha256(movable.encode()).hexdigest()


def describe(task: Any) -> dict[str, Any]:
    """Return the data of a task from which the task's row is made."""
    data = task.data
    return {
        "key": key_of(task),
        "name": data.name or data.id or "",
        "prompt": data.prompt_text,
        "system": data.system_prompt or "",
        "data": data.model_dump(mode="json", exclude_none=True),
    }


async def play_episode(config: Any, task: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Play one episode in an environment of its own, whose servers end with the episode."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports] - it lives elsewhere

    if key_of(task) != order["key"]:
        raise ValueError(f"task {order['task']} is not the one that the row was made from")
    variable = f"STRETTO_KEY_{order['id']}"
    os.environ[variable] = order["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=order["base_url"], api_key_var=variable)
        environment = vf.load_environment(config)
        async with environment.serving():
            [slot] = environment.slots(task)
            episode = await environment.run_slot(slot, vf.ModelContext(model=order["model"], client=client))
    finally:
        del os.environ[variable]
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "it is not ok")
    names = sorted({name for trace in episode.traces for name in trace.metrics})
    return {
        "reward": fmean(trace.reward for trace in episode.traces),
        "metrics": {
            name: fmean(trace.metrics[name] for trace in episode.traces if name in trace.metrics)
            for name in names
        },
        "error": "",
    }


def text_of(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


async def serve(send: Send) -> None:
    """Play all requested episodes at the same time, until the input ends."""
    lines = asyncio.StreamReader(limit=2**26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    settings = json.loads(await lines.readline())
    sys.path[:0] = settings["path"]
    try:
        config = config_of(settings["config"])
        tasks = tasks_of(config, settings["size"])
    except Exception as error:  # noqa: BLE001 - an environment may raise anything; the reply says what
        send({"error": text_of(error)})
        return
    send({"tasks": [describe(task) for task in tasks]})
    running: dict[int, asyncio.Task[None]] = {}

    async def play(order: dict[str, Any]) -> None:
        try:
            send({"id": order["id"], **await play_episode(config, tasks[order["task"]], order)})
        except Exception as error:  # noqa: BLE001 - an episode may raise anything
            send({"id": order["id"], "error": text_of(error)})
        finally:
            del running[order["id"]]

    while line := await lines.readline():
        order = json.loads(line)
        if "cancel" not in order:
            running[order["id"]] = asyncio.create_task(play(order))
        elif task := running.get(order["cancel"]):
            task.cancel()


def main() -> None:
    """Serve requests from standard input until it ends."""
    # The pipe is for replies alone: everything else that is printed goes to standard error.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    asyncio.run(serve(send))


if __name__ == "__main__":
    main()
