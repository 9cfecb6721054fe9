"""Certificates made by the commands of docs/nats.md: `from certificates import write_certificates`."""

import re
import subprocess
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "nats.md"


def write_certificates(folder: Path, hosts: Sequence[str], clients: Sequence[str] = ()) -> None:
    """Write `ca`, `server` and each client as NAME.pem and NAME.key into a folder of the name `certs`, which
    keeps its authority if it is there."""
    [block] = re.findall(r"^```bash\n(mkdir .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    make, new, sign, authority, server, client = block.splitlines()
    names = ",".join(f"{'IP' if _is_address(host) else 'DNS'}:{host}" for host in hosts)
    lines = ["cd certs && umask 077", new, sign] if folder.exists() else [make, new, sign, authority]
    lines += [re.sub(r"(?<=subjectAltName=)\S+", names, server)]
    lines += [client.replace("stretto", name) for name in clients]
    script = "\n".join(("set -e -o pipefail", *lines))
    subprocess.run(["bash", "-c", script], check=True, capture_output=True, cwd=folder.parent)


def server_tls(certs: Path) -> dict[str, Any]:
    """The section `tls` of a server that asks its clients for certificates of the folder `certs`."""
    names = {"cert_file": "server.pem", "key_file": "server.key", "ca_file": "ca.pem"}
    return {**{key: str(certs / name) for key, name in names.items()}, "verify": True}


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return False
