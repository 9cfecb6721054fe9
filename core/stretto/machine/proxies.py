"""HTTP proxies: stretto uses them for other machines only, not for servers on this machine."""

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

__all__ = ["proxy_of", "proxy_variables", "spare_this_machine"]

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def spare_this_machine() -> None:
    """Add this machine to NO_PROXY, here and in child processes, for its MCP servers and health checks."""
    listed = getproxies_environment().get("no", "")
    hosts = [host.strip() for host in listed.split(",") if host.strip()]
    if "*" in hosts:  # no proxy at all; beside other names, `*` would be a host's name
        return
    hosts += [host for host in (*_THIS_MACHINE, socket.gethostname()) if host not in hosts]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


def proxy_variables() -> dict[str, str]:
    """Return the variables that name proxies, for a process that does not inherit this environment."""
    return {f"{scheme}_proxy": address for scheme, address in getproxies_environment().items()}


def proxy_of(address: str) -> str | None:
    """Return the proxy that the environment sets for an address; None if the address needs no proxy."""
    parts, proxies = urlsplit(address), getproxies_environment()
    if parts.hostname is None or proxy_bypass(parts.hostname):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")
