"""What gets into the log of a process."""

import asyncio
import json
import logging
import ssl
import subprocess
import sys
from pathlib import Path

from stretto.assembly.logs import log_to
from stretto.bus.certificates import Authority


def test_warnings_of_libraries_are_logged_and_not_those_that_mean_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True)  # it sets the log of a process
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["a task was slow"]


async def end_a_connection(folder: Path) -> None:
    """Connect as nats-py does, which begins TLS on a connection that it has, and let the server end it."""
    Authority.create("test", 10).server(["127.0.0.1"], 10).write(folder, "server")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(folder / "server.pem", folder / "server.key")

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await writer.start_tls(tls)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        reader = asyncio.StreamReader()
        client = ssl.create_default_context()
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        transport = await asyncio.get_running_loop().start_tls(
            writer.transport, asyncio.StreamReaderProtocol(reader), client, server_hostname="127.0.0.1"
        )
        assert transport is not None
        assert await reader.read() == b""
        transport.close()


if __name__ == "__main__":
    log_to(Path(sys.argv[1]) / "log.jsonl")
    asyncio.run(end_a_connection(Path(sys.argv[1])))
    logging.getLogger("asyncio").warning("a task was slow")
