"""Makes the keys and certificates of a federation's authority, its coordinator and its silos, and reads them."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silotune.errors import InputError, needs

with needs("federation: needs cryptography", "federation"):
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 1825
"""Days for which a new authority is valid."""

SERVER_DAYS = 365
"""Days for which a new server certificate is valid, at most as long as its authority."""

_SKEW = datetime.timedelta(hours=1)
"""Certificates begin that much in the past: clocks differ."""

_USES = (
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
)


@dataclass(frozen=True)
class KeyPair:
    """A private key and the certificate for it, both as PEM."""

    key: bytes
    certificate: bytes


def make_authority(host: str) -> KeyPair:
    """Make the key and the self-signed certificate of a federation's authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"silotune federation of {host}")
    extensions = [(x509.BasicConstraints(ca=True, path_length=0), True), (_usage(signs=True), True)]
    return _certified(key, name, name, key, AUTHORITY_DAYS, extensions)


def make_server_certificate(authority: KeyPair, host: str) -> KeyPair:
    """Make a key and a certificate for the coordinator: for its public name, for localhost and for 127.0.0.1."""
    signer = read_certificate(authority.certificate)
    try:
        signing: Any = serialization.load_pem_private_key(authority.key, None)
    except (ValueError, TypeError) as error:
        raise InputError(f"the authority's key: cannot be read ({error})") from error
    if signing.public_key() != signer.public_key():
        raise InputError("the authority's key does not belong to its certificate")
    days = int(days_left(authority.certificate))
    if days < 1:
        raise InputError("the authority has expired; make a new one with `silotune federation renew --authority`")
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    if host not in ("localhost", "127.0.0.1"):
        names.insert(0, _general_name(host))
    issuer: Any = signer.public_key()
    extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(names), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), False),
    ]
    key = ec.generate_private_key(ec.SECP256R1())
    return _certified(key, _name("coordinator"), signer.subject, signing, min(SERVER_DAYS, days), extensions)


def make_node_key() -> bytes:
    """Make a silo's private key, as Flower's SuperNode wants it: ECDSA on P-384, in OpenSSH's format."""
    key = ec.generate_private_key(ec.SECP384R1())
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    return key.private_bytes(encoding, form, serialization.NoEncryption())


def public_node_key(private: bytes, comment: str) -> bytes:
    """Return the public key of a silo's private key, one line in OpenSSH's format."""
    try:
        public = serialization.load_ssh_private_key(private, None).public_key()
    except (ValueError, TypeError) as error:
        raise InputError(f"the silo's key: cannot be read ({error})") from error
    text = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return check_public_key(text.decode()) + f" {comment.replace(' ', '-')}\n".encode()


def check_public_key(text: str) -> bytes:
    """Return a silo's public key in OpenSSH's format, one line without a comment."""
    allowed = "allowed: ECDSA on P-384, in OpenSSH's format"
    try:
        key = serialization.load_ssh_public_key(text.strip().encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"the public key cannot be read; {allowed}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InputError(f"the public key is of another kind; {allowed}")
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def read_certificate(pem: bytes, culprit: str = "certificate") -> x509.Certificate:
    """Return the first certificate of a PEM file."""
    try:
        return x509.load_pem_x509_certificates(pem)[0]
    except ValueError as error:
        raise InputError(f"{culprit}: holds no certificate") from error


def fingerprint(pem: bytes) -> str:
    """Return the sha256 of the first certificate, in the way of `openssl x509 -fingerprint -sha256`."""
    return read_certificate(pem).fingerprint(SHA256()).hex(":").upper()


def issuer_of(der: bytes) -> str:
    """Return the name of who issued a certificate (DER)."""
    return x509.load_der_x509_certificate(der).issuer.rfc4514_string()


def days_left(pem: bytes) -> float:
    """Return the days until the first certificate expires; negative after that."""
    return (read_certificate(pem).not_valid_after_utc - _now()).total_seconds() / 86400


def names_in(path: Path) -> list[str]:
    """Return the DNS names and addresses of a file's first certificate."""
    certificate = read_certificate(path.read_bytes(), str(path))
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _certified(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    issuer: x509.Name,
    signing: Any,
    days: int,
    extensions: list[Any],
) -> KeyPair:
    """Return a key and a certificate for it that another key, or the same one, has signed."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _SKEW)
        .not_valid_after(_now() + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return KeyPair(private, builder.sign(signing, SHA256()).public_bytes(encoding))


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs: bool) -> x509.KeyUsage:
    others = dict.fromkeys(_USES, False)
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **others)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
