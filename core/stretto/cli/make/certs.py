"""`stretto certs`: an authority in a folder, and certificates for nats-servers and their clients."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from stretto.bus.certificates import Authority
from stretto.bus.listening import own_hosts
from stretto.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OWN_NAMES = ("ca", "server")


def write_certificates(folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int) -> None:
    """Write `ca`, `server` and each client as NAME.pem and NAME.key, which only the user can read. A folder
    with an authority keeps it: then the certificates are new, and those that it signed before stay valid.

    Args:
        hosts: names and addresses by which clients call the servers; the machine's own if there are none.
        clients: names of the clients.
        days: for how long the certificates of servers and clients are valid.

    Raises:
        ConfigError: if a name cannot be used, or if the folder cannot be written or holds another authority.
    """
    for client in clients:
        if not _NAME.fullmatch(client) or client in _OWN_NAMES:
            raise ConfigError(
                f"--client {client!r}: expected letters, digits, '.', '_' and '-', and not ca or server"
            )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (folder / "ca.pem").exists():
            authority = Authority.read(folder)
        else:
            authority = Authority.create(f"stretto {folder.absolute().name}")
            authority.own.write(folder, "ca")
        authority.server(hosts or own_hosts(), days).write(folder, "server")
        for client in clients:
            authority.client(client, days).write(folder, client)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error


def explanation(folder: Path, client: str) -> str:
    """Return how a nats-server and a run file use the files."""
    folder = folder.absolute()
    tls = "".join(
        f"  {key}: {json.dumps(str(folder / name))}\n"
        for key, name in (("cert_file", "server.pem"), ("key_file", "server.key"), ("ca_file", "ca.pem"))
    )
    return (
        f"for nats-server, in its configuration (and the same in `cluster` and `leafnodes`):\n"
        f"tls {{\n{tls}  verify: true\n}}\n\n"
        f"for a run, in its file:\n"
        f"bus:\n"
        f"  url: tls://HOST:4222\n"
        f"  tls: {{ca: {folder}/ca.pem, certificate: {folder}/{client}.pem, key: {folder}/{client}.key}}\n\n"
        f"keep {folder}/ca.key to yourself: who has it can make certificates for every client"
    )
