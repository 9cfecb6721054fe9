"""The addresses and network interfaces of this machine."""

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

__all__ = ["address_towards", "interface_with", "is_addressed", "is_loopback"]


def address_towards(host: str) -> str:
    """Return this machine's address on the route to a host. Send nothing. Raise OSError without a route."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket sends nothing here: it only chooses the route
        return probe.getsockname()[0]


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address means this machine's loopback, and nothing else."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_addressed(host: str, names: Collection[str]) -> bool:
    """Return whether a request's header `Host` has an address, which DNS cannot make point here, or one of
    these names, in small letters. All ports will do, because ssh may forward another."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in names or bool(ipaddress.ip_address(name))
    except ValueError:  # such as `[::1`, or a foreign name
        return False


def interface_with(address: str) -> str:
    """Return the name of the interface that has an address, such as `eth0`. Raise OSError if none has it."""
    import psutil  # only ranks on several machines need it, and every process imports this module

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise OSError(f"no network interface of this machine has the address {address}")
