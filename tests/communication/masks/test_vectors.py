"""The primitives as they are called give the published vectors of RFC 7748, 5869 and 8439."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from silotune.communication.masks.keys import combine, derived, exchange_key, pair_mask, public_bytes, split, stream

ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
BOB = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"


def test_x25519_of_rfc_7748():
    key = X25519PrivateKey.from_private_bytes(ALICE)
    assert public_bytes(key).hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    shared = key.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(BOB)))
    assert shared.hex() == "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"


def test_hkdf_of_rfc_5869():
    salt, info = bytes(range(13)), bytes.fromhex("f0f1f2f3f4f5f6f7f8f9")
    made = HKDF(SHA256(), 42, salt, info).derive(b"\x0b" * 22).hex()
    assert made == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"


def test_chacha20_of_rfc_8439():
    """Appendix A.1, vector 1: the key, nonce and counter of zero."""
    block = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert stream(bytes(32), 8).astype("<u8").tobytes().hex() == block


def test_chacha20_poly1305_of_rfc_8439():
    """Section 2.8.2."""
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
        b"sunscreen would be it."
    )
    about, nonce = bytes.fromhex("50515253c0c1c2c3c4c5c6c7"), bytes.fromhex("070000004041424344454647")
    sealed = ChaCha20Poly1305(bytes(range(0x80, 0xA0))).encrypt(nonce, text, about).hex()
    assert sealed.startswith("d31a8d34648e60db7b86afbc53ef7ec2")
    assert sealed.endswith("1ae10b594f09e26a7e902ecbd0600691")


def test_keys_and_masks_of_one_purpose_fit_no_other():
    seed, digest = bytes(16), bytes(32)
    made = [derived(seed, digest, "a"), derived(seed, digest, "b"), derived(seed, bytes([1] * 32), "a")]
    assert len({*made}) == 3
    one, two = exchange_key(b"1" * 16, digest, "mask"), exchange_key(b"2" * 16, digest, "mask")
    left = pair_mask(one, "a", public_bytes(two), "b", digest, 9)
    right = pair_mask(two, "b", public_bytes(one), "a", digest, 9)
    assert not np.any(left + right)
    assert np.unique(left).size == 9


def test_shares_of_a_threshold_restore_a_seed_and_fewer_do_not():
    holders = [f"s{number}" for number in range(7)]
    shares = split(b"sixteen bytes ok", 5, holders)
    for chosen in (holders[:5], holders[2:], holders[::-1][:5]):
        assert combine({name: shares[name] for name in chosen}, holders) == b"sixteen bytes ok"
    assert combine({name: shares[name] for name in holders[:4]}, holders) != b"sixteen bytes ok"
