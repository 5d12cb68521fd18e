"""The secrets of one sum: round keys, keys of pairs, masks drawn from them, and shares; libraries' primitives alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]

SEED_BYTES = 16
"""Bytes of a seed from which a key or a mask is derived; one is shared as one element of GF(2¹²⁸)."""

_ONCE = bytes(12)
"""The nonce of a key that encrypts one message ever."""


def derived(secret: bytes, digest: bytes, *purpose: str) -> bytes:
    """Return 32 bytes for one purpose of a secret within the agreement of this digest (HKDF-SHA256)."""
    return HKDF(SHA256(), 32, digest, "\x1f".join(("silotune masks", *purpose)).encode()).derive(secret)


def exchange_key(seed: bytes, digest: bytes, purpose: str) -> X25519PrivateKey:
    """Return the X25519 key of a seed."""
    return X25519PrivateKey.from_private_bytes(derived(seed, digest, "key", purpose))


def public_bytes(key: X25519PrivateKey) -> bytes:
    """Return the public key, 32 bytes."""
    return key.public_key().public_bytes_raw()


def parts_of_offer(offer: str) -> tuple[list[bytes], bytes]:
    """Return the public keys in a silo's offer, for seals and then for each round's masks, and its signature."""
    data = bytes.fromhex(offer)
    return [data[at : at + 32] for at in range(0, len(data) - 64, 32)], data[-64:]


def pair_key(own: X25519PrivateKey, other: bytes, digest: bytes, *purpose: str) -> bytes:
    """Return 32 bytes that only these two silos can derive; ValueError if the other's key is not a usable point."""
    return derived(own.exchange(X25519PublicKey.from_public_bytes(other)), digest, *purpose)


def stream(key: bytes, count: int) -> Numbers:
    """Return a mask: so many uniform 64-bit numbers (ChaCha20)."""
    encryptor = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)


def pair_mask(own: X25519PrivateKey, name: str, other: bytes, peer: str, digest: bytes, count: int) -> Numbers:
    """Return the mask that a silo adds for a peer; the peer's own for this silo is its negative."""
    mask = stream(pair_key(own, other, digest, "mask", *sorted((name, peer))), count)
    return mask if name < peer else np.negative(mask)


def self_mask(seed: bytes, digest: bytes, count: int) -> Numbers:
    """Return the mask that a silo draws from its own seed."""
    return stream(derived(seed, digest, "own mask"), count)


def seal(key: bytes, data: bytes, digest: bytes) -> bytes:
    """Encrypt one message with a key that is used for no other."""
    return ChaCha20Poly1305(key).encrypt(_ONCE, data, digest)


def unseal(key: bytes, data: bytes, digest: bytes) -> bytes:
    """Return what was sealed; empty bytes if somebody else made or changed it."""
    try:
        return ChaCha20Poly1305(key).decrypt(_ONCE, data, digest)
    except InvalidTag:
        return b""


def split(secret: bytes, threshold: int, holders: Sequence[str]) -> dict[str, bytes]:
    """Share a seed among holders in name order, so that any `threshold` of them can restore it."""
    shares = Shamir.split(threshold, len(holders), secret, ssss=False)
    return {holder: share for holder, (_, share) in zip(holders, shares, strict=True)}


def combine(shares: Mapping[str, bytes], holders: Sequence[str]) -> bytes:
    """Restore a seed from as many shares as its threshold; `holders` as `split` got them, in the same order."""
    places = {holder: place for place, holder in enumerate(holders, 1)}
    return Shamir.combine([(places[holder], share) for holder, share in shares.items()], ssss=False)
