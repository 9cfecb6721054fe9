"""HTTP proxies are for other machines: what runs on this one is reached without them."""

from __future__ import annotations

import os
import socket
from urllib.request import getproxies_environment

__all__ = ["proxy_variables", "spare_this_machine"]

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def spare_this_machine() -> None:
    """Add this machine to NO_PROXY, for this process and those that it starts. Clients of MCP servers and the
    health checks of inference servers would otherwise ask the proxy for it."""
    listed = getproxies_environment().get("no", "")
    hosts = [host.strip() for host in listed.split(",") if host.strip()]
    hosts += [host for host in (*_THIS_MACHINE, socket.gethostname()) if host not in hosts]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


def proxy_variables() -> dict[str, str]:
    """The variables that name proxies, for a process whose environment is otherwise its own."""
    return {f"{scheme}_proxy": address for scheme, address in getproxies_environment().items()}
