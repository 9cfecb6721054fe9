"""Hold what the inference servers depend on to what was last tried on real ones.

`make test-integration` writes with `python .ci/served.py passed`, for each server, a hash of the files that
decide how it is used, without comments and docstrings. `python .ci/served.py` compares: if they differ, it
installs that server and runs its conformance tests. If they differ for both, the hash draws one.
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
from pathlib import Path

from lines import is_docstring

ROOT = Path(__file__).resolve().parents[1]
PASSED = ROOT / ".ci" / "served.sha256"
SERVERS = {"sglang": "TestSglang", "vllm": "TestVllm"}
SHARED = (
    "core/stretto/serving",
    "core/stretto/agents",
    "core/stretto/cli/make/complete_cpu_server.py",
    "core/stretto/cli/make/engine.py",
    "core/stretto/models/tokenizer.py",
    "tests/integration",
)


def main() -> int:
    """Run the command; the exit status."""
    now = {server: hash_of(server) for server in SERVERS}
    if sys.argv[1:] == ["passed"]:
        PASSED.write_text("".join(f"{value}  {server}\n" for server, value in now.items()))
        return 0
    passed = {server: value for value, server in map(str.split, PASSED.read_text().splitlines())}
    changed = sorted(server for server in SERVERS if now[server] != passed.get(server))
    if not changed:
        print("servers: nothing that they depend on has changed since they were tried")
        return 0
    server = changed[int("".join(now.values()), 16) % len(changed)]
    print(f"servers: changed for {' and '.join(changed)}; trying {server}", flush=True)
    install = [sys.executable, "-m", "stretto", "engine", "install", server, "--cpu"]
    subprocess.run(install, cwd=ROOT, check=True)
    tests = f"tests/integration/test_servers.py::{SERVERS[server]}"
    command = [sys.executable, ".ci/second_chance.py", "-m", "integration", tests]
    return subprocess.run(command, cwd=ROOT).returncode


def hash_of(server: str) -> str:
    """Return the hash of all files that a server's tests depend on."""
    digest = hashlib.sha256()
    for place in (*SHARED, f"plugins/engines/stretto_{server}"):
        path = ROOT / place
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + _content(file))
    return digest.hexdigest()


def _content(file: Path) -> bytes:
    if file.suffix != ".py":
        return file.read_bytes()
    module = ast.parse(file.read_text())
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not is_docstring(statement)]
    return ast.dump(module).encode()


if __name__ == "__main__":
    sys.exit(main())
