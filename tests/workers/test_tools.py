"""Tools: schemas of functions, calls in answers, and the process that makes them."""

import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import msgspec
import pytest

from patience import SOON_S, patience
from stretto import tools
from stretto.chat.calls import NAMED, ToolCall
from stretto.machine.proxies import spare_this_machine
from stretto.models.images import decode
from stretto.reward import reasoning_end
from stretto.serving.server import Server
from stretto.user_code.protocol import try_to_ask
from stretto.user_code.tools import Invocation, command, max_answer, setup_frame
from stretto.workers.scoring.child_pool import ChildEnded, ChildPool, Program


@dataclass
class Point:
    x: float
    y: float = 0


def search(
    query: str,
    near: Point,
    limit: Annotated[int, msgspec.Meta(ge=1, description="how many")] = 5,
    unit: Literal["km", "mi"] = "km",
    tags: list[str] = [],  # noqa: B006
) -> list[str]:
    """Find places.

    The nearest come first.

    Args:
        query: what to look for,
            in English
        near (Point): where

    Returns:
        names
    """
    tags.append("x")
    return [f"{query} {near.x:g} {near.y:g} {limit} {unit} {tags}"]


def test_a_function_becomes_a_schema() -> None:
    assert tools.tool_of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find places.\n\nThe nearest come first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in English"},
                    "near": {"$ref": "#/$defs/Point", "description": "where"},
                    "limit": {"type": "integer", "minimum": 1, "description": "how many", "default": 5},
                    "unit": {"enum": ["km", "mi"], "default": "km"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["query", "near"],
                "additionalProperties": False,
                "$defs": {
                    "Point": {
                        "title": "Point",
                        "type": "object",
                        "properties": {"x": {"type": "number"}, "y": {"type": "number", "default": 0}},
                        "required": ["x"],
                    }
                },
            },
        },
    }


async def test_arguments_are_checked_before_the_function_sees_them() -> None:
    tool = tools.tool_of(search)
    for _ in range(2):  # a default that can change is a new one each time
        assert await tool.run({"query": "café", "near": {"x": 1}}) == ["café 1 0 5 km ['x']"]
    for given, fault in (
        ({"query": 3, "near": {"x": 1}}, r"Expected `str`, got `int` - at `\$.query`"),
        ({"query": "a"}, "missing required field `near`"),
        ({"query": "a", "near": {"x": 1}, "nearby": 2}, "unknown field `nearby`"),
        ({"query": "a", "near": {"x": 1, "z": 2}}, "unknown field `z`"),
        ({"query": "a", "near": {"x": 1}, "limit": 0}, "`int` >= 1"),
    ):
        with pytest.raises(msgspec.ValidationError, match=fault):
            await tool.run(given)

    def about(places: list[Point], of: dict[int, Point], seen: set[int]) -> str:
        return f"{len(places)} {[*of]} {seen}"

    given: dict[str, Any] = {"places": [{"x": 1}, {"x": 2, "y": 0}], "of": {"1": {"x": 1}}, "seen": [2, 2]}
    assert await tools.tool_of(about).run(given) == "2 [1] {2}"
    for key, value in ("places", [{"x": 1}, {"x": 2, "who": 3}]), ("of", {"1": {"x": 1, "who": 3}}):
        with pytest.raises(msgspec.ValidationError, match="unknown field `who`"):
            await tools.tool_of(about).run(given | {key: value})

    def loose(*args: int) -> None: ...

    with pytest.raises(TypeError, match="parameter 'args' cannot be given by name"):
        tools.tool_of(loose)


# ------------------------------------------------------------------------------------------- calls

F, G = ToolCall("f", {"a": 1}), ToolCall("g", {})


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("hermes", "no call", []),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>', [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}<|im_end|>', [F]),  # tag left open
        (
            "hermes",
            'so <tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> '
            '<tool_call>{"name": "g"}</tool_call>',
            [F, G],
        ),
        ("hermes", '<think>{"name"} <tool_call>x</tool_call></think>done', []),
        ("hermes", '<think><tool_call>{"name": "g"}</tool_call>', []),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}<|eom_id|>', [F]),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', [F, G]),
        ("llama3", '{"result": 3}', []),
        ("llama3", 'The answer is {"name": "f"}', []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</s>', [F, G]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}</s>',
         [ToolCall("f", {"a": 1}, id="abcdefgh1"), G]),
        ("mistral", "no call</s>", []),
    ],
)  # fmt: skip
def test_calls_are_read(parser: Any, text: str, calls: list[ToolCall]) -> None:
    assert NAMED[parser].split(text, reasoning_end(text))[1] == calls


@pytest.mark.parametrize(
    ("parser", "text", "fault"),
    [
        ("hermes", "<tool_call>f(1)</tool_call>", "not valid JSON: Expecting value"),
        ("hermes", '<tool_call>{"name": "f", "argum', "not valid JSON"),
        ("hermes", '<tool_call>["f"]</tool_call>', 'JSON object with "name"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": []}</tool_call>', "are not a JSON object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "key 'a' twice"),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', "not valid JSON"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "nested too deep"),
        ("llama3", '{"name": "f", "parameters": {', "not valid JSON"),
        ("mistral", "[TOOL_CALLS]f(1)", "not valid JSON"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": {"b": 1, "b": 2}}', "key 'b' twice"),
    ],
)  # fmt: skip
def test_what_is_malformed_says_why(parser: Any, text: str, fault: str) -> None:
    [call] = NAMED[parser].split(text, reasoning_end(text))[1]
    assert fault in call.fault
    assert call.arguments == {}


# ----------------------------------------------------------------------------------- the tool process

TOOLS = '''
import os, sys, time
from pathlib import Path

def double(n: int) -> int:
    """Twice."""
    print("noise on the standard output")
    return 2 * n

async def seen() -> dict:
    """What a tool sees."""
    import socket
    credentials = Path(__file__).parent / "out" / "bus" / "rollout.json"
    return {
        "env": dict(os.environ),
        "credentials": credentials.exists(),
        "beside": (Path(__file__).parent / "data.txt").read_text(),
        "interfaces": [name for _, name in socket.if_nameindex()],
    }

def broken() -> None:
    """Raises."""
    raise KeyError("no such key")

def unspeakable() -> None:
    """Raises what UTF-8 cannot say."""
    raise ValueError("oh \\ud800")

def text() -> str:
    """Long, with what UTF-8 cannot say."""
    return "\\ud800" + "x" * 5000

def page(broken: bool = False) -> object:
    """A page with an image."""
    from PIL import Image
    from stretto.tools import ToolResult
    return ToolResult({"links": 2}, [b"no image" if broken else Image.new("RGB", (8, 8), "red")])

def hang() -> None:
    """Never ends, nor what it starts."""
    os.system("sleep 1000")

def leave() -> None:
    """Ends its process."""
    os._exit(3)
'''


@asynccontextmanager
async def tool_process(
    config: tools.ToolsConfig, folder: Path, count: int = 1
) -> AsyncGenerator[tuple[ChildPool, bytes]]:
    made = command(config, "bubblewrap", str(folder))
    frame = setup_frame(config)
    program = Program("the tools", made.argv, frame, made.env, made.folder, max_answer(config))
    children = ChildPool(program, count)
    try:
        async with anyio.create_task_group() as tasks:
            yield children, await children.open(tasks)
            tasks.cancel_scope.cancel()
    finally:
        await children.close()


async def call(
    children: ChildPool, name: str, timeout_s: float | None = None, *, images: bool = False, **arguments: Any
) -> tools.ToolAnswer:
    invocation = Invocation(name, json.dumps(arguments).encode(), images)
    return await children.ask(invocation, tools.ToolAnswer, timeout_s or patience())


async def test_tools_in_the_sandbox_always_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the run")
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "data.txt").write_text("readable")
    credentials = tmp_path / "out" / "bus" / "rollout.json"
    credentials.parent.mkdir(parents=True)
    credentials.write_text("{}")
    names = ("double", "seen", "broken", "unspeakable", "text", "page", "hang", "leave")
    config = tools.ToolsConfig(
        tools=tuple(f"{tmp_path}/tools.py:{name}" for name in names), max_result_chars=4000, env={"KEY": "k"}
    )
    async with tool_process(config, tmp_path / "out", count=2) as (children, _):
        assert await call(children, "double", n=4) == tools.ToolAnswer("8")
        wrong = "error: wrong arguments: Expected `int`, got `str` - at `$.n`"
        assert await call(children, "double", n="four") == tools.ToolAnswer(wrong, failed=True)
        assert (await call(children, "broken")).text == "error: KeyError: 'no such key'"
        assert (await call(children, "unspeakable")).text == "error: ValueError: oh ?"
        unknown = await call(children, "duoble")
        assert unknown.failed
        assert "no tool 'duoble'; did you mean 'double'?" in unknown.text
        cut = "\n[cut after 4000 of 5001 characters]"
        assert (await call(children, "text")).text == f"?{'x' * 3999}{cut}"
        page = await call(children, "page", images=True)
        assert page.text == '{"links":2}'
        assert [decode(file).getpixel((0, 0)) for file in page.images] == [(255, 0, 0)]
        assert page.content == [{"type": "text", "text": '{"links":2}'}, {"type": "image"}]
        assert await call(children, "page") == tools.ToolAnswer('{"links":2}\n[image, which you cannot see]')
        unreadable = await call(children, "page", images=True, broken=True)
        assert unreadable.failed
        assert unreadable.text.startswith("error: the result has an image that cannot be used: cannot id")
        seen = json.loads((await call(children, "seen")).text)
        assert seen["credentials"] is False
        assert seen["beside"] == "readable"
        assert seen["interfaces"] == ["lo"]
        assert seen["env"]["KEY"] == "k"
        assert "SECRET" not in seen["env"]
        # One that hangs is killed with what it started, in time, while another call continues.
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, children, "double")
            with pytest.raises(TimeoutError):
                await call(children, "hang", timeout_s=patience(0.5))
        assert time.monotonic() - began < patience(10)
        with pytest.raises(ChildEnded, match="exit status 3"):
            await call(children, "leave")
        assert await call(children, "double", n=5) == tools.ToolAnswer("10")


MCP_SERVER = """
import sys
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import EmbeddedResource, TextResourceContents

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de000"
    "0000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)

server = MCPServer("things")

@server.tool()
def colour(thing: str) -> str:
    "The colour of a thing."
    if thing == "air":
        raise ToolError("it has none")
    return f"{thing} is blue"

@server.tool()
def photo() -> list:
    "A photo."
    of = TextResourceContents(uri="file:///cat", text="of a cat")
    return [EmbeddedResource(type="resource", resource=of), Image(data=PNG, format="png")]

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
server.run("stdio")
"""


async def test_tools_of_an_mcp_server(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(MCP_SERVER)
    (tmp_path / "tools.py").write_text("def colour() -> None: ...\ndef double(n: int) -> int: return 2 * n\n")
    server = tools.MCPServer(command=("python", str(tmp_path / "server.py")))
    shown = f"{tmp_path}/tools.py"  # what lies beside it is seen, the server too
    config = tools.ToolsConfig(tools=(f"{shown}:double",), mcp=(server,))
    async with tool_process(config, tmp_path / "out") as (children, listed):
        schemas = msgspec.msgpack.decode(listed, type=list[dict[str, Any]])
        assert [schema["function"]["name"] for schema in schemas] == ["double", "colour", "photo"]
        assert schemas[1]["function"]["description"] == "The colour of a thing."
        assert schemas[1]["function"]["parameters"]["required"] == ["thing"]
        assert await call(children, "colour", thing="sky") == tools.ToolAnswer("sky is blue")
        photo = await call(children, "photo", images=True)
        assert (photo.text, [decode(file).size for file in photo.images]) == ("of a cat", [(1, 1)])
        refused = await call(children, "colour", thing="air")
        assert refused.failed
        assert "it has none" in refused.text
        assert (await call(children, "colour", thing=1)).failed
        assert await call(children, "double", n=1) == tools.ToolAnswer("2")


async def test_tools_of_a_running_mcp_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other machines are reached by a proxy."""
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    spare_this_machine()
    (tmp_path / "server.py").write_text(MCP_SERVER)
    port, _ = Server.draw_address()
    config = tools.ToolsConfig(mcp=(tools.MCPServer(url=f"http://127.0.0.1:{port}/mcp"),), network=True)
    running = subprocess.Popen([sys.executable, tmp_path / "server.py", str(port)])
    try:
        await until_it_listens(port)
        async with tool_process(config, tmp_path / "out") as (children, _):
            assert await call(children, "colour", thing="sky") == tools.ToolAnswer("sky is blue")
            assert (await call(children, "colour", thing="air")).failed
    finally:
        running.kill()
        running.wait()


MORTAL_SERVER = """
import json, os, secrets, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer

ENDINGS = {"exit": lambda: os._exit(3), "kill": lambda: os.kill(os.getpid(), 9), "later": None}
NAMES = ("process", *ENDINGS)

def call(name):
    if name == "later":
        threading.Timer(0.1, os._exit, (4,)).start()
    elif name in ENDINGS:
        open(sys.argv[1], "a").write("x")
        print("out of paper", file=sys.stderr, flush=True)
        ENDINGS[name]()
    return {"content": [], "structuredContent": {"id": os.getpid()}}

def answer(line):
    message = json.loads(line)
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in NAMES]
    results = {
        "initialize": lambda _: {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                                 "serverInfo": {"name": "mortal", "version": "1"}},
        "tools/list": lambda _: {"tools": tools},
        "tools/call": lambda params: call(params["name"]),
    }
    head = {"jsonrpc": "2.0", "id": message.get("id")}
    if message["method"] in results:
        return json.dumps({**head, "result": results[message["method"]](message.get("params"))})
    return json.dumps({**head, "error": {"code": -32601, "message": "unknown"}}) if "id" in message else ""

class Web(BaseHTTPRequestHandler):
    session = secrets.token_hex()

    def do_POST(self):
        known = self.headers.get("Mcp-Session-Id", self.session) == self.session
        text = answer(self.rfile.read(int(self.headers["Content-Length"]))) if known else ""
        self.send_response((200 if text else 202) if known else 404)
        for name, value in {"Mcp-Session-Id": self.session, "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

if sys.argv[2:]:
    HTTPServer(("127.0.0.1", int(sys.argv[2])), Web).serve_forever()
for line in sys.stdin:
    if text := answer(line):
        print(text, flush=True)
"""
BESIDE = """
from pathlib import Path

def calls() -> str: return Path("/tmp/calls").read_text()
def runs(id: int) -> bool: return Path(f"/proc/{id}").exists()
"""


@pytest.mark.parametrize(("how", "status"), [("exit", 3), ("kill", 137)])
async def test_a_lost_mcp_server_costs_one_call(tmp_path: Path, how: str, status: int) -> None:
    (tmp_path / "server.py").write_text(MORTAL_SERVER)
    (tmp_path / "tools.py").write_text(BESIDE)
    server = tools.MCPServer(command=("python", str(tmp_path / "server.py"), "/tmp/calls"))
    config = tools.ToolsConfig(
        tools=(f"{tmp_path}/tools.py:calls", f"{tmp_path}/tools.py:runs"), mcp=(server,)
    )
    async with tool_process(config, tmp_path / "out") as (children, _):
        for number in (1, 2, 3, 4):  # each works again after one that fails
            assert json.loads((await call(children, "process")).text)["id"]
            lost = await call(children, how)
            assert lost.failed
            assert "server.py /tmp/calls' was lost: MCPError: Connection closed; its last " in lost.text
            assert re.search(rf"out of paper;( Killed;)? exit status {status}", lost.text)
            assert await call(children, "calls") == tools.ToolAnswer("x" * number)  # made once; others go on
        # A server that ends between two calls costs none.
        process = json.loads((await call(children, "later")).text)
        with anyio.fail_after(patience()):
            while await call(children, "runs", **process) == tools.ToolAnswer("true"):
                await anyio.sleep(SOON_S)
        assert not (await call(children, "process")).failed
        for _ in range(3):
            assert (await call(children, how)).failed
        with pytest.raises(ChildEnded, match="exit status 1"):  # the fourth loss in a row
            await call(children, how)
        assert not (await call(children, "process")).failed


async def test_a_running_mcp_server_that_restarts_costs_the_call_in_which_it_ended(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(MORTAL_SERVER)
    port, _ = Server.draw_address()
    command = [sys.executable, tmp_path / "server.py", tmp_path / "calls", str(port)]
    config = tools.ToolsConfig(mcp=(tools.MCPServer(url=f"http://127.0.0.1:{port}/mcp"),), network=True)
    running = subprocess.Popen(command)
    try:
        await until_it_listens(port)
        async with tool_process(config, tmp_path / "out") as (children, _):
            assert (await call(children, "exit")).failed
            for ending in ("later", "exit"):
                running.wait()
                away = await call(children, "process")
                assert away.failed
                assert "did not start: ConnectError: All connection attempts failed" in away.text
                running = subprocess.Popen(command)
                await until_it_listens(port)
                assert not (await call(children, "process")).failed
                await call(children, ending)
            running.wait()
            running = subprocess.Popen(command)  # with new sessions
            await until_it_listens(port)
            assert not (await call(children, "process")).failed
        assert (tmp_path / "calls").read_text() == "xx"
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ({"command": ["python", "-m", "no_such_module"]}, "No module named no_such_module; exit status 1"),
        ({"command": ["python", "-c", "import os; os.environ['KEY']"]}, "KeyError: 'KEY'; exit status 1"),
        ({"command": ["no-such-program"]}, "no-such-program: not found; exit status 127"),
        ({"url": "http://127.0.0.1:9/mcp"}, "ConnectError: All connection attempts failed"),
    ],
)
async def test_servers_say_why_they_do_not_start(tmp_path: Path, server: dict[str, Any], reason: str) -> None:
    config = tools.ToolsConfig(mcp=(msgspec.convert(server, tools.MCPServer),))
    sandboxed = command(config, "bubblewrap", str(tmp_path))
    started, _ = try_to_ask(sandboxed.argv, setup_frame(config), (), patience(), env=sandboxed.env)
    name = server.get("url") or " ".join(server["command"])
    assert f"the tools cannot be made: the MCP server {name!r} did not start: " in started.error
    assert started.error.endswith(reason)


async def until_it_listens(port: int) -> None:
    with anyio.fail_after(patience()):
        while True:
            try:
                await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
            except OSError:
                await anyio.sleep(SOON_S)
            else:
                return


def test_a_server_is_started_or_named() -> None:
    for given in ({}, {"command": ["x"], "url": "http://localhost/mcp"}):
        with pytest.raises(msgspec.ValidationError, match="either `command` or `url`"):
            msgspec.convert(given, tools.MCPServer)
