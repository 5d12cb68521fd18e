"""Build a run's coordinator, its aggregation, its privacy guarantee and its sampling of silos."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from silotune.aggregation import BY_ROWS, Aggregation, BroadcastAggregation, SiloAggregation, score_read_by, uniform
from silotune.aggregation.robust import krum, most_byzantine, multi_krum, trimmed_mean
from silotune.aggregation.server_optimizer import ServerOptimizer
from silotune.communication.masks.fixed_point import MOST_WEIGHT
from silotune.communication.privacy import accountant
from silotune.communication.privacy.accountant import DELTA, Account, Privacy
from silotune.communication.privacy.noise import CentralNoise, read_secret, secret_seed
from silotune.communication.uplink import NO_UPLINK, make_pipeline
from silotune.config import Config, registries
from silotune.config.coordinator import AggregationConfig
from silotune.config.section import make_registered
from silotune.core.numeric import ceil_fraction
from silotune.core.tensors import State
from silotune.data.tasks import Task
from silotune.errors import InputError
from silotune.methods import Method
from silotune.methods.lora_products import CorrectedMeans
from silotune.runs.build.plan_row_noise import digest_of_run
from silotune.training.context import TrainingContext
from silotune.training.coordinator import Coordinator
from silotune.training.mean_of_iterates import MeanOfIterates
from silotune.training.silo import Silo
from silotune.training.silo_sampling import SiloSampling, silos_a_round

Choose = Callable[[int], Sequence[str]]
"""Round → the silos that take part in it. The draw does not depend on rows, so it may be public."""

SEEDED = "whoever knows the run's seed, which noise is drawn from without a secret (privacy.secret; a silo's own)"


def make_privacy(config: Config, sampled: Sequence[tuple[int, int]], choose: Choose) -> Privacy | None:
    """Return the guarantee of the configured noise; None without noise.

    `sampled` has the size of each group of silos, and the number of its silos in a round.
    """
    if config.aggregation.noise_multiplier is not None:
        return _central(config, sampled, choose)
    uplink = config.uplink
    if uplink.noise is None:
        return None
    noise = f"{uplink.noise} noise in every silo, on a change clipped to an {uplink.norm} norm of {uplink.clip:g}"
    return _by_participation(config, ACCOUNTS[uplink.noise](config), noise, choose)


def _by_participation(config: Config, account: Account, noise: str, choose: Choose) -> Privacy:
    """Return the guarantee if participation is public: a silo spends ε in the rounds in which it takes part."""
    counts, budget = _participations(config.rounds, choose), config.privacy.epsilon
    rounds = config.rounds
    if budget is not None:
        fitting = accountant.affordable_uses(account, budget, counts[-1])
        rounds = sum(count <= fitting for count in counts)
    uses = counts[rounds - 1] if rounds else 0
    limits = () if config.privacy.secret else (SEEDED,)
    return Privacy(account, account.total(1), noise, config.rounds, rounds, uses, budget, limits)


def _laplace(config: Config) -> Account:
    assert config.uplink.epsilon is not None, "the section fills it in"
    return accountant.LaplaceAccount(config.uplink.epsilon, config.privacy.delta or 0.0)


def _gaussian(config: Config) -> Account:
    uplink = config.uplink
    assert uplink.epsilon is not None, "the section fills it in"
    assert uplink.delta is not None, "the section fills it in"
    multiplier = accountant.gaussian_multiplier(uplink.epsilon, uplink.delta)
    return accountant.GaussianAccount(multiplier, config.privacy.delta or uplink.delta)


ACCOUNTS: dict[str, Callable[[Config], Account]] = {"laplace": _laplace, "gaussian": _gaussian}
"""Account of each noise of `uplink.NOISES`."""


def _participations(rounds: int, choose: Choose) -> list[int]:
    """Return after each round the number of participations of the most frequent silo."""
    participations: Counter[str] = Counter()
    counts = []
    for number in range(1, rounds + 1):
        participations.update(choose(number))
        counts.append(max(participations.values()))
    return counts


def _central(config: Config, sampled: Sequence[tuple[int, int]], choose: Choose) -> Privacy:
    aggregation, budget = config.aggregation, config.privacy.epsilon
    assert aggregation.noise_multiplier is not None, "there is central noise"
    assert aggregation.clip is not None, "the section refuses noise without it"
    # the noise is z·C/m; one silo's rows replaced move the mean by 2C/m
    multiplier, delta = aggregation.noise_multiplier / 2, config.privacy.delta or DELTA
    everyone, sample = (sum(numbers) for numbers in zip(*sampled, strict=True))
    noise = (
        f"gaussian noise on the coordinator's mean over {sample} of {everyone} silos, each change clipped to an l2 "
        f"norm of {aggregation.clip:g}"
    )
    if config.privacy.secret is None or sample == everyone:
        return _by_participation(config, accountant.CentralAccount(multiplier, delta), noise, choose)
    # groups are sampled separately; participation is least hidden in the group with the largest sampled fraction
    silos, a_round = max(sampled, key=lambda group: group[1] / group[0])
    account = accountant.SampledCentralAccount(multiplier, delta, silos, a_round)
    rounds = config.rounds if budget is None else accountant.affordable_uses(account, budget, config.rounds)
    return Privacy(account, account.total(1), noise, config.rounds, rounds, rounds, budget)


_LABELED = "the labeled rows that the coordinator trains on (in a simulation they are drawn from the silos' rows)"

_PLAIN_MEANS = ("samples", "uniform")
"""Aggregations that presets name for any method, also for one that combines its parts in its own way."""


def build_coordinator(
    config: Config,
    context: TrainingContext,
    silos: Mapping[str, Silo],
    tasks: Mapping[str, Task],
    labeled: bool,
    shared: State | None = None,
) -> tuple[Coordinator, Privacy | None]:
    """Build the coordinator of these silos, with the initial shared parts, and the privacy guarantee of its rounds.

    Args:
        config: the run's configuration.
        context: derives the initial shared parts.
        silos: the training silos by name.
        tasks: silo name → task, before a centralized method puts silos together.
        labeled: whether the coordinator trains on labeled rows.
        shared: the initial shared parts as all these silos receive them, or their shapes alone; None: they are made,
            and every silo receives them at its own rank.
    """
    shared_is_made = shared is None
    shared = context.initial.shared(silos.values()) if shared is None else shared
    groups = None if context.method.centralized else sampling_groups(config, tasks)
    communicates = any(shared.values())
    secret = read_secret(config.privacy.secret) if communicates else None
    server, chosen_a_round = config.server, sum(number for _, number in sampled_sizes(config, silos, groups))
    named = digest_of_run(config, context) if secret else ""
    # where nothing is combined, no number of silos is too small
    aggregation = make_aggregation(config.aggregation, chosen_a_round) if communicates else uniform
    if isinstance(aggregation, SiloAggregation) and (server.optimizer, server.lr) != ("none", 1):
        raise InputError(
            f"aggregation={config.aggregation.name}: every silo receives tensors of its own, not one mean; allowed: "
            "server.optimizer=none, server.lr=1"
        )
    noise, multiplier = None, config.aggregation.noise_multiplier
    if communicates and multiplier is not None:
        assert config.aggregation.clip is not None, "the section refuses noise without it"
        noise = CentralNoise(multiplier, config.aggregation.clip, chosen_a_round, config.seed, secret, named)
    key = "privacy.unit" if config.privacy.unit is not None else "uplink" if config.uplink.noise is not None else ""
    if communicates and key and score_read_by(config.aggregation.name):
        raise InputError(
            f"{key}: aggregation={config.aggregation.name} reads a number of silos' rows that has no noise; allowed: "
            "samples, uniform"
        )
    own = context.method.aggregations_of_parts if communicates else {}
    if config.aggregation.secure:
        _check_sums(config, context.method, silos)
    if own:
        _check_own(config, context.method, all(name in own or not shared[name] for name in shared))
    privacy = privacy_guarantee(config, sorted(silos), groups, labeled) if communicates else None
    coordinator = Coordinator(
        shared,
        aggregation if noise is None else noise,
        context,
        sampling=_sampling(config, groups, None if noise is None else secret),
        settings=config.aggregation,
        optimizer=ServerOptimizer(server.optimizer, server.lr, server.beta1, server.beta2, server.tau),
        uplink=make_pipeline(config.uplink, config.seed, secret, named) if communicates else NO_UPLINK,
        ranks=context.initial.ranks if shared_is_made else {},
        silos=len(silos),
        mean=_mean_of_iterates(config, context.method, aggregation, privacy.rounds if privacy else config.rounds),
    )
    return coordinator, privacy


def _mean_of_iterates(
    config: Config, method: Method, aggregation: Aggregation | BroadcastAggregation, rounds: int
) -> MeanOfIterates | None:
    """Return the mean over rounds of heads and over those of a method's own; refuse tensors that have none."""
    if config.server.average is None:
        return None
    refused = {
        f"aggregation={config.aggregation.name} makes tensors that hold together as they are": isinstance(
            aggregation, BroadcastAggregation
        ),
        f"method {method.name} aggregates or redraws parts in its own way": bool(method.aggregations_of_parts)
        or any(part.redrawn for part in method.parts().values()),
        "train.early_stopping may end the run before its mean is taken": config.train.early_stopping is not None,
    }
    for why, condition in refused.items():
        if condition:
            raise InputError(f"server.average: {why}; leave it out")
    return MeanOfIterates(config.server.average, sorted({min(method.options.head_rounds, rounds), rounds} - {0}))


def _check_sums(config: Config, method: Method, silos: Mapping[str, Silo]) -> None:
    """Refuse methods that combine more than sums, and weights that a sum has no room for."""
    own = ", ".join(sorted(method.aggregations_of_parts))
    largest = max((silo.rows for silo in silos.values()), default=1) if config.aggregation.name in BY_ROWS else 1
    refused = {
        f"method {method.name} combines {own} in its own way, from single updates; allowed: methods whose shared parts "
        "are averaged, such as fedavg or fedmcp": own,
        "silos of several LoRA ranks (tuner.ranks) have no common sum": method.setting.tuner.ranks,
        f"method {method.name} trains in one place, so nothing is summed; leave it out": method.centralized,
        f"a silo's weight is {largest:,}, and sums hold at most {MOST_WEIGHT:,}; allowed: aggregation=uniform": (
            largest > MOST_WEIGHT
        ),
    }
    for why, condition in refused.items():
        if condition:
            raise InputError(f"aggregation.secure: {why}")


def _check_own(config: Config, method: Method, all_parts: bool) -> None:
    """Refuse settings that say nothing of parts with aggregations of their own, which all shared ones or some have."""
    refused = {
        "aggregation.noise_multiplier": config.aggregation.noise_multiplier is not None,
        "aggregation": all_parts and config.aggregation.name not in _PLAIN_MEANS,
        "tuner.ranks": bool(method.setting.tuner.ranks),
        "server.optimizer": all_parts and config.server.optimizer != "none",
        "server.lr": all_parts and config.server.lr != 1,
    }
    for key, condition in refused.items():
        if condition:
            raise InputError(f"{key}: method {method.name} aggregates parts in its own way; leave it out")


def privacy_guarantee(
    config: Config, silos: Sequence[str], groups: Mapping[str, str] | None, labeled: bool
) -> Privacy | None:
    """Return the privacy guarantee of a run over these silos, whose coordinator may have `labeled` rows, too."""
    sampling = _sampling(config, groups)
    privacy = make_privacy(config, sampled_sizes(config, silos, groups), lambda number: sampling.choose(number, silos))
    return replace(privacy, uncovered=(*privacy.uncovered, _LABELED)) if privacy and labeled else privacy


def _sampling(config: Config, groups: Mapping[str, str] | None, secret: bytes | None = None) -> SiloSampling:
    seed = config.seed if secret is None else secret_seed(config.seed, secret)
    return SiloSampling(seed, config.sampling.fraction, config.sampling.count, groups)


def sampling_groups(config: Config, tasks: Mapping[str, Task]) -> dict[str, str] | None:
    """Return silo name → sampling group, which is its task; None if silos are sampled from all."""
    return {silo: task.name for silo, task in tasks.items()} if config.sampling.per_task else None


def sampled_sizes(config: Config, silos: Iterable[str], groups: Mapping[str, str] | None) -> list[tuple[int, int]]:
    """Return, per sampling group, its number of silos and how many of them are sampled in a round."""
    sizes = Counter("" if groups is None else groups[name] for name in silos)
    sampling = config.sampling
    return [(size, silos_a_round(size, sampling.fraction, sampling.count)) for _, size in sorted(sizes.items())]


def make_aggregation(config: AggregationConfig, silos: int) -> Aggregation | BroadcastAggregation:
    """Return the configured aggregation for rounds of so many silos."""
    if config.name in registries.AGGREGATIONS:
        rule: Aggregation | BroadcastAggregation = make_registered(registries.AGGREGATIONS, config.name, config.options)
        return rule
    if config.name == CorrectedMeans.name:
        return CorrectedMeans(config.regularization)
    if config.name == "trimmed-mean":
        return _trimmed_mean(config.trim, silos)
    byzantine = _byzantine(config, silos)
    if config.name == "krum":
        return partial(krum, byzantine=byzantine)
    if config.byzantine is None:
        byzantine = max(byzantine, 1)  # of 3 or 4 silos Krum's bound allows none, and all would be averaged
    if config.keep is not None and config.keep > silos - byzantine:
        raise InputError(
            f"aggregation.keep: {config.keep} updates of a round's {silos}, of which {byzantine} may be malicious "
            f"(aggregation.byzantine); allowed: up to {silos - byzantine}"
        )
    return partial(multi_krum, byzantine=byzantine, keep=config.keep)


def _trimmed_mean(trim: float, silos: int) -> Aggregation:
    cut = ceil_fraction(trim, silos)
    if 2 * cut >= silos:
        most = math.floor(1000 * ((silos - 1) // 2) / silos) / 1000
        rule = f"up to {most:g}" if silos > 2 else "another aggregation (it needs 3 silos)"
        raise InputError(
            f"aggregation.trim: {trim:g} cuts {cut} at each end, and only {silos} silos take part in a round; "
            f"allowed: {rule}"
        )
    return partial(trimmed_mean, trim=trim)


def _byzantine(config: AggregationConfig, silos: int) -> int:
    """Return Krum's f: the configured one, or the largest that this number of silos allows."""
    if silos < 3:
        raise InputError(f"aggregation={config.name}: needs at least 3 silos in a round, but only {silos} take part")
    most = most_byzantine(silos)
    if config.byzantine is not None and config.byzantine > most:
        raise InputError(
            f"aggregation.byzantine: {config.byzantine} malicious silos among {silos} in a round are too many for "
            f"{config.name} (it needs n >= 2f + 3); allowed: up to {most}"
        )
    return most if config.byzantine is None else config.byzantine
