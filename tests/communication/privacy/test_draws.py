"""The seed that a secret gives, against Python's own HMAC."""

from __future__ import annotations

import hashlib
import hmac

from silotune.communication.privacy.noise_stream import secret_seed


def test_a_secret_seed_is_63_bits_of_an_hmac():
    code = hmac.new(b"secret", b"choose\x1f7", hashlib.sha256).hexdigest()
    assert secret_seed(7, b"secret") == int(code[:16], 16) // 2
