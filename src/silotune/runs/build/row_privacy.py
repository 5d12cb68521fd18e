"""Set up noise on rows (`privacy.unit`): how much every silo adds, and what cannot have it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from silotune.communication.privacy.budget import DELTA, Privacy
from silotune.communication.privacy.row_accountant import RowAccount, noise_multiplier
from silotune.config import Config, dump
from silotune.errors import InputError
from silotune.training.context import TrainingContext
from silotune.training.row_privacy import RowPrivacy
from silotune.training.silo import Silo
from silotune.training.taint import noised_phases


def make_row_privacy(
    config: Config, context: TrainingContext, silos: Mapping[str, Silo], choose: Callable[[int], Sequence[str]]
) -> tuple[RowPrivacy, Privacy]:
    """Return the noise on rows of each silo, and the guarantee of the run.

    Args:
        config: the run's configuration, with `privacy.unit`.
        context: the method's phases.
        silos: the silos whose rows are here.
        choose: round → the silos that take part in it; the draw is public.
    """
    privacy = config.privacy
    assert privacy.epsilon is not None, "the section refuses less"
    delta = privacy.delta or DELTA
    if context.method.server_phases() or context.method.labeled_only:
        raise InputError(
            f"privacy.unit: the coordinator's labeled rows of method {context.method.name} come from silos without "
            "noise; allowed: a method without them"
        )
    phases = noised_phases(context, next(iter(silos.values())))
    for phase in context.phases:
        if phase.name in phases and not phase.by_row:
            raise InputError(
                f"privacy.unit: the loss of method {context.method.name} couples the rows of a batch; allowed: losses "
                "that are means over rows (FedMCP: method.mu=0 or method.similarity=cosine)"
            )
    context.row_privacy = RowPrivacy(privacy.clip, 1, {}, phases, None, config.seed, "")
    taken = {name: [0] for name in silos}
    for number in range(1, config.rounds + 1):
        chosen = set(choose(number))
        for name, silo in silos.items():
            trained = [phase for phase in context.phases if phase.name in phases and phase.runs_in(number)]
            steps = sum(context.steps(silo, phase) for phase in trained) if name in chosen else 0
            taken[name].append(taken[name][-1] + steps)
    rates = {name: context.rate_of_units(silo) for name, silo in silos.items()}
    multipliers = {
        name: noise_multiplier(privacy.epsilon, delta, rates[name], steps[-1]) for name, steps in taken.items()
    }
    run = hashlib.sha256(dump(config).encode()).hexdigest()
    noise = RowPrivacy(privacy.clip, 1, multipliers, phases, None, config.seed, run)
    most = max(silos, key=lambda name: (rates[name] ** 2 * taken[name][-1], name))
    account = RowAccount(multipliers[most], rates[most], taken[most][1:], delta)
    words = f"gaussian noise on every step, each row's gradient clipped to an l2 norm of {privacy.clip:g}"
    guarantee = Privacy(
        account,
        account.total(1),
        words,
        config.rounds,
        config.rounds,
        config.rounds,
        None,
        ("users of a silo's own model",),
    )
    return noise, guarantee
