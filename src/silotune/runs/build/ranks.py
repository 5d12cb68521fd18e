"""LoRA ranks per silo: `with_silo_ranks` gathers them in `tuner.ranks`, `for_silo` takes one; `check_ranks`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from silotune.config import Choice, Config
from silotune.errors import InputError, unknown_name_error
from silotune.methods import Method
from silotune.models.tuners import TUNERS


def with_silo_ranks(config: Config) -> Config:
    """Move the ranks that entries of `silos` set to `tuner.ranks`, overriding its values."""
    ranks = {silo.name: silo.rank for silo in config.silos if silo.rank is not None}
    if not ranks:
        return config
    silos = [silo.model_copy(update={"rank": None}) for silo in config.silos]
    return with_ranks(config.model_copy(update={"silos": silos}), ranks)


def with_ranks(config: Config, ranks: Mapping[str, int]) -> Config:
    """Return the configuration with these values in `tuner.ranks`."""
    if "ranks" not in TUNERS.find(config.tuner.name).Options.model_fields:
        able = ", ".join(name for name, tuner in TUNERS.items() if "ranks" in tuner.Options.model_fields)
        raise InputError(f"silos.{next(iter(ranks))}.rank: tuner={config.tuner.name} has no rank; allowed: {able}")
    options = config.tuner.options
    given = options.get("ranks") or {}
    return config.model_copy(
        update={"tuner": Choice(name=config.tuner.name, **options | {"ranks": {**given, **ranks}})}
    )


def rank_of(method: Method, silo: str, most: int | None = None) -> int | None:
    """Return the rank of a silo in a run, which is at most `most`; None: the tuner has no ranks."""
    tuner = method.setting.tuner
    return None if tuner.rank is None else min(tuner.ranks.get(silo, tuner.rank), most or tuner.rank)


def for_silo(config: Config, method: Method, silo: str, most: int | None) -> Config:
    """Return the configuration of a run for one silo alone, which has `tuner.ranks` of this silo only.

    Args:
        config: the run's.
        method: the configured method.
        silo: the silo's name.
        most: the silo's own bound of its rank; None: none.
    """
    rank, tuner = rank_of(method, silo, most), method.setting.tuner
    if rank is None:
        return config
    options = {key: value for key, value in config.tuner.options.items() if key != "ranks"}
    own = {} if rank == tuner.rank else {"ranks": {silo: rank}}
    return config.model_copy(update={"tuner": Choice(name=config.tuner.name, **options | own)})


def check_ranks(method: Method, silos: Collection[str]) -> None:
    """Refuse ranks of silos that there are not, and those of a method that puts all silos' rows into one place."""
    ranks = method.setting.tuner.ranks
    for silo in ranks:
        if silo not in silos:
            raise unknown_name_error("silo in tuner.ranks", silo, silos)
    if ranks and method.centralized:
        raise InputError(f"tuner.ranks: method {method.name} trains one adapter on all silos' rows; leave it out")
