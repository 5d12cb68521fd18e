"""Makes keys and certificates of authority, coordinator and silos; reads names, fingerprint, days left."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from silotune.errors import InputError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_DAYS = 1825
"""Days for which a new authority is valid."""

SERVER_DAYS = 365
"""Days for which a new server certificate is valid, at most as long as its authority."""

_SKEW = datetime.timedelta(hours=1)
"""Certificates begin that much in the past: clocks differ."""


@dataclass(frozen=True)
class KeyPair:
    """A private key and the certificate for it, both as PEM."""

    key: bytes
    certificate: bytes


def make_authority(host: str) -> KeyPair:
    """Make the key and the self-signed certificate of a federation's authority.

    Args:
        host: the coordinator's name, which the authority's own name tells.
    """
    from cryptography import x509

    key = _new_key("p256")
    name = _name(f"silotune federation of {host}")
    builder = _builder(name, name, key, AUTHORITY_DAYS).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), True
    )
    builder = builder.add_extension(_usage(signs_certificates=True), True)
    return KeyPair(_key_pem(key), _signed(builder, key))


def make_server_certificate(authority: KeyPair, host: str) -> KeyPair:
    """Make a key and a certificate for the coordinator: for its public name, for localhost and for 127.0.0.1.

    Args:
        authority: who signs; its certificate may be a bundle that begins with the signer's.
        host: the public name or address.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID

    signer = read_certificates(authority.certificate)[0]
    try:
        signing = load_pem_private_key(authority.key, None)
    except (ValueError, TypeError) as error:
        raise InputError(f"the authority's key: cannot be read ({error})") from error
    if signing.public_key() != signer.public_key():
        raise InputError("the authority's key does not belong to its certificate")
    left = (signer.not_valid_after_utc - _now()).days
    if left < 1:
        raise InputError("the authority has expired; make a new one with `silotune federation renew --authority`")
    key = _new_key("p256")
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    if host not in ("localhost", "127.0.0.1"):
        names.insert(0, _general_name(host))
    builder = (
        _builder(_name("coordinator"), signer.subject, key, min(SERVER_DAYS, left))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(_usage(signs_certificates=False), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(x509.SubjectAlternativeName(names), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False)  # type: ignore[arg-type]
    )
    return KeyPair(_key_pem(key), _signed(builder, signing))


def make_node_key(comment: str) -> tuple[bytes, bytes]:
    """Make a silo's key, as Flower's SuperNode wants it: ECDSA on P-384, in OpenSSH's format.

    Args:
        comment: the silo's name, kept in the public key.

    Returns:
        The private and the public key.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = _new_key("p384")
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, public_node_key(private, comment)


def public_node_key(private: bytes, comment: str) -> bytes:
    """Return the public key of a silo's private key, one line in OpenSSH's format."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

    try:
        public = load_ssh_private_key(private, None).public_key()
    except (ValueError, TypeError) as error:
        raise InputError(f"the silo's key: cannot be read ({error})") from error
    return public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {comment.replace(' ', '-')}\n".encode()


def check_public_key(text: str) -> bytes:
    """Return a silo's public key in OpenSSH's format, one line without a comment."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    try:
        key = load_ssh_public_key(text.strip().encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError("the public key cannot be read; allowed: ECDSA on P-384, in OpenSSH's format") from error
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP384R1):
        raise InputError("the public key is of another kind; allowed: ECDSA on P-384, in OpenSSH's format")
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def read_certificates(pem: bytes, culprit: str = "certificate") -> list[x509.Certificate]:
    """Return the certificates of a PEM file."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise InputError(f"{culprit}: holds no certificate") from error


def fingerprint(pem: bytes) -> str:
    """Return the sha256 of the first certificate, in the way of `openssl x509 -fingerprint -sha256`."""
    from cryptography.hazmat.primitives.hashes import SHA256

    return read_certificates(pem)[0].fingerprint(SHA256()).hex(":").upper()


def days_left(pem: bytes) -> float:
    """Return the days until the first certificate expires; negative after that."""
    return (read_certificates(pem)[0].not_valid_after_utc - _now()).total_seconds() / 86400


def names_in(path: Path) -> list[str]:
    """Return the DNS names and addresses of a file's first certificate."""
    from cryptography import x509

    certificate = read_certificates(path.read_bytes(), str(path))[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _new_key(curve: str) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1() if curve == "p384" else ec.SECP256R1())


def _name(common: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _SKEW)
        .not_valid_after(_now() + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

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


def _signed(builder: x509.CertificateBuilder, key: object) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding

    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)  # type: ignore[arg-type]


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
