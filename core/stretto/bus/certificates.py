"""Certificates for the bus. The private key of the authority that signs them is never written to a file."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stretto.errors import ConfigError
from stretto.machine import clock
from stretto.machine.private_file import write_private

_EARLIER = datetime.timedelta(hours=1)
"""How long before its creation a certificate becomes valid, because the clocks of machines differ."""


@dataclass(frozen=True)
class Certificate:
    """A certificate and its private key, as PEM text."""

    certificate: str
    key: str

    def write(self, folder: Path, name: str) -> None:
        """Write `NAME.pem` and `NAME.key`."""
        write_private(folder / f"{name}.pem", self.certificate.encode())
        write_private(folder / f"{name}.key", self.key.encode())


class Authority:
    """A certificate authority."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, name: str, days: int) -> Authority:
        """Make a new authority, which signs certificates of servers and clients only."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        builder = _builder(subject, subject, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @property
    def text(self) -> str:
        """The authority's own certificate as PEM text."""
        return _text(self._certificate)

    def server(self, hosts: Iterable[str], days: int) -> Certificate:
        """Make a server's certificate. Servers of a cluster, and leaves, also use it to connect to others."""
        names = list(dict.fromkeys(_host(host) for host in hosts))
        return self._issue("nats-server", names, [_SERVER, _CLIENT], days)

    def client(self, name: str, days: int) -> Certificate:
        """Make the certificate of a client."""
        return self._issue(name, [], [_CLIENT], days)

    def _issue(
        self, name: str, hosts: list[x509.GeneralName], purposes: list[x509.ObjectIdentifier], days: int
    ) -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name), self._certificate.subject, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(signer, critical=False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        return Certificate(_text(builder.sign(self._key, hashes.SHA256())), _key_text(key))


_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.fromtimestamp(clock.wall(), datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]").partition("%")[0]))
    except ValueError:
        pass
    try:
        return x509.DNSName(host.encode("idna").decode())
    except (UnicodeError, ValueError) as error:
        raise ConfigError(f"{host!r} is neither the name nor the address of a host: {error}") from error


def _text(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_text(key: ec.EllipticCurvePrivateKey) -> str:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, pkcs8, serialization.NoEncryption()).decode()
