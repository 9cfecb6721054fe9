"""TLS of the bus's clients, as PEM texts in the bootstrap file: a worker needs no other file."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

import msgspec

from stretto.config import TlsConfig
from stretto.errors import ConfigError
from stretto.machine.private_file import write_private


class TlsIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The authorities that a client trusts, and the certificate that it presents, as PEM text."""

    ca: str = ""
    """Certificates of the trusted authorities; empty for the authorities of the system."""
    certificate: str = ""
    """The client's certificate and the intermediate ones; empty if the client presents none."""
    key: str = ""
    """The private key of the certificate, not encrypted."""

    @classmethod
    def of(cls, config: TlsConfig) -> TlsIdentity:
        """Read the files that a run file names. Raise ConfigError if a file cannot be used."""
        texts: dict[str, str] = {}
        for name in ("ca", "certificate", "key"):
            if (file := getattr(config, name)) is not None:
                try:
                    texts[name] = Path(file).read_text()
                except (OSError, UnicodeDecodeError) as error:
                    raise _fault(name, f"{file} cannot be read: {error}") from error
        identity = cls(**texts)
        client_context(identity)
        return identity


def client_context(identity: TlsIdentity | None) -> ssl.SSLContext:
    """Return the settings of a client's TLS connections. The client always checks the server's certificate
    and its name; without an identity it trusts the system's authorities, and presents no certificate."""
    identity = identity or TlsIdentity()
    try:
        context = ssl.create_default_context(cadata=identity.ca or None)
    except (ssl.SSLError, ValueError) as error:
        raise _fault("ca", f"expected certificates as PEM text: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if identity.certificate:
        with tempfile.TemporaryDirectory(prefix="stretto-tls-") as folder:  # ssl reads keys from files only
            certificate, key = Path(folder, "certificate.pem"), Path(folder, "key.pem")
            write_private(certificate, identity.certificate.encode())
            write_private(key, identity.key.encode())
            try:
                # An encrypted key would ask for its password on the terminal.
                context.load_cert_chain(certificate, key, password="")
            except (ssl.SSLError, ValueError) as error:
                message = f"expected a certificate and its own key, not encrypted, as PEM text: {error}"
                raise _fault("certificate", message) from error
    return context


def _fault(key: str, message: str) -> ConfigError:
    return ConfigError(f"bus.tls.{key}: {message}", path=f"bus.tls.{key}")
