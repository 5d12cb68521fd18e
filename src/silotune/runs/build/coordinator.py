"""The coordinator: whom it samples, how it combines what they send, and what its rounds promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from silotune.communication.aggregation import AGGREGATIONS, make_aggregation
from silotune.communication.aggregation.server_optimizer import ServerOptimizer
from silotune.communication.privacy.budget import Privacy, make_privacy
from silotune.communication.privacy.central_noise import CentralNoise
from silotune.communication.privacy.noise_stream import read_secret, secret_seed
from silotune.communication.uplink import NO_UPLINK, make_pipeline
from silotune.config import Config
from silotune.core.tensors import State
from silotune.data.tasks import SiloData
from silotune.training.coordinator import Coordinator, silos_a_round

_LABELED = "the labeled rows that the coordinator trains on (in a simulation they are drawn from the silos' rows)"


def make_coordinator(
    config: Config, shared: State, silos: Collection[str], groups: Mapping[str, str] | None
) -> Coordinator:
    """The coordinator of these silos, which begins with these shared parts.

    Raises:
        InputError: for an aggregation, an uplink or a secret that cannot be.
    """
    communicates = any(shared.values())
    secret = read_secret(config.privacy.secret) if communicates else None
    server, a_round = config.server, sum(chosen for _, chosen in sampled_sizes(config, silos, groups))
    noise = _central_noise(config, a_round, secret) if communicates else None
    return Coordinator(
        shared,
        # where nothing is combined, no number of silos is too small
        make_aggregation(config.aggregation, a_round) if communicates else AGGREGATIONS["uniform"],
        config.seed if noise is None or secret is None else secret_seed(config.seed, secret),
        fraction=config.sampling.fraction,
        count=config.sampling.count,
        groups=groups,
        max_norm=config.aggregation.max_norm,
        clip=config.aggregation.clip,
        optimizer=ServerOptimizer(server.optimizer, server.lr, server.beta1, server.beta2, server.tau),
        uplink=make_pipeline(config.uplink, config.seed, secret) if communicates else NO_UPLINK,
        noise=noise,
    )


def _central_noise(config: Config, a_round: int, secret: bytes | None) -> CentralNoise | None:
    chosen = config.aggregation
    if chosen.noise_multiplier is None:
        return None
    assert chosen.clip is not None, "the section refuses less"
    return CentralNoise(chosen.noise_multiplier, chosen.clip, a_round, config.seed, secret)


def privacy_guarantee(
    config: Config, silos: Sequence[str], groups: Mapping[str, str] | None, labelled: bool
) -> Privacy | None:
    """What a run over these silos promises; None without noise. It follows from the configuration and names alone.

    `labelled`: whether the coordinator trains on labeled rows.
    """
    sampling = config.sampling
    chooser = Coordinator(
        {}, AGGREGATIONS["uniform"], config.seed, fraction=sampling.fraction, count=sampling.count, groups=groups
    )
    found = make_privacy(config, sampled_sizes(config, silos, groups), lambda number: chooser.choose(number, silos))
    return replace(found, uncovered=(*found.uncovered, _LABELED)) if found and labelled else found


def sampling_groups(config: Config, data: Iterable[SiloData]) -> dict[str, str] | None:
    """Silo → the group that silos are drawn from by themselves: its task; None: from all."""
    return {silo.name: silo.task.name for silo in data} if config.sampling.per_task else None


def sampled_sizes(config: Config, silos: Iterable[str], groups: Mapping[str, str] | None) -> list[tuple[int, int]]:
    """Per group of silos (all are one without groups): how many there are, and how many take part in a round."""
    sizes = Counter("" if groups is None else groups[name] for name in silos)
    sampling = config.sampling
    return [(size, silos_a_round(size, sampling.fraction, sampling.count)) for _, size in sorted(sizes.items())]
