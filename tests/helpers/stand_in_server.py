"""stand_in_server.py PORT KEY: an HTTP server that "samples" in stated time, for tests of server engines.

Token k of an answer is `(sum of the prompt + k) % 97` whatever the weights are, so that a token left out or
doubled is seen; its logprob is minus the version. It has a child process, as real servers do. It counts the
parts of memory that it has, and ends at what would break a real server: to free memory that a request uses or
that is free, to take memory that it has, to load without memory for weights.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from aiohttp import web

TOKEN_S = 0.005


class StandIn:
    def __init__(self, key: str) -> None:
        self.key = key
        self.version = ""
        self.aborted: set[str] = set()
        self.known: set[str] = set()
        self.memory = {"weights", "kv_cache"}

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.check(request)
        ask = await request.json()
        self.known.add(ask["id"])
        response = web.StreamResponse()
        await response.prepare(request)
        prompt, answer = ask["tokens"][: ask["prompt"]], ask["tokens"][ask["prompt"] :]
        for position in range(len(answer), len(answer) + ask["max_tokens"]):
            await asyncio.sleep(TOKEN_S)
            self.require(self.memory == {"weights", "kv_cache"})
            aborted = ask["id"] in self.aborted
            last = position + 1 == len(answer) + ask["max_tokens"]
            event = {
                "tokens": [] if aborted else [(sum(prompt) + position) % 97],
                "logprobs": [] if aborted else [-float(self.version)],
                "finish": "abort" if aborted else "length" if last else "",
                "versions": [self.version] if aborted or last else [],
            }
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if aborted:
                break
        await response.write(b"data: [DONE]\n\n")
        self.known.discard(ask["id"])
        return response

    async def abort(self, request: web.Request) -> web.Response:
        self.check(request)
        self.aborted |= self.known & set(await request.json())
        return web.json_response({})

    async def load(self, request: web.Request) -> web.Response:
        self.check(request)
        asked = await request.json()
        if not list(Path(asked["folder"]).glob("*.safetensors")):
            return web.json_response({"error": {"message": f"no weights in {asked['folder']}"}}, status=400)
        self.require("weights" in self.memory)
        self.version = asked["version"]
        return web.json_response({})

    async def free(self, request: web.Request) -> web.Response:
        self.check(request)
        self.require(self.memory == {"weights", "kv_cache"} and not self.known)
        self.memory, self.version = set(), ""
        return web.json_response({})

    async def take(self, request: web.Request) -> web.Response:
        self.check(request)
        part = await request.json()
        self.require(part not in self.memory and (part == "weights" or self.version != ""))
        self.memory.add(part)
        return web.json_response({})

    def require(self, right: bool) -> None:
        if not right:
            os._exit(1)

    async def state(self, request: web.Request) -> web.Response:
        running = sorted(self.known - self.aborted)
        state = {"running": running, "version": self.version, "memory": sorted(self.memory)}
        return web.json_response(state)

    def check(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized()


def main() -> None:
    port, key = sys.argv[1:]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(f"child {child.pid}", flush=True)
    stand_in = StandIn(key)
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", stand_in.health),
            web.get("/state", stand_in.state),
            web.post("/generate", stand_in.generate),
            web.post("/abort", stand_in.abort),
            web.post("/load", stand_in.load),
            web.post("/free", stand_in.free),
            web.post("/take", stand_in.take),
        ]
    )
    web.run_app(app, host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main()
