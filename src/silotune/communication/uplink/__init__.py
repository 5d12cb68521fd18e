"""What a silo's change passes before it leaves: clipping, noise, fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from silotune.communication.privacy.accountant import gaussian_multiplier
from silotune.communication.privacy.clipping import Clip
from silotune.communication.privacy.gaussian import Gaussian
from silotune.communication.privacy.laplace import Laplace, laplace_scale
from silotune.communication.uplink.codecs import Codec, Float16, UniformQuantizer
from silotune.communication.uplink.pipeline import NO_UPLINK, UplinkPipeline, UplinkStep

if TYPE_CHECKING:
    from silotune.config.uplink import UplinkConfig


__all__ = ["CODECS", "NOISES", "NO_UPLINK", "UplinkPipeline", "make_pipeline"]


def make_pipeline(config: UplinkConfig, seed: int = 0, secret: bytes | None = None) -> UplinkPipeline:
    """The configured chain.

    Raises:
        InputError: Gaussian noise is wanted and the accountant's library is not installed.
    """
    return UplinkPipeline(tuple(config.name), _steps(config), _codec(config), bool(config.feedback), seed, secret)


def _laplace(config: UplinkConfig) -> UplinkStep:
    assert config.clip is not None, "the section fills it in"
    assert config.epsilon is not None, "the section fills it in"
    return Laplace(laplace_scale(config.clip, config.epsilon))


def _gaussian(config: UplinkConfig) -> UplinkStep:
    assert config.clip is not None, "the section fills it in"
    assert config.epsilon is not None, "the section fills it in"
    assert config.delta is not None, "the section fills it in"
    return Gaussian(2 * config.clip * gaussian_multiplier(config.epsilon, config.delta))


NOISES: dict[str, Callable[[UplinkConfig], UplinkStep]] = {"laplace": _laplace, "gaussian": _gaussian}
"""How much of each; `privacy/budget.py` `ACCOUNTS` says what each costs."""


CODECS: dict[str, Callable[[UplinkConfig], Codec]] = {
    "fp16": lambda config: Float16(),
    "int8": lambda config: UniformQuantizer(127, config.rounding == "stochastic"),
    "int4": lambda config: UniformQuantizer(7, config.rounding == "stochastic"),
}


def _steps(config: UplinkConfig) -> tuple[UplinkStep, ...]:
    if "clip" not in config.name:
        return ()
    assert config.clip is not None, "the section fills it in"
    assert config.norm is not None, "the section fills it in"
    clip = Clip(config.clip, config.norm)
    return (clip,) if config.noise is None else (clip, NOISES[config.noise](config))


def _codec(config: UplinkConfig) -> Codec | None:
    return None if config.codec is None else CODECS[config.codec](config)
