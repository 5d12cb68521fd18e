"""What a silo's change passes before it leaves: clipping, noise, fewer bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from silotune.privacy.accounting import gaussian_multiplier
from silotune.uplink.base import NO_UPLINK, Chain, Step
from silotune.uplink.clip import Clip
from silotune.uplink.gaussian import Gaussian
from silotune.uplink.laplace import Laplace, laplace_scale
from silotune.uplink.quantize import Codec, Half, Integers

if TYPE_CHECKING:
    from silotune.config.uplink import UplinkConfig

__all__ = ["NO_UPLINK", "Chain", "make_chain"]


def make_chain(config: UplinkConfig, seed: int = 0, secret: bytes | None = None) -> Chain:
    """The configured chain.

    Raises:
        InputError: Gaussian noise is wanted and the accountant's library is not installed.
    """
    return Chain(tuple(config.name), _steps(config), _codec(config), bool(config.feedback), seed, secret)


def _steps(config: UplinkConfig) -> tuple[Step, ...]:
    if "clip" not in config.name:
        return ()
    assert config.clip is not None, "the section fills it in"
    assert config.norm is not None, "the section fills it in"
    clip = Clip(config.clip, config.norm)
    if config.noise is None:
        return (clip,)
    assert config.epsilon is not None, "the section fills it in"
    if config.noise == "laplace":
        return (clip, Laplace(laplace_scale(config.clip, config.epsilon)))
    assert config.delta is not None, "the section fills it in"
    return (clip, Gaussian(2 * config.clip * gaussian_multiplier(config.epsilon, config.delta)))


def _codec(config: UplinkConfig) -> Codec | None:
    if config.codec in (None, "fp16"):
        return None if config.codec is None else Half()
    return Integers(127 if config.codec == "int8" else 7, config.rounding == "stochastic")
