"""Make the configured uplink of clipping, noise and codec, and register codecs from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from silotune.communication.privacy.accountant import gaussian_multiplier
from silotune.communication.privacy.noise import BareNoise, Clip, Gaussian, Laplace
from silotune.communication.uplink.codecs import Codec, Float16, SeededCodec, UniformQuantizer
from silotune.communication.uplink.pipeline import NO_UPLINK, UplinkPipeline, UplinkStep
from silotune.communication.uplink.sparse import RandomK, TopK
from silotune.config import registries
from silotune.config.section import make_registered

if TYPE_CHECKING:
    from silotune.config.uplink import UplinkConfig


__all__ = [
    "BUILT_IN_CODECS",
    "NOISES",
    "NO_UPLINK",
    "Codec",
    "SeededCodec",
    "UplinkPipeline",
    "make_pipeline",
    "register_codec",
]

BUILT_IN_CODECS: dict[str, type[Codec] | Callable[[UplinkConfig], Codec]] = {
    "fp16": Float16,
    "int8": lambda config: UniformQuantizer(127, config.rounding == "stochastic"),
    "int4": lambda config: UniformQuantizer(7, config.rounding == "stochastic"),
    "topk": TopK,
    "randomk": RandomK,
}
"""Classes, made with their `Options`; or functions of the section, where an option is one of its own keys."""

registries.CODECS.built_in = BUILT_IN_CODECS


def make_pipeline(config: UplinkConfig, seed: int = 0, secret: bytes | None = None, run: str = "") -> UplinkPipeline:
    """Return the pipeline of clipping, noise and codec that the section `uplink` describes."""
    own_key = config.codec is None or config.codec in registries.CODECS.reserved
    codec_key = None if own_key else f"{config.codec} {config.options}"
    return UplinkPipeline(
        tuple(config.name), _steps(config), _codec(config), bool(config.feedback), seed, secret, codec_key, run
    )


def _laplace(config: UplinkConfig) -> UplinkStep:
    assert config.clip is not None, "the section fills it in"
    assert config.epsilon is not None, "the section fills it in"
    return Laplace(2 * config.clip / config.epsilon, config.clip)


def _gaussian(config: UplinkConfig) -> UplinkStep:
    assert config.clip is not None, "the section fills it in"
    assert config.epsilon is not None, "the section fills it in"
    assert config.delta is not None, "the section fills it in"
    return Gaussian(2 * config.clip * gaussian_multiplier(config.epsilon, config.delta), config.clip)


NOISES: dict[str, Callable[[UplinkConfig], UplinkStep]] = {"laplace": _laplace, "gaussian": _gaussian}
"""Name → the noise step of a configuration; `runs/build/coordinator.py` `ACCOUNTS` has the cost of each."""


def _steps(config: UplinkConfig) -> tuple[UplinkStep, ...]:
    if config.bare_noise is not None:
        assert config.scale is not None, "the section refuses it without"
        return (BareNoise(config.scale, config.bare_noise),)
    if "clip" not in config.name:
        return ()
    assert config.clip is not None, "the section fills it in"
    assert config.norm is not None, "the section fills it in"
    clip = Clip(config.clip, config.norm)
    return (clip,) if config.noise is None else (clip, NOISES[config.noise](config))


def _codec(config: UplinkConfig) -> Codec | None:
    if config.codec is None:
        return None
    make = BUILT_IN_CODECS.get(config.codec)
    if make is not None and not isinstance(make, type):
        return make(config)
    codec: Codec = make_registered(registries.CODECS, config.codec, config.options)
    return codec


Made = TypeVar("Made", bound=Callable[..., Codec])


@overload
def register_codec(name: str) -> Callable[[Made], Made]: ...


@overload
def register_codec(name: str, codec: Made) -> Made: ...


def register_codec(name: str, codec: Any = None) -> Any:
    """Register a codec in this process; with the name alone, return a decorator of its class.

    Other processes of a run find it if an entry point of the group `silotune.codecs` names it, or if their script
    also registers it.

    Args:
        name: the name that `uplink=` chooses it by.
        codec: a class with the methods of `Codec`, which is called without arguments or, if it has a pydantic model
            `Options`, with the options of the section `uplink`.
    """
    return registries.CODECS.register_as(name, codec)


def _problem(value: object) -> str | None:
    if not isinstance(value, type):
        return f"must be a class with the methods of Codec (got {value!r})"
    missing = [method for method in ("layout", "encode", "decode") if not callable(getattr(value, method, None))]
    if not hasattr(value, "draws") and "draws" not in getattr(value, "__annotations__", {}):
        missing.append("draws")
    if missing:
        return f"class {value.__name__} does not define {', '.join(missing)}"
    return registries.options_problem(value)


registries.CODECS.problem = _problem
