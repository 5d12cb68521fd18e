"""Set up noise on rows (`privacy.unit`): compute each silo's noise, and refuse settings that exclude it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from silotune.communication.privacy.budget import DELTA, Privacy
from silotune.communication.privacy.row_accountant import RowAccount, noise_multiplier
from silotune.config import Config, dump
from silotune.errors import InputError
from silotune.training.context import TrainingContext
from silotune.training.row_privacy import RowPlan, RowPrivacy
from silotune.training.silo import Silo
from silotune.training.taint import noised_phases

_SIMULATED = "whoever knows the run's seed, from which a simulation draws the noise"


def make_row_privacy(
    config: Config,
    context: TrainingContext,
    silos: Mapping[str, Silo],
    choose: Callable[[int], Sequence[str]],
    secret: bytes | None = None,
) -> tuple[RowPrivacy, Privacy]:
    """Return the noise on rows of each silo, and the guarantee of the run.

    Args:
        config: the run's configuration, with `privacy.unit`.
        context: the method's phases.
        silos: the silos whose rows are here.
        choose: round → the silos that take part in it; the draw is public.
        secret: the silo's own secret; None: the run is a simulation, whose draws follow from its seed.
    """
    privacy = config.privacy
    assert privacy.epsilon is not None, "the section refuses less"
    assert privacy.unit is not None, "callers look"
    delta = privacy.delta or DELTA
    phases = _checked_phases(context, next(iter(silos.values())))
    settled = RowPrivacy(
        privacy.clip,
        privacy.rows_per_unit,
        {},
        phases,
        secret,
        config.seed,
        hashlib.sha256(f"{dump(config)}{context.backbone.fingerprint}".encode()).hexdigest(),
    )
    context.row_privacy = settled
    plans, numbers = {}, range(1, config.rounds + 1)
    noised = [phase for phase in context.phases if settled.covers(phase)]
    chosen = [{*choose(number)} for number in numbers]
    for name, silo in silos.items():
        steps, taken = [(phase, context.steps(silo, phase)) for phase in noised], [0]
        for number, silos_of_round in zip(numbers, chosen, strict=True):
            own = (count for phase, count in steps if phase.runs_in(number) or phase.also_first)
            taken.append(taken[-1] + (sum(own) if name in silos_of_round else 0))
        rate = context.rate_of_units(silo)
        multiplier = noise_multiplier(privacy.epsilon, delta, rate, taken[-1])
        plans[name] = RowPlan(privacy.unit, rate, tuple(taken), multiplier)
    most = max(plans.values(), key=lambda plan: plan.rate**2 * plan.steps[-1])
    account = RowAccount(most.multiplier, most.rate, list(most.steps[1:]), delta)
    words = f"gaussian noise on every step, each {privacy.unit}'s gradient clipped to an l2 norm of {privacy.clip:g}"
    guarantee = Privacy(
        account,
        account.total(1),
        words,
        config.rounds,
        config.rounds,
        config.rounds,
        None,
        ("users of a silo's own model", *([] if secret else [_SIMULATED])),
    )
    return settled.planned(plans), guarantee


def _checked_phases(context: TrainingContext, silo: Silo) -> frozenset[str]:
    """Return the names of the phases that need noise; refuse a method whose phases cannot have it."""
    method = context.method
    if method.server_phases() or method.labeled_only:
        raise InputError(
            f"privacy.unit: the coordinator's labeled rows of method {method.name} come from silos without noise; "
            "allowed: a method without them"
        )
    phases = noised_phases(context, silo)
    if any(phase.name in phases and not phase.by_row for phase in context.phases):
        raise InputError(
            f"privacy.unit: the loss of method {method.name} couples the rows of a batch; allowed: losses that are "
            "means over rows (FedMCP: method.mu=0 or method.similarity=cosine)"
        )
    return phases
