"""Laplace numbers against SciPy's, and the seed that a secret gives, against Python's own HMAC."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from scipy.stats import laplace

from silotune.communication.privacy.laplace import laplace_number
from silotune.communication.privacy.noise_stream import secret_seed


@pytest.mark.parametrize("uniform", [1e-9, 0.01, 0.25, 0.4999, 0.5, 0.75, 0.99, 1 - 1e-9])
def test_a_laplace_number_is_the_inverse_of_the_survival_function(uniform):
    assert laplace_number(uniform) == pytest.approx(laplace.isf(uniform), rel=1e-6, abs=1e-15)


def test_no_uniform_number_gives_infinity():
    assert laplace_number(0.0) == 0.0


def test_a_secret_seed_is_63_bits_of_an_hmac():
    code = hmac.new(b"secret", b"choose\x1f7", hashlib.sha256).hexdigest()
    assert secret_seed(7, b"secret") == int(code[:16], 16) // 2
