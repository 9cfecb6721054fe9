"""The addresses of the bundled nats-server: where it listens, and by which names processes reach it."""

import socket
from dataclasses import dataclass

from stretto.config import BusConfig
from stretto.errors import ConfigError
from stretto.machine.interfaces import address_towards, is_loopback

_LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"
"""An address that is reserved for documentation: only the default route leads to it."""


@dataclass(frozen=True)
class Listening:
    """Where a server listens."""

    host: str
    port: int
    """0 for a free port."""
    near: str
    """Host for processes on this machine."""
    far: str
    """Host for other machines; the same as `near` on loopback."""

    @property
    def public(self) -> bool:
        """Whether other machines can reach the server."""
        return not is_loopback(self.host)

    @property
    def hosts(self) -> list[str]:
        """All names and addresses at which clients may reach the server."""
        configured = [self.host] if not _is_wildcard(self.host) else []
        return [self.far, self.near, *configured, *own_hosts()]


def listening(config: BusConfig) -> Listening:
    """Return where the bundled server listens. Raise ConfigError without an address for other machines."""
    if config.listen is None:
        return Listening(_LOOPBACK, 0, _LOOPBACK, _LOOPBACK)
    host, port = _split(config.listen)
    near = host if not _is_wildcard(host) else "::1" if ":" in host else _LOOPBACK
    return Listening(host, port, near, config.address or (_far() if _is_wildcard(host) else host))


def own_hosts() -> list[str]:
    """Return the names and addresses of this machine, including those of loopback."""
    names = [socket.gethostname(), socket.getfqdn()]
    route = _address_of_default_route()
    hosts = ["localhost", _LOOPBACK, "::1", *names, *_addresses_of(names[0]), *([route] if route else [])]
    return [host for host in dict.fromkeys(hosts) if host]


def url_host(host: str) -> str:
    """Return a host as it is written in a URL."""
    return f"[{host}]" if ":" in host else host


def _split(listen: str) -> tuple[str, int]:
    """Split `host`, `host:port` or `[address]:port`."""
    host, bracket, rest = listen.rpartition("]")
    if bracket:
        return host.removeprefix("["), int(rest.removeprefix(":") or 0)
    host, _, port = listen.partition(":")
    return host, int(port or 0)


def _is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::")  # noqa: S104 - it is compared, not bound


def _far() -> str:
    name = socket.gethostname()
    if any(not is_loopback(address) for address in _addresses_of(name)):
        return name
    if address := _address_of_default_route():
        return address
    raise ConfigError(
        f"bus.address: no address is known by which others reach this machine: its name {name!r} stands for "
        "loopback, and it has no route to other networks; set bus.address",
        path="bus.address",
    )


def _addresses_of(name: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:  # the name is not known
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))


def _address_of_default_route() -> str:
    """Return the address with which this machine reaches other networks; empty without a route to them."""
    try:
        return address_towards(_ELSEWHERE)
    except OSError:
        return ""
